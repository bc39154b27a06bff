"""generation_arguments(): what mlx-lm's server makes of a body's parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlx_lm import server as upstream


def generation_arguments(body: Mapping[str, Any], cli_args: Any) -> upstream.GenerationArguments:
    """mlx-lm's arguments of a request.

    Args:
        body: the parameters, as those of a chat or a completion; checked.
        cli_args: of the command line, which has the defaults.
    """
    stop = body.get("stop", [])
    template_kwargs = body.get("chat_template_kwargs")
    if "reasoning_effort" in body:
        template_kwargs = {"reasoning_effort": body["reasoning_effort"], **(template_kwargs or {})}
    bias = body.get("logit_bias")
    logprobs, num_top = body.get("logprobs", False), body.get("top_logprobs", -1)
    if logprobs is not False and logprobs is not True:  # OpenAI's number of a completion
        logprobs, num_top = True, logprobs
    return upstream.GenerationArguments(
        model=upstream.ModelDescription(
            model=body.get("model", "default_model"),
            draft=body.get("draft_model", "default_model"),
            adapter=body.get("adapters"),
        ),
        sampling=upstream.SamplingArguments(
            temperature=body.get("temperature", cli_args.temp),
            top_p=body.get("top_p", cli_args.top_p),
            top_k=body.get("top_k", cli_args.top_k),
            min_p=body.get("min_p", cli_args.min_p),
            xtc_probability=body.get("xtc_probability", 0.0),
            xtc_threshold=body.get("xtc_threshold", 0.1),
        ),
        logits=upstream.LogitsProcessorArguments(
            logit_bias=None if bias is None else {int(token): float(value) for token, value in bias.items()},
            repetition_penalty=body.get("repetition_penalty", 0.0),
            repetition_context_size=body.get("repetition_context_size", 20),
            presence_penalty=body.get("presence_penalty", 0.0),
            presence_context_size=body.get("presence_context_size", 20),
            frequency_penalty=body.get("frequency_penalty", 0.0),
            frequency_context_size=body.get("frequency_context_size", 20),
        ),
        stop_words=[stop] if isinstance(stop, str) else stop,
        # 0 comes with an echo: its only token is not shown.
        max_tokens=body.get("max_completion_tokens", body.get("max_tokens", cli_args.max_tokens)) or 1,
        num_draft_tokens=body.get("num_draft_tokens", cli_args.num_draft_tokens),
        logprobs=logprobs,
        top_logprobs=num_top,
        seed=body.get("seed"),
        chat_template_kwargs=template_kwargs,
    )
