"""Commands over several ranks give the answers of one process."""

import json
import random
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest

from mlx_paged.cli.over_ranks import from_rank_0
from mlx_paged.ranks.ranks import EXIT_STATUS
from tests.support.cases import quick, slow
from tests.support.models.tiny_model import VOCAB, make_tiny_model
from tests.support.processes import commands
from tests.support.processes.server_process import BLOCK_SIZE, ServerProcess
from tests.support.processes.small_model import records
from tests.support.ranks.launch import Launch
from tests.support.ranks.ranked_server import RankedServer

LINES = [
    {"prompt": "one two three", "id": "a"},
    {"prompt": "seven", "temperature": 0.9, "seed": 5, "max_tokens": 9},
    {"prompt": "stops", "stop": ["a"], "repetition_penalty": 1.2},
    {"prompt": "", "max_tokens": -1},
    {"prompt": "who", "structured_outputs": {"regex": "[a-c]{5}-[0-9]"}},
    {"prompt": "who", "structured_outputs": {"regex": "("}},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, demo_model_folder: Path) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), demo_model_folder)


def _both(folder: Path, *args: object, size: int = 2) -> tuple[str, list[str]]:
    """Return the standard output of one process, and that of each rank."""
    alone = commands.run("mlx_paged.generate", *args, cwd=folder, timeout=200)
    found = Launch(size, "mlx_paged.generate", args, folder, MLX_PAGED_RANK_TIMEOUT="30").ended()
    for ended in found:
        assert ended.status == alone.returncode, ended.stderr
    return alone.stdout, [ended.stdout for ended in found]


def test_prompts_file_gives_the_results_of_one_process(model: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    args = ["--model", model, "--prompts-file", prompts, "--max-tokens", 16, "--kv-cache-memory", "64M"]
    alone, (first, second) = _both(tmp_path, *args)
    assert records(first) == records(alone)
    assert len(first.splitlines()) == len(LINES)
    assert second == ""


@pytest.mark.parametrize(("rank", "found"), [(0, ["read"]), (1, [])])
def test_of_first_reads_only_on_rank_0(rank: int, found: list[str]) -> None:
    reads: list[str] = []
    ranks: Any = SimpleNamespace(rank=rank, broadcast=lambda value: value if rank == 0 else "of rank 0")
    text = from_rank_0(ranks, lambda: reads.append("read") or "of rank 0")
    assert (text, reads) == ("of rank 0", found)
    assert from_rank_0(None, lambda: "alone") == "alone"


@pytest.mark.parametrize(
    ("kind", "size", "flags", "reason"),
    [
        ("llama", 4, [], "be split over 4 ranks"),
        *slow(("mamba", 2, [], "does not support tensor parallelism")),
        ("llama", 2, ["--draft-model", "."], "--draft-model is not supported with several ranks"),
    ],
)
def test_unsupported_models_and_flags_are_refused(
    kind: str, size: int, flags: list[str], reason: str, model: Path, demo_model_folder: Path, tmp_path: Path
) -> None:
    folder = model if kind == "llama" else make_tiny_model(tmp_path / kind, demo_model_folder, kind)
    args = ["--model", folder, "--prompt", "one", "--max-tokens", 2, *flags]
    for ended in Launch(size, "mlx_paged.generate", args, tmp_path).ended():
        assert ended.status in (1, EXIT_STATUS)
        assert ended.stdout in ("", "==========\n")  # the line with which mlx-lm begins an answer
        assert reason in ended.stderr


@pytest.mark.parametrize("what", ["weights", *slow("config", "tokenizer")])
def test_ranks_with_different_model_files_end(what: str, model: Path, demo_model_folder: Path, tmp_path: Path) -> None:
    places = [tmp_path / "0", tmp_path / "1"]
    for place in places:
        shutil.copytree(model, place / "model")
    other = places[1] / "model"
    if what == "weights":
        make_tiny_model(other, demo_model_folder, seed=1)
        name = "model.safetensors"
    elif what == "config":
        name = "config.json"
        (other / name).write_text(json.dumps({**json.loads((other / name).read_text()), "rms_norm_eps": 1e-3}))
    else:
        name = "tokenizer_config.json"
        (other / name).write_text((other / name).read_text() + " ")
    args = ["--model", "model", "--prompt", "one", "--max-tokens", 2]
    for ended in Launch(2, "mlx_paged.generate", args, tmp_path, places).ended():
        assert ended.status == EXIT_STATUS
        assert f"the model's files of rank 0 and rank 1 differ: {name}" in ended.stderr
        assert "2 ranks" in ended.stderr or "rank 1 of 2" in ended.stderr


FLAGS = ["--kv-cache-memory", "16M", "--prefill-step-size", "32", "--max-tokens", "12"]
LONG = "and then they went on their way through the woods " * 12
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
CASES: list[dict[str, Any]] = [
    {"prompt": "one two three", "temperature": 0},
    {"prompt": LONG, "temperature": 0, "logprobs": 2},
    {"prompt": LONG + "and home", "temperature": 0},  # most of it is cached
    {"prompt": "a dog", "temperature": 1, "seed": 5, "n": 2},
    {"prompt": "a dog", "temperature": 0.9, "seed": 2**63, "extra_body": {"top_k": 50}, "presence_penalty": 1.5},
    {"prompt": "a dog", "temperature": 1, "seed": 3, "stop": ["e", "st"]},
    {"prompt": [5, 6, 7, 8], "temperature": 0, "logit_bias": {"39": 8}},
    {"prompt": "a cat", "temperature": 1, "seed": 1, "extra_body": {"cache_salt": "mine", "min_p": 0.01}},
    {
        "prompt": "who",
        "temperature": 1,
        "seed": 1,
        "max_tokens": 60,
        "extra_body": {"structured_outputs": {"json": PERSON}},
    },
]
CHATS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "Who is it?"}], "temperature": 0},
    {
        "messages": [{"role": "system", "content": "Rhyme."}, {"role": "user", "content": "Who is it?"}],
        "response_format": {"type": "json_object"},
        "temperature": 1,
        "seed": 9,
    },
]


