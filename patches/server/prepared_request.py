"""PreparedRequest: a request whose prompt has been made before it comes to the thread that computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.nn as nn
from mlx_lm import server as upstream
from mlx_lm.generate import TextStateMachine

from ...engine.grammar.grammar import CompiledGrammar, GrammarProcessor
from ...serve.constraints.constraint import Constraint
from ...serve.prompt_maker import PromptSetup
from ...serve.prompt_messages import MadePrompt
from ...serve.refusal import RequestRefused, invalid
from ..grammar.tokenizer_grammars import behind_reasoning
from ..replaced import replaced
from .answer_queue import AnswerQueue
from .answers.scoring import PromptScoring


@dataclass
class PreparedRequest(upstream.CompletionRequest):  # type: ignore[misc]
    """mlx-lm's request, and:

    Attributes:
        made: its prompt; None: it has not been made yet.
        salt: only requests with the same one share prefixes.
        constraint: what its answer has to be, as the client says it.
        grammar: the same for the model's tokens.
        prompt_lookup: most tokens that are looked up in a step; None: as configured.
        scoring: computes the log-probabilities of the prompt's own tokens; None: they are not wanted.
    """

    made: MadePrompt | None = None
    salt: str | None = None
    constraint: Constraint | None = None
    grammar: CompiledGrammar | None = None
    prompt_lookup: int | None = None
    scoring: PromptScoring | None = None

    def __getstate__(self) -> dict[str, Any]:
        # Which a process for prompts has no use for, and cannot be sent.
        return {**vars(self), "grammar": None, "scoring": None}

    def check_for_ranks(self, *, is_batched: bool) -> None:
        """Raise RequestRefused (501) for what several ranks do not do.

        Args:
            is_batched: whether it is for their model, and can be computed in its batch.
        """
        if not is_batched:
            what = "several ranks serve one model, and what can be computed in its batch"
            raise RequestRefused(501, what, param="model")
        if has_images(self.messages):
            raise RequestRefused(501, "several ranks take text only", param="messages")
        if self.scoring is not None:
            raise RequestRefused(501, "several ranks cannot tell log-probabilities of prompts", param="echo")

    def check(self, args: upstream.GenerationArguments, tokenizer: Any, model: nn.Module, tokens: list[int]) -> None:
        """Check what the model has to say to it.

        Args:
            args, tokenizer, model: as for ``check_sampling``.
            tokens: of the prompt.

        Raises:
            RequestRefused: 400, it cannot be computed.
        """
        check_sampling(args, tokenizer, model)
        if max(tokens) >= vocabulary(model, tokenizer):
            raise invalid(f"prompt: token ids go from 0 to {vocabulary(model, tokenizer) - 1}", "prompt")

    def constrain(
        self,
        setup: PromptSetup,
        queue: AnswerQueue,
        client_is_gone: Callable[[], bool] = lambda: False,
        *,
        is_checked: bool = False,
    ) -> None:
        """Compile the grammar. Blocks: in the client's thread on rank 0, in one of its own on others.

        Args:
            setup: of the model.
            queue: of the answer.
            client_is_gone: asked again and again while the grammar is tried.
            is_checked: another rank has tried it.

        Raises:
            RequestRefused: 400, it cannot be used.
            ConnectionAbortedError: the client has gone.
        """
        if self.constraint is None:
            return
        self.grammar = setup.grammars.compile(self.constraint, is_cancelled=client_is_gone, is_checked=is_checked)
        if self.constraint.tools is None:  # the answer's text may hold what otherwise would begin a tool call
            end = setup.tokenizer.think_end
            queue.text_sm = TextStateMachine({"normal": [], "reasoning": [(end, "normal")] if end else []})

    def grammar_from(self, tokenizer: Any) -> CompiledGrammar | None:
        """The grammar behind the reasoning that the prompt has begun, if it has."""
        made = self.made
        if self.grammar is None or made is None or not tokenizer.has_thinking:
            return self.grammar
        reasons = made.initial_state == "reasoning"
        if made.text is not None:
            reasons = made.text.rfind(tokenizer.think_start) > made.text.rfind(tokenizer.think_end)
        return behind_reasoning(self.grammar, tokenizer) if reasons else self.grammar

    @contextmanager
    def alone(self, tokenizer: Any) -> Iterator[None]:
        """While mlx-lm serves the request alone: its processors are the grammar, then mlx-lm's."""
        grammar, others = self.grammar_from(tokenizer), upstream._make_logits_processors
        if grammar is None:
            yield
            return
        with replaced(upstream, _make_logits_processors=lambda args: [GrammarProcessor(grammar), *others(args)]):
            yield


class RenderedTokenizer:
    """A tokenizer for a prompt with images, whose chat template has been rendered before."""

    def __init__(self, tokenizer: Any, text: str) -> None:
        self._wrapped, self._text = tokenizer, text

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped, name)

    def __len__(self) -> int:
        return len(self._wrapped)

    def apply_chat_template(self, *args: Any, **options: Any) -> str:
        return self._text


def has_images(messages: list[Any] | None) -> bool:
    """Whether some part of a chat is an image."""
    return any(upstream._image_parts(messages))


def vocabulary(model: nn.Module, tokenizer: Any) -> int:
    """How many tokens a model knows."""
    return getattr(getattr(model, "args", None), "vocab_size", None) or len(tokenizer)


def check_sampling(args: upstream.GenerationArguments, tokenizer: Any, model: nn.Module) -> None:
    """Check what mlx-lm takes for granted in a request's sampling options; ``top_k`` is cut to what there is.

    Args:
        args: mlx-lm's GenerationArguments.
        tokenizer: mlx-lm's wrapper.
        model: which has an answer's tokens to choose from.

    Raises:
        RequestRefused: 400, they cannot be used.
    """
    vocab = vocabulary(model, tokenizer)
    if any(not 0 <= token < vocab for token in args.logits.logit_bias or ()):
        raise invalid(f"logit_bias: token ids go from 0 to {vocab - 1}", "logit_bias")
    args.sampling.top_k = min(args.sampling.top_k, vocab - 1)
    try:  # what follows would end the request with an error of the server's
        upstream._make_sampler(args, tokenizer)
        upstream._make_logits_processors(args)
    except Exception as error:
        raise invalid(f"these sampling parameters cannot be used: {error}") from error
