"""Oracle: a predictor that knows what its row is going to say."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

from mlx_paged.engine.drafts import look_up
from mlx_paged.engine.drafts.look_up import Drafts, Predictor
from tests.support.models.drafting import in_every_step


class Oracle(Predictor):
    """Says the answer right for a number of tokens that changes with the place in it, and then wrong.

    Attributes:
        answers: by prompt, and some tokens longer than they are going to be.
        right: from the place to that number.
        vocab: of the model.
    """

    expects = True

    answers: dict[tuple[int, ...], list[int]] = {}  # noqa: RUF012 - of one test
    right: Callable[[int], int] = staticmethod(lambda place: place % 6)
    vocab = 24

    def drafts(self, skipped: int, most: int) -> Drafts | None:
        tokens = self._index.tokens
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
    """Rows that look tokens up ask an oracle, whose answers are to be filled in, in every step."""
    fresh = type("FreshOracle", (Oracle,), {"answers": {}, "vocab": vocab})
    with in_every_step(), mock.patch.object(look_up, "Predictor", fresh):
        yield fresh
