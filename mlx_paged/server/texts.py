"""LoadedTexts: a model's tokenizer for the server: prompts, grammars, tokens as text."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jinja2.meta
import mlx.core as mx
from mlx_lm import server as upstream
from transformers import PreTrainedTokenizerBase
from transformers.utils import chat_template_utils

from .agents import Refusals, fitted, fitted_tools, refusals_of, steady_messages
from .call_formats import text_marks
from .errors import RequestRefused, invalid, prompt_too_long
from .grammars import TokenizerGrammars, ends_in_reasoning, unwrapped
from .request import ChatInput, Constraint, Input, Prompt, ServerRequest

EFFORT = "reasoning_effort"
MAX_DEFAULT_TOKENS = 1 << 16  # of an answer, if neither the request, --max-tokens nor the model sets a limit
CHARACTERS_PER_TOKEN = 8  # of a prompt of which all is encoded at once; most texts have about 4
MOST_AT_A_CUT = 256  # tokens by which a text's beginning may have more than its share of the whole
KNOWN_TOKENS = 1 << 15  # whose texts are kept: an answer with 20 log-probabilities asks for as many in each step
THINKING_BUDGETS = {"minimal": 256, "low": 1024, "medium": 8192}  # tokens, if the chat template reads no effort
THINKING = "enable_thinking"  # mlx-lm's wrapper of tokenizers renames it for templates that use another name
# Arguments of apply_chat_template that templates also read as variables, and that mlx-lm does not set itself.
VARIABLES_AMONG_ARGUMENTS = frozenset({"documents"})


class LoadedTexts:
    """A model's tokenizer, templates and grammars, without its weights; for any thread.

    Args:
        weights: the loaded model.
        template_args: arguments of the chat template from the command line.
        most_tokens: most tokens of a sequence that the budget holds; None: unlimited.

    Attributes:
        capacity: the same.
        vocab_size: size of the vocabulary.
        context_length: the model's context length in tokens; None: its configuration has none.
        takes_images: whether prompts may contain images.
        marks: the marks that divide its answers.
    """

    def __init__(self, weights: Any, template_args: dict[str, Any], most_tokens: int | None) -> None:
        self.key, self.capacity = weights.key, most_tokens
        self.tokenizer = tokenizer = weights.tokenizer
        self._processor = upstream.load_processor(weights.model, weights.config)
        self._template_args = template_args
        self._grammars = TokenizerGrammars(tokenizer)
        args = getattr(weights.model, "args", None)
        self.vocab_size = int(getattr(args, "vocab_size", None) or len(tokenizer))
        config = {**weights.config, **(weights.config.get("text_config") or {})}
        length = config.get("max_position_embeddings")
        self.context_length = length if isinstance(length, int) and length > 0 else None
        self.takes_images = self._processor is not None
        self.marks = text_marks(tokenizer)
        self.token = functools.lru_cache(KNOWN_TOKENS)(self._token)

    # Requests, in a worker thread -----------------------------------------------------------------------------

    def complete(self, request: ServerRequest, default_tokens: int | None = None) -> None:
        """Make the prompts of a request, and limit its answers to what fits.

        Args:
            request: the request.
            default_tokens: most tokens of an answer if the request does not say; None: what fits the model's context.

        Raises:
            RequestRefused: 400, the request cannot be served.
        """
        self.completed(request)
        if not request.prompts:
            request.prompts = [self.make_prompt(given) for given in request.inputs]
        longest = max(len(prompt.tokens) for prompt in request.prompts)
        wanted = default_tokens if request.max_tokens is None else request.max_tokens
        if wanted is None:
            wanted = MAX_DEFAULT_TOKENS if self.context_length is None else max(1, self.context_length - longest)
        request.max_tokens = wanted if self.capacity is None else min(wanted, self.capacity - longest)

    def constrain(self, request: ServerRequest, is_wanted: Callable[[], bool] = lambda: True) -> None:
        """Compile the request's constraint, if it is still wanted. Blocks while it is built.

        Raises:
            RequestRefused: 400, the grammar is invalid.
        """
        if request.constraint is not None and is_wanted():
            request.grammar = self.compile(request.constraint)
        if request.grammar is None:
            request.constraint = None  # so that other ranks do not compile it either

    def make_prompt(self, given: Input) -> Prompt:
        """Render and tokenize a prompt as mlx-lm's server does.

        Raises:
            RequestRefused: 400, the prompt cannot be made, or has more tokens than allowed.
        """
        if isinstance(given, list):
            tokens = given
            self._check_length(len(tokens))
            if max(tokens) >= self.vocab_size:
                raise invalid(f"prompt: token ids must be from 0 to {self.vocab_size - 1}, got {max(tokens)}", "prompt")
            return Prompt.of_tokens(tokens)
        param = "prompt"
        if isinstance(given, ChatInput):
            param = "messages"
            check_images(given, takes_images=self.takes_images)
            given = replace(given, messages=steady_messages(given.messages))
        try:
            prompt = self._tokenized(given)
        except RequestRefused:
            raise
        except Exception as error:
            text = f"cannot render or tokenize the prompt: {type(error).__name__}: {error}"
            raise invalid(text[:2000], param) from error
        if not prompt.tokens:
            raise invalid("the prompt has no tokens", param)
        return prompt

    def _tokenized(self, given: ChatInput | str) -> Prompt:
        if isinstance(given, str):
            request = upstream.CompletionRequest("text", given, [], None, None)
            variables: dict[str, Any] = {}
        else:
            messages = fitted(given.messages, self._refusals)  # copies, into which mlx-lm writes
            tools = fitted_tools(given.tools, self._refusals)
            request = upstream.CompletionRequest("chat", "", messages, tools, given.role_mapping)
            variables = {}
            if self.tokenizer.has_chat_template:
                variables = template_variables(self.tokenizer, given.template_kwargs, given.tools)
            else:
                upstream.process_message_content(messages)  # mlx-lm does that only for templates
                if given.continues and messages[-1]["content"]:
                    request = upstream.CompletionRequest("text", _begun(messages, given.role_mapping), [], None, None)
        cli_args = SimpleNamespace(chat_template_args=self._template_args)
        owner = SimpleNamespace(model_provider=SimpleNamespace(processor=self._processor, cli_args=cli_args))
        args = SimpleNamespace(chat_template_kwargs=variables)
        continues = isinstance(given, ChatInput) and given.continues
        tokenizer = _RequestTokenizer(self.tokenizer, self._check_beginning, continues=continues)
        found = upstream.ResponseGenerator._tokenize(owner, tokenizer, request, args)
        tokens, segments, segment_types, _, vision = found
        self._check_length(len(tokens))
        if vision is not None:
            mx.eval(vision.pixel_values)  # arrays cross threads evaluated
        return Prompt(tokens, segments, segment_types, self._initial_state(given, tokens), vision)

    def _check_beginning(self, text: str) -> None:
        """Check a long text's beginning before all of it is encoded, which takes about 140 bytes a character."""
        most = min((each for each in (self.context_length, self.capacity) if each is not None), default=len(text))
        begin = CHARACTERS_PER_TOKEN * most
        if len(text) > begin:
            tokens = self.tokenizer.encode(text[:begin], add_special_tokens=False)
            self._check_length(len(tokens) - MOST_AT_A_CUT, "at least ")

    def _check_length(self, num_tokens: int, bound: str = "") -> None:
        """Raise RequestRefused (400) for a prompt that is longer than the context, or that the memory cannot hold."""
        context, capacity = self.context_length, self.capacity
        if context is not None and num_tokens > context:
            raise prompt_too_long(f"{bound}{num_tokens} tokens > {context} maximum: the model's context length")
        if capacity is not None and num_tokens >= capacity:  # the answer has at least one
            why = "the KV cache budget holds no more; raise kv_cache_memory (--kv-cache-memory) or shorten the prompt"
            raise prompt_too_long(f"{bound}{num_tokens} tokens > {capacity - 1} maximum: {why}")

    def _initial_state(self, given: ChatInput | str, tokens: list[int]) -> str:
        """Return the state in which the answer begins; what users have written does not count."""
        tokenizer = self.tokenizer
        if isinstance(given, str) or not tokenizer.has_chat_template:
            return "normal"
        if tokenizer.response_initial_state:
            return str(tokenizer.response_initial_state)
        if given.continues and tokenizer.has_thinking:
            begun = str(given.messages[-1].get("content"))
            is_open = begun.rfind(tokenizer.think_start) > begun.rfind(tokenizer.think_end)
        else:
            is_open = ends_in_reasoning(tokenizer, tokens)
        return "reasoning" if is_open else "normal"

    @functools.cached_property
    def _refusals(self) -> Refusals:
        if not self.tokenizer.has_chat_template:
            return Refusals()
        render = functools.partial(self.tokenizer.apply_chat_template, tokenize=False, add_generation_prompt=True)
        return refusals_of(lambda messages, **options: str(render(messages, **options)))

    def compile(self, constraint: Constraint) -> Any:
        return self._grammars.compile(constraint)

    def completed(self, request: ServerRequest) -> None:
        """Check a request's sampling against the vocabulary, and fill in what depends on the tokenizer."""
        params, vocab = request.sampling, self.vocab_size
        if any(not 0 <= token < vocab for token in params.logit_bias):
            raise invalid(f"logit_bias: token ids must be from 0 to {vocab - 1}", "logit_bias")
        special: tuple[int, ...] = ()
        if params.uses_xtc:
            special = (*self.tokenizer.encode("\n"), *self.tokenizer.eos_token_ids)
        if request.thinking_budget is None and self.tokenizer.has_chat_template:
            efforts = (each.template_kwargs.get(EFFORT) for each in request.inputs if isinstance(each, ChatInput))
            if (effort := next(efforts, None)) is not None and EFFORT not in _read_by(self.tokenizer, request.tools):
                request.thinking_budget = THINKING_BUDGETS.get(str(effort))
        request.sampling = replace(params, top_k=min(params.top_k, vocab - 1), xtc_special_tokens=special)

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens)))

    def _token(self, token_id: int) -> tuple[str, bytes]:
        """Return the text of a token by itself, and its bytes, which may be only part of a character."""
        (name,) = self.tokenizer.convert_ids_to_tokens([token_id])
        name = str(name)
        text = self.decode([token_id])
        if name.startswith("▁") and not text.startswith(" "):  # SentencePiece's space, which decoding alone drops
            text = " " + text
        if "\ufffd" not in text:
            return text, text.encode()
        if name.startswith("<0x") and len(name) == 6:
            return text, bytes([int(name[3:5], 16)])
        known = _byte_level()
        if all(character in known for character in name):
            return text, bytes(known[character] for character in name)
        return text, text.encode()


