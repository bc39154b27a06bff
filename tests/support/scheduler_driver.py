"""A scheduler without a model: a memory that counts blocks, and a driver that executes its plans."""

from mlx_paged.engine.request import Request
from mlx_paged.engine.scheduler import Growth, ScheduledStep, Scheduler
from tests.support.requests import request_of

BLOCK = 4


class FakeMemory:
    """Blocks of BLOCK tokens; a request holds ceil(length / BLOCK) of them."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.held: dict[int, int] = {}
        self.released: list[int] = []

    def blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // BLOCK)

    @property
    def free(self) -> int:
        return self.num_blocks - sum(self.held.values())

    def fits(self, growth: Growth) -> bool:
        return sum(self.blocks(r.length + n) - self.held.get(r.uid, 0) for r, n in growth) <= self.free

    def admit(self, request: Request) -> bool:
        assert request.uid not in self.held
        self.held[request.uid] = 0
        return True

    def release(self, request: Request) -> None:
        del self.held[request.uid]
        self.released.append(request.uid)

    def append(self, request: Request, num_tokens: int) -> None:
        needed = self.blocks(request.length + num_tokens) - self.held[request.uid]
        assert needed <= self.free, "the plan does not fit"
        self.held[request.uid] += max(0, needed)


class Driver:
    """Executes plans as a generator would: requests end after ``extra`` decoded tokens."""

    def __init__(self, num_blocks: int, **options: int | None) -> None:
        self.memory = FakeMemory(num_blocks)
        options = {"token_budget": 16, "max_running": 4, "max_prefilling": 2, **options}
        self.scheduler = Scheduler(self.memory, **options)
        self.requests: dict[int, Request] = {}
        self.left: dict[int, int] = {}
        self.finished: list[int] = []
        self.failed: list[int] = []
        self.next_uid = 0

    def insert(
        self, prompt: int, extra: int, boundaries: tuple[int, ...] = (), *, priority: int = 0, client: str = ""
    ) -> Request:
        request = request_of(self.next_uid, prompt, boundaries, priority=priority, client=client)
        self.next_uid += 1
        self.requests[request.uid], self.left[request.uid] = request, extra
        self.scheduler.add(request)
        return request

    def step(self) -> ScheduledStep:
        plan = self.scheduler.plan()
        for request, _ in plan.failed:
            self.memory.held.pop(request.uid, None)
            del self.requests[request.uid]
            self.failed.append(request.uid)
        for request in plan.decode:
            assert request.length >= request.prefill_end
            self.memory.append(request, 1)
            request.length += 1
            request.num_generated += 1
            self.left[request.uid] -= 1
            if self.left[request.uid] == 0:
                self.cancel(request.uid)
                self.finished.append(request.uid)
        for request, num_tokens in plan.chunks:
            assert 0 < num_tokens <= request.prefill_end - request.length
            self.memory.append(request, num_tokens)
            request.length += num_tokens
        return plan

    def cancel(self, uid: int) -> None:
        self.scheduler.remove([self.requests.pop(uid)])
        self.memory.held.pop(uid, None)

    def run(self, most: int = 500) -> None:
        for _ in range(most):
            if not len(self.scheduler):
                return
            self.step()
        raise AssertionError("requests are left over")
