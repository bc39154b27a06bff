"""A predictor that knows its row's answer."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

from mlx_paged.drafts import look_up
from mlx_paged.drafts.look_up import Drafts, Predictor
from tests.support.models.drafting import in_every_step


class Oracle(Predictor):
    """Proposes the right tokens at first, then wrong ones; how many are right depends on the position in the answer.

    Attributes:
        answers: by prompt; some tokens longer than what is generated.
        right: from the position to the number of right tokens.
        vocab: size of the model's vocabulary.
    """

    expects = True

    answers: dict[tuple[int, ...], list[int]] = {}  # noqa: RUF012 - of one test
    right: Callable[[int], int] = staticmethod(lambda place: place % 6)
    vocab = 24

    def drafts(self, skipped: int, most: int) -> Drafts | None:
        tokens = self.tokens
        prompt = max((p for p in self.answers if tuple(tokens[: len(p)]) == p), key=len, default=None)
        if prompt is None:
            return super().drafts(skipped, most)
        place = len(tokens) - len(prompt) + skipped
        coming = self.answers[prompt][place : place + min(self.most, most)]
        right = type(self).right(place)
        drafts = [token if i < right else (token + 1) % self.vocab for i, token in enumerate(coming)]
        return Drafts(drafts, [1.0] * len(drafts)) if drafts else None


@contextmanager
def oracles(vocab: int) -> Iterator[type[Oracle]]:
    """Let rows that look tokens up ask an oracle in every step; the caller fills in its answers."""
    fresh = type("FreshOracle", (Oracle,), {"answers": {}, "vocab": vocab})
    with in_every_step(), mock.patch.object(look_up, "Predictor", fresh):
        yield fresh
