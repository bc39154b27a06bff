"""Sampling: how the tokens of each prompt of a run are chosen."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx

from ..server.errors import invalid
from .prompts_file import PROCESSING

Sampler = Callable[[mx.array], mx.array]
Processor = Callable[[mx.array, mx.array], mx.array]


class Sampling:
    """Makes samplers and logits processors from the command line and from what single prompts say beyond it.

    Prompts with the same options share a sampler, and so are sampled in one call.

    Args:
        args: of mlx_lm.generate's parser.
        tokenizer: of the model.
        vocab_size: of the model.
    """

    def __init__(self, args: argparse.Namespace, tokenizer: Any, vocab_size: int) -> None:
        self._defaults = {
            "temperature": args.temp,
            "top_p": args.top_p,
            "min_p": args.min_p,
            "top_k": args.top_k,
            "xtc_probability": args.xtc_probability,
            "xtc_threshold": args.xtc_threshold,
        }
        self._min_tokens_to_keep = args.min_tokens_to_keep
        self._xtc_special_tokens = tokenizer.encode("\n") + list(tokenizer.eos_token_ids)
        self._vocab_size = vocab_size
        self._samplers: dict[str, Sampler] = {}

    def sampler(self, options: Mapping[str, Any]) -> Sampler:
        """Return the sampler of a prompt with these options, checked as the server's are."""
        from mlx_lm.sample_utils import make_sampler

        chosen = {name: options.get(name, default) for name, default in self._defaults.items()}
        key = json.dumps(chosen)
        if key not in self._samplers:
            self._samplers[key] = make_sampler(
                chosen["temperature"],
                chosen["top_p"],
                chosen["min_p"],
                self._min_tokens_to_keep,
                top_k=min(chosen["top_k"], self._vocab_size - 1),  # mlx-lm takes no more
                xtc_probability=chosen["xtc_probability"],
                xtc_threshold=chosen["xtc_threshold"],
                xtc_special_tokens=self._xtc_special_tokens,
            )
        return self._samplers[key]

    def processors(self, options: Mapping[str, Any]) -> list[Processor]:
        """Return the processors of a prompt with these options.

        Raises:
            RequestRefused: ``logit_bias`` names a token that the model does not have.
        """
        from mlx_lm.sample_utils import make_logits_processors

        bias = {int(token): float(value) for token, value in options.get("logit_bias", {}).items()}
        if any(not 0 <= token < self._vocab_size for token in bias):
            raise invalid(f"logit_bias: token ids go from 0 to {self._vocab_size - 1}", "logit_bias")
        chosen = {name: options[name] for name in PROCESSING if name in options}
        processors: list[Processor] = make_logits_processors(bias or None, **chosen)
        return processors

    def draws(self, options: Mapping[str, Any]) -> bool:
        """Return whether tokens are drawn at random, so that a seed matters."""
        return bool(options.get("temperature", self._defaults["temperature"]))