def check_images(given: Input, *, takes_images: bool) -> None:
    """Raise RequestRefused (400) for images that the model does not take, or that are no data URLs."""
    for part in parts_of(given):
        url = _url_of(part)
        if url is None:
            continue
        if not takes_images:
            raise invalid("this model accepts only text", "messages")
        if not isinstance(url, str) or not url.startswith("data:"):
            raise invalid("an image must be a data URL", "messages")


def parts_of(given: Input) -> list[dict[str, Any]]:
    """Return all content parts of a chat; a content that is a string has none."""
    contents = [message.get("content") for message in given.messages] if isinstance(given, ChatInput) else []
    return [part for content in contents if isinstance(content, list) for part in content if isinstance(part, dict)]


def _url_of(part: dict[str, Any]) -> Any:
    if part.get("type") not in ("image_url", "input_image", "image"):
        return None
    url = part.get("image_url", part.get("image"))
    return url.get("url") if isinstance(url, dict) else url


def _begun(messages: list[dict[str, Any]], role_mapping: dict[str, Any] | None) -> str:
    """Return mlx-lm's prompt for a chat without a template, up to the end of the last message."""
    *before, last = messages
    text = upstream.convert_chat([*before, {**last, "content": "\0"}], role_mapping)
    return f"{text[: text.rindex(chr(0))]}{last['content']}"