@pytest.fixture(scope="module")
def ranked(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankedServer]:
    server = RankedServer(model, tmp_path_factory.mktemp("ranks"), *FLAGS)
    yield server
    server.launch.kill()


@pytest.fixture(scope="module")
def alone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    server = ServerProcess(model, tmp_path_factory.mktemp("alone"), *FLAGS)
    yield server
    server.kill()


def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0, timeout=60)


def told(server: ServerProcess, ask: dict[str, Any]) -> Any:
    """Return the choices and the usage of an answer."""
    api = client(server)
    create: Any = api.chat.completions.create if "messages" in ask else api.completions.create
    answer = create(model="default_model", **ask).model_dump()
    return answer["choices"], answer["usage"]


@pytest.mark.parametrize("number", quick(range(len(CASES) + len(CHATS)), 1, 3, 5, 8, 10))
def test_answers_equal_those_of_one_process(number: int, ranked: RankedServer, alone: ServerProcess) -> None:
    ask = [*CASES, *CHATS][number]
    if number == 2:  # finds the prefix of the one before
        for server in (ranked, alone):
            told(server, CASES[1])
    choices, usage = told(ranked, ask)
    assert number != 2 or usage["prompt_tokens_details"]["cached_tokens"] > 100
    expected, its_usage = told(alone, ask)
    for choice, its in zip(choices, expected, strict=True):
        _compare_logprobs(choice.pop("logprobs", None), its.pop("logprobs", None))
    assert choices == expected
    assert usage == its_usage


def _compare_logprobs(found: Any, expected: Any) -> None:
    """Compare with a tolerance: sums over ranks round differently."""
    assert (found is None) == (expected is None)
    if found is not None:
        assert found["tokens"] == expected["tokens"]
        assert found["token_logprobs"] == pytest.approx(expected["token_logprobs"], abs=1e-3)


def test_closed_connection_cancels_its_prefill(ranked: RankedServer) -> None:
    chosen = random.Random(0)
    prompt = [chosen.randrange(1000, VOCAB) for _ in range(4000)]
    before = ranked.stats()["server"]["computed_prompt_tokens"]
    connection = ranked.send_and_leave_open("/v1/completions", {"prompt": prompt, "max_tokens": 5})
    ranked.wait_until(lambda: before < ranked.stats()["server"]["computed_prompt_tokens"])
    connection.close()
    ranked.wait_until(lambda: ranked.stats()["server"]["requests"]["cancelled"] == 1 and ranked.is_idle)
    assert ranked.stats()["server"]["computed_prompt_tokens"] - before < len(prompt)
    told(ranked, CASES[0])


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"prompt": "a", "echo": True, "logprobs": 1}, 501, "several ranks"),
        ({"prompt": "a", "model": "some/other"}, 404, "no such model: 'some/other'"),
    ],
)
def test_requests_unsupported_over_ranks_are_refused(
    body: dict[str, Any], status: int, words: str, ranked: RankedServer
) -> None:
    answer = ranked.post("/v1/completions", body)
    assert answer.status == status
    assert words in answer.json["error"]["message"]


