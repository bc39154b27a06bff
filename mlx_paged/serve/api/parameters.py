"""The table of what a request may say: from it come checks, /openapi.json and the table in docs/api.md."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple

from ...config import MAX_PROMPT_LOOKUP
from . import checks
from .checks import MAX_CONTEXT, MAX_TOKENS, Check, flag, number, object_, one_of, refused, string, whole

MAX_PENALTY = 1e4
MAX_CHOICES = 128  # of one prompt
MAX_ANSWERS = 256  # to one request: each is computed in the batch, and takes a thread while it is


class Support(StrEnum):
    """What becomes of a parameter."""

    SUPPORTED = "supported"
    NO_EFFECT = "no effect"  # by what it means
    REFUSED = "refused"


class Parameter(NamedTuple):
    """One parameter of an endpoint.

    Attributes:
        name: as clients write it.
        check: which values pass.
        note: for readers of the documentation.
        support: what becomes of it.
        is_required: whether a body without it is refused.
    """

    name: str
    check: Check
    note: str = ""
    support: Support = Support.SUPPORTED
    is_required: bool = False


class Endpoint(NamedTuple):
    """What is asked with POST.

    Attributes:
        path: of its address.
        summary: for readers of the documentation.
        parameters: by name.
    """

    path: str
    summary: str
    parameters: dict[str, Parameter]

    @property
    def required(self) -> list[str]:
        return [name for name, parameter in self.parameters.items() if parameter.is_required]


def _without_effect(name: str, check: Check, note: str) -> Parameter:
    return Parameter(name, check, note, Support.NO_EFFECT)


def _refused(name: str, why: str) -> Parameter:
    return Parameter(name, refused(why), why, Support.REFUSED)


def _endpoint(path: str, summary: str, *parts: Iterable[Parameter]) -> Endpoint:
    return Endpoint(path, summary, {parameter.name: parameter for part in parts for parameter in part})


_penalty = number(-MAX_PENALTY, MAX_PENALTY)
_context = whole(0, MAX_CONTEXT)
_TRACE = "for whoever keeps records; nothing is kept here"

_MODEL = [
    Parameter("model", string, "a name or folder; without it the model of `--model`"),
    Parameter("adapters", string, "of mlx-lm"),
    Parameter("draft_model", string, "of mlx-lm"),
    Parameter("num_draft_tokens", whole(0, 64), "of mlx-lm; 400 without a draft model"),
]
_SAMPLING = [
    Parameter("temperature", number(0, 100)),
    Parameter("top_p", number(0, 1)),
    Parameter("top_k", whole(0, MAX_CONTEXT)),
    Parameter("min_p", number(0, 1)),
    Parameter("xtc_probability", number(0, 1)),
    Parameter("xtc_threshold", number(0, 0.5)),
    Parameter("repetition_penalty", number(0, MAX_PENALTY)),
    Parameter("presence_penalty", _penalty),
    Parameter("frequency_penalty", _penalty),
    Parameter("repetition_context_size", _context),
    Parameter("presence_context_size", _context),
    Parameter("frequency_context_size", _context),
    Parameter("logit_bias", checks.logit_bias),
    Parameter("seed", whole(-(1 << 63), (1 << 64) - 1), "of `n` answers, the i-th (from 0) has seed + i"),
    Parameter("prompt_lookup", whole(0, MAX_PROMPT_LOOKUP), "of mlx_paged"),
    Parameter("cache_salt", checks.cache_salt, "of mlx_paged"),
    Parameter("structured_outputs", object_, "as in vLLM"),
]
_TEMPLATE = [Parameter("chat_template_kwargs", object_, "variables that the chat template reads")]
_STREAM = [
    Parameter("stream", flag),
    Parameter(
        "stream_options",
        checks.stream_options,
        "with `stream`, else 400: `include_usage`; `include_obfuscation` has no effect",
    ),
]
_TOP = Parameter("top_logprobs", whole(-1, 20), "beyond 11, more than mlx-lm gives")
_ONE_TIER = [_without_effect("service_tier", one_of("auto", "default"), "there is one tier")]
_RECORDS = [
    _without_effect("user", string, _TRACE),
    _without_effect("metadata", object_, _TRACE),
    _without_effect("safety_identifier", string, _TRACE),
    _without_effect("store", one_of(False), "answers are never kept: `true` is refused"),
    _without_effect("prompt_cache_key", string, "prefixes are found by their tokens"),
    _without_effect("prompt_cache_retention", string, "prefixes stay while there is memory"),
    _without_effect("prompt_cache_options", object_, "prefixes are found by their tokens"),
]
_LIMITS = [
    Parameter("max_tokens", whole(1, MAX_TOKENS)),
    Parameter("max_completion_tokens", whole(1, MAX_TOKENS), "wins over `max_tokens`"),
]
_STOP = Parameter("stop", checks.stop, "any number of strings")
_N = Parameter("n", whole(1, MAX_CHOICES), "the prompt is computed once")
_FORMAT = Parameter("response_format", object_, "`text`, `json_object`, `json_schema`")
_EFFORT = Parameter(
    "reasoning_effort", string, "`reasoning_effort` of the chat template; without effect where that does not read it"
)

CHAT = _endpoint(
    "/v1/chat/completions",
    "Answers to a chat, as OpenAI's",
    [Parameter("messages", checks.messages, is_required=True)],
    _MODEL,
    _LIMITS,
    _SAMPLING,
    _TEMPLATE,
    _STREAM,
    [
        _N,
        _STOP,
        Parameter("logprobs", checks.logprobs_flag),
        _TOP,
        _FORMAT,
        Parameter("tools", checks.objects),
        Parameter("tool_choice", checks.tool_choice),
        Parameter("parallel_tool_calls", flag, "`false`: the first call alone is told"),
        _EFFORT,
        Parameter(
            "role_mapping", object_, "of mlx-lm, for models without a chat template; without effect where there is one"
        ),
    ],
    _RECORDS,
    _ONE_TIER,
    [
        _without_effect("modalities", one_of(["text"]), "answers are text"),
        _without_effect("prediction", object_, "would change the speed alone; `prompt_lookup` is for that"),
        _without_effect("verbosity", one_of("medium"), "other values than the default are refused"),
        _refused("audio", "answers are text"),
        _refused("function_call", "use tool_choice"),
        _refused("functions", "use tools"),
        _refused("moderation", "there is no such service"),
        _refused("web_search_options", "there is no such tool"),
    ],
)
COMPLETIONS = _endpoint(
    "/v1/completions",
    "Texts that go on from prompts, as OpenAI's",
    [
        Parameter(
            "prompt", checks.prompt, f"a text, token ids, or a list of either; {MAX_ANSWERS} answers", is_required=True
        )
    ],
    _MODEL,
    [
        Parameter("max_tokens", whole(0, MAX_TOKENS), "0 with `echo` only"),
        Parameter("max_completion_tokens", whole(1, MAX_TOKENS), "wins over `max_tokens`"),
    ],
    _SAMPLING,
    _STREAM,
    [
        _N,
        Parameter("best_of", whole(1, MAX_CHOICES), "those of the highest mean log-probability; not in streams"),
        Parameter("echo", flag, "with `logprobs: N`, the prompt's as well; not with both in streams"),
        _STOP,
        Parameter("logprobs", checks.logprobs, "a number as in OpenAI, `true` as in mlx-lm"),
        _TOP._replace(note="of mlx-lm, with `logprobs: true`"),
        _FORMAT._replace(note="as in chats"),
    ],
    _RECORDS[:2],
    [_refused("suffix", "models here go on from a prompt alone")],
)
RESPONSES = _endpoint(
    "/v1/responses",
    "An answer in the form of OpenAI's Responses, of which nothing is kept",
    [
        Parameter("input", checks.content, "messages, function calls, their outputs, reasoning", is_required=True),
        Parameter("instructions", string, "a system message before all others"),
    ],
    _MODEL,
    [Parameter("max_output_tokens", whole(1, MAX_TOKENS))],
    _SAMPLING,
    _TEMPLATE,
    _STREAM,
    [
        Parameter("text", object_, "`format`: `text`, `json_object`, `json_schema`; `verbosity`: `medium`"),
        Parameter("tools", checks.objects, "of type `function`"),
        Parameter("tool_choice", checks.tool_choice),
        Parameter("parallel_tool_calls", flag, "`false`: the first call alone is told"),
        Parameter("top_logprobs", whole(0, 20), "with `include`"),
        Parameter(
            "include",
            checks.list_,
            "`message.output_text.logprobs`; `reasoning.encrypted_content` has no effect: reasoning is not encrypted",
        ),
        Parameter("reasoning", object_, "`effort`, as `reasoning_effort` of chats; `summary`: `auto`, which is none"),
    ],
    _RECORDS,
    _ONE_TIER,
    [
        _without_effect("background", one_of(False), "`true` is refused"),
        _without_effect("truncation", one_of("disabled"), "`auto` is refused"),
        _refused("conversation", "nothing is kept"),
        _refused("previous_response_id", "nothing is kept: send what was said before"),
        _refused("prompt", "there are no stored prompts"),
        _refused("max_tool_calls", "there are no built-in tools"),
        _refused("context_management", "nothing is kept"),
        _refused("moderation", "there is no such service"),
        _refused("background_options", "answers are given at once"),
        _refused("access_programs", "there is no such service"),
        _refused("image", "answers are text"),
    ],
)
MESSAGES = _endpoint(
    "/v1/messages",
    "An answer in the form of Anthropic's Messages",
    [
        Parameter(
            "messages", checks.messages_of_claude, "texts, images, tool uses and results, thinking", is_required=True
        ),
        Parameter("max_tokens", whole(1, MAX_TOKENS), is_required=True),
        Parameter("system", checks.content),
    ],
    _MODEL,
    _SAMPLING,
    _TEMPLATE,
    [
        Parameter("stream", flag),
        Parameter("stop_sequences", checks.strings),
        Parameter("tools", checks.objects, "of type `custom`"),
        Parameter("tool_choice", object_, "`auto`, `any`, `tool`, `none`, `disable_parallel_tool_use`"),
        Parameter(
            "thinking",
            object_,
            "`enable_thinking` of the chat template; `budget_tokens` is a target, and `max_tokens` alone bounds it",
        ),
        Parameter("output_config", object_, "`format`: `json_schema`; `effort`, as `reasoning_effort` of chats"),
        _without_effect("metadata", object_, _TRACE),
        _without_effect("cache_control", object_, "prefixes are found by their tokens"),
        _without_effect("service_tier", one_of("auto", "standard_only"), "there is one tier"),
        _refused("container", "there are no containers"),
        _refused("context_management", "nothing is kept"),
        _refused("diagnostics", "there is no such service"),
        _refused("inference_geo", "there is one place"),
        _refused("mcp_servers", "there are no built-in tools"),
        _refused("speed", "there is one speed"),
        _refused("user_profile_id", "nothing is kept"),
        _refused("workspace_id", "nothing is kept"),
    ],
)
COUNT_TOKENS = _endpoint(
    "/v1/messages/count_tokens",
    "How many tokens the prompt of a message has, as Anthropic's",
    [parameter for name, parameter in MESSAGES.parameters.items() if name not in ("max_tokens", "stream")],
)
TOKENIZE = _endpoint(
    "/tokenize",
    "The tokens of a prompt, as in vLLM: of a text, or of messages",
    [
        Parameter("prompt", string),
        Parameter("messages", checks.messages),
        Parameter("model", string),
        Parameter("tools", checks.objects),
        *_TEMPLATE,
    ],
)
DETOKENIZE = _endpoint(
    "/detokenize",
    "The text of tokens, as in vLLM",
    [Parameter("tokens", checks.token_ids, is_required=True), Parameter("model", string)],
)
ENDPOINTS = {
    endpoint.path: endpoint for endpoint in (CHAT, COMPLETIONS, RESPONSES, MESSAGES, COUNT_TOKENS, TOKENIZE, DETOKENIZE)
}
ALIASES = {"/chat/completions": CHAT.path}  # of mlx-lm


def endpoint_of(path: str) -> Endpoint | None:
    """What is asked with POST at a path; None: nothing is."""
    return ENDPOINTS.get(ALIASES.get(path, path))