@functools.cache
def _byte_level() -> dict[str, int]:
    """Return the byte that each character stands for in names of byte-level tokens."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + place): byte for place, byte in enumerate(others)}


class _RequestTokenizer:
    """A tokenizer for one request: passes texts to ``check`` before it encodes them, and lets the answer continue the
    last message of the chat."""

    def __init__(self, tokenizer: Any, check: Callable[[str], None], *, continues: bool) -> None:
        self._wrapped, self._check, self._continues = tokenizer, check, continues

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped, name)

    def encode(self, text: str, **options: Any) -> Any:
        self._check(text)
        return self._wrapped.encode(text, **options)

    def apply_chat_template(self, messages: Any, *, tokenize: bool = True, **options: Any) -> Any:
        if self._continues:
            options |= {"add_generation_prompt": False, "continue_final_message": True}
        if not tokenize or not renders_jinja(self._wrapped):
            return self._wrapped.apply_chat_template(messages, tokenize=tokenize, **options)
        text = self._wrapped.apply_chat_template(messages, tokenize=False, **options)
        return self.encode(text, add_special_tokens=False)


def template_variables(tokenizer: Any, given: Mapping[str, Any], tools: Any = None) -> dict[str, Any]:
    """Return the part of ``given`` that may be passed to ``apply_chat_template``.

    Allowed are variables that the template's own source reads without setting them (with a renderer in Python: the
    parameters of its signature), except the special tokens and the arguments of ``apply_chat_template`` (messages,
    tools, padding, ...). Variables that the template does not read are ignored: clients send those of other models.

    Args:
        tokenizer: mlx-lm's wrapper.
        given: ``chat_template_kwargs``.
        tools: tools of the request; some models have a separate template for them.

    Raises:
        RequestRefused: 400, an argument of ``apply_chat_template`` that is not a variable.
    """
    if not given:
        return {}
    arguments = _arguments() - VARIABLES_AMONG_ARGUMENTS
    known = _read_by(tokenizer, tools)
    result = {}
    for name, value in given.items():
        if name in arguments:
            raise invalid(f"chat_template_kwargs: {name} is not a variable of a chat template", "chat_template_kwargs")
        elif name in known or name == THINKING:
            result[name] = value
    return result


@functools.cache
def _arguments() -> frozenset[str]:
    names = set(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) - {"kwargs"}
    return frozenset(names | {"messages"})


def _read_by(tokenizer: Any, tools: Any) -> frozenset[str]:
    inner = unwrapped(tokenizer)
    renderer = getattr(tokenizer, "_chat_template", None)
    if renderer is None and not renders_jinja(tokenizer):
        renderer = type(inner).apply_chat_template
    if renderer is not None:
        return frozenset(inspect.signature(renderer).parameters) - _arguments() - {"self", "kwargs"}
    read = _undeclared(inner.get_chat_template(None, tools))
    return read - (_arguments() - VARIABLES_AMONG_ARGUMENTS) - frozenset(inner.special_tokens_map)


def renders_jinja(tokenizer: Any) -> bool:
    """Return whether ``apply_chat_template`` only renders a Jinja template and encodes the text."""
    inner = unwrapped(tokenizer)
    own = getattr(type(inner), "apply_chat_template", None)
    return getattr(tokenizer, "_chat_template", None) is None and own is PreTrainedTokenizerBase.apply_chat_template


@functools.lru_cache(maxsize=16)
def _undeclared(template: str) -> frozenset[str]:
    # Parsed as it is rendered: with the tags that transformers adds to Jinja's.
    environment = chat_template_utils._compile_jinja_template(template).environment
    return frozenset(jinja2.meta.find_undeclared_variables(environment.parse(template)))