def test_sigterm_completes_the_running_request_and_ends_all_ranks(ranked: RankedServer) -> None:
    """Runs last, as it ends the shared server: the running request is completed, and all ranks exit alike."""
    ranked.wait_until(lambda: ranked.is_idle, 60)
    create: Any = client(ranked).completions.create
    stream = create(model="default_model", prompt="a", temperature=0, max_tokens=60, logprobs=1, stream=True)
    first = next(iter(stream))  # generation has begun
    ranked.signal(1, signal.SIGTERM)  # rank 0 ends all ranks
    ranked.signal(0, signal.SIGTERM)
    tokens = [each.choices[0].logprobs.tokens for each in (first, *stream) if each.choices[0].logprobs]
    assert sum(map(len, tokens)) == 60
    ended = ranked.ended()
    assert [each.status for each in ended] == [0, 0], ended
    assert "httpd" not in ended[1].stderr
    words, others = ranked.last_words()
    assert words == others
    cached, live = words.split(" blocks cached; ")[0], words.partition("tokens: ")[2].split(" live")[0]
    assert int(cached) == int(live) > 0


# Other ways to end ----------------------------------------------------------------------------------------------------


def _interrupted(server: RankedServer, what: Callable[[], None]) -> tuple[list[str], list[int]]:
    """Call ``what`` while two requests run; return the events of the one and the status of the other."""
    events: list[str] = []
    statuses: list[int] = []
    has_begun = threading.Event()

    def stream() -> None:
        body = {"prompt": "a", "max_tokens": 4000, "stream": True}
        connection = server.send_and_leave_open("/v1/completions", body)
        connection.settimeout(60)
        with connection, connection.makefile("rb") as answer:
            for line in answer:
                if line.startswith(b"data: "):
                    events.append(line.decode().strip())
                    has_begun.set()

    def ask() -> None:
        statuses.append(server.post("/v1/completions", {"prompt": "b", "max_tokens": 4000}).status)

    threads = [threading.Thread(target=each) for each in (stream, ask)]
    for thread in threads:
        thread.start()
    assert has_begun.wait(60)
    server.wait_until(lambda: server.stats()["running"]["running"] == 2)
    what()
    for thread in threads:
        thread.join(60)
    return events, statuses


def test_dead_rank_ends_the_server_and_requests_get_503(model: Path, tmp_path: Path) -> None:
    reason = "rank 1 has died"
    server = RankedServer(model, tmp_path, *FLAGS, timeout=60)
    try:
        events, statuses = _interrupted(server, lambda: server.signal(1, signal.SIGKILL))
        assert server.process.wait(30) == EXIT_STATUS
        assert reason in server.log
        assert statuses == [503]
        assert reason in json.loads(events[-1].removeprefix("data: "))["error"]["message"]
    finally:
        server.launch.kill()


# Slow ---------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_prefix_is_restored_from_disk_up_to_what_every_rank_has(model: Path, tmp_path: Path) -> None:
    flags = [*FLAGS, "--prefix-cache-dir", str(tmp_path / "prefixes")]
    ask: dict[str, Any] = {"prompt": LONG, "temperature": 0, "max_tokens": 4}
    answers, cached = [], []
    for run in range(3):
        folder = tmp_path / str(run)
        folder.mkdir()
        server = RankedServer(model, folder, *flags)
        try:
            choices, usage = told(server, ask)
            server.signal(0, signal.SIGTERM)
            assert [each.status for each in server.ended()] == [0, 0]
        finally:
            server.launch.kill()
        answers.append(choices)
        cached.append(usage["prompt_tokens_details"]["cached_tokens"])
        if run == 1:  # rank 1 loses a block
            files = (tmp_path / "prefixes" / "rank-1-of-2").glob("*.kv0")
            max(files, key=lambda path: path.stat().st_mtime_ns).unlink()
    assert answers[0] == answers[1] == answers[2]
    assert cached[0] == 0
    assert 0 < cached[2] <= cached[1] and cached[1] % BLOCK_SIZE == cached[2] % BLOCK_SIZE == 0
