"""Prompts are made in processes of their own, as mlx-lm makes them, and with bounds."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mlx_lm import server as upstream
from mlx_lm.utils import load_tokenizer
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mlx_paged.patches.server.prompt_job import PROCESS, BoundedTokenizer, least_tokens, longest_token, make_prompt
from mlx_paged.patches.server.template_variables import template_variables
from mlx_paged.serve import prompt_maker
from mlx_paged.serve.prompt_maker import LARGE_BYTES, PromptMaker, PromptSetup
from mlx_paged.serve.prompt_messages import PromptJob
from mlx_paged.serve.refusal import RequestRefused
from mlx_paged.warn import FallThroughWarning
from tests.support.processes import commands

pytestmark = pytest.mark.demo_model

ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.fixture(scope="module")
def tokenizer(demo_model_folder: Path) -> Any:
    return load_tokenizer(demo_model_folder)


@pytest.fixture(scope="module")
def setup(tokenizer: Any) -> PromptSetup:
    return PromptSetup("key", tokenizer, {})


@pytest.fixture(scope="module")
def maker() -> Iterator[PromptMaker]:
    made = PromptMaker(make_prompt, PROCESS, seconds=5, num_bytes=1 << 30, allow_template=True)
    yield made
    made.close()


@pytest.fixture
def warm(monkeypatch: pytest.MonkeyPatch) -> None:
    """New makers start their processes as forks; the module's starts them as the server does."""
    monkeypatch.setattr(prompt_maker, "subprocess", commands.WARM)


def chat(*contents: str, tools: Any = None) -> Any:
    roles = ["system", "user", "assistant"]
    messages = [{"role": roles[i % 3], "content": text} for i, text in enumerate(contents)]
    return upstream.CompletionRequest("chat", "", messages, tools, None)


def text(prompt: str) -> Any:
    return upstream.CompletionRequest("text", prompt, [], None, None)


def expected(tokenizer: Any, request: Any) -> tuple[Any, ...]:
    """mlx-lm's."""
    cli_args = SimpleNamespace(chat_template_args={})
    owner = SimpleNamespace(model_provider=SimpleNamespace(processor=None, cli_args=cli_args))
    args = SimpleNamespace(chat_template_kwargs=None)
    return upstream.ResponseGenerator._tokenize(owner, tokenizer, copy.deepcopy(request), args)


def refused(*args: Any, **options: Any) -> RequestRefused:
    maker, *rest = args
    with pytest.raises(RequestRefused) as caught:
        maker.make(*rest, **options)
    return caught.value


def test_prompts_are_those_of_mlx_lm(maker: PromptMaker, setup: PromptSetup, tokenizer: Any) -> None:
    parts = upstream.CompletionRequest(
        "chat", "", [{"role": "user", "content": [{"type": "text", "text": "In parts."}]}], [{"type": "function"}], None
    )
    for request in (chat("Be brief.", "Who are you?"), chat("Hi."), text("Once upon a time"), text(" \n\u00e9"), parts):
        made = maker.make(setup, request, None, None)
        found = made.tokens, made.segments, made.segment_types, made.initial_state, None
        assert found == expected(tokenizer, request)


def test_what_a_template_does_not_read_is_left_out_and_arguments_are_refused(tokenizer: Any) -> None:
    template = "{{ bos_token }}{{ mood }}{% set own = 1 %}{{ own }}{% for m in messages %}{{ m.content }}{% endfor %}"
    inner = copy.copy(tokenizer._tokenizer)
    inner.chat_template = template + "{{ documents }}{% if add_generation_prompt %}{{ tools }}{% endif %}"
    given = {"mood": "glad", "documents": [], "own": 2, "bos_token": "x", "unknown": 1, "enable_thinking": False}
    kept = {"mood": "glad", "documents": [], "enable_thinking": False}
    assert template_variables(inner, given) == kept
    names = ("chat_template", "padding", "max_length", "return_tensors", "tokenize", "truncation", "tokenizer_kwargs")
    for name in (*names, "conversation", "messages", "tools", "add_generation_prompt", "return_dict"):
        with pytest.raises(RequestRefused, match=name) as caught:
            template_variables(inner, {name: "max_length"})
        assert (caught.value.status, caught.value.param) == (400, "chat_template_kwargs")
    brought = {"chat_template": "{{ theirs }}", "theirs": 3, "mood": 1}
    assert template_variables(inner, brought, allow_template=True) == {"chat_template": "{{ theirs }}", "theirs": 3}
    with pytest.raises(RequestRefused, match="must be a string"):
        template_variables(inner, {"chat_template": 3}, allow_template=True)


def test_a_renderer_in_python_takes_what_its_signature_names(tokenizer: Any) -> None:
    def render(messages: Any, add_generation_prompt: bool = False, effort: str = "low", **rest: Any) -> str:
        return effort

    wrapper = copy.copy(tokenizer)
    wrapper._chat_template = render
    assert template_variables(wrapper, {"effort": "high", "mood": 1}) == {"effort": "high"}


@pytest.mark.usefixtures("warm")
def test_a_template_that_never_ends_costs_its_own_request_alone(setup: PromptSetup) -> None:
    maker = PromptMaker(make_prompt, PROCESS, seconds=2, allow_template=True)
    maker.learn(setup)
    errors: list[RequestRefused] = []
    endless = threading.Thread(
        target=lambda: errors.append(refused(maker, setup, chat("Hi."), {"chat_template": ENDLESS}, None))
    )
    endless.start()
    endless.join(60)
    assert errors and errors[0].status == 400 and "within 2 s" in str(errors[0])
    assert maker.make(setup, chat("Hi."), None, None).tokens  # in a new process
    assert maker.num_waiting == 0
    maker.close()


def test_a_template_that_takes_all_memory_is_refused(maker: PromptMaker, setup: PromptSetup) -> None:
    for template in ("{{ 'a' * 99999999999 }}", "{{ ('a' * 999999999) ~ ('b' * 999999999) }}"):
        assert refused(maker, setup, chat("Hi."), {"chat_template": template}, 100).status == 400
    assert maker.make(setup, chat("Hi."), None, None).tokens


@pytest.mark.usefixtures("warm")
def test_others_do_not_wait_for_one_that_takes_long(setup: PromptSetup) -> None:
    maker = PromptMaker(make_prompt, PROCESS, seconds=60)
    maker.learn(setup)
    with maker._process(is_large=False):  # for ever, as far as others know
        assert maker.make(setup, chat("Hi."), None, None).tokens
    maker.close()


def test_a_large_prompt_leaves_a_process_to_the_others(maker: PromptMaker, setup: PromptSetup) -> None:
    maker.learn(setup)
    with maker._process(is_large=True) as first, maker._process(is_large=False) as second:
        assert first is not second
        with pytest.raises(ConnectionAbortedError):  # others wait, as long as their clients do
            maker.make(setup, text("x" * (LARGE_BYTES + 1)), None, None, client_is_gone=lambda: True)


def test_large_prompts_that_wait_are_bounded(
    maker: PromptMaker, setup: PromptSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_maker, "MOST_BYTES", 10_000)
    with maker._room(9_000):
        assert refused(maker, setup, text("x" * 5_000), None, None).status == 429
        assert maker.make(setup, text("x"), None, None).tokens
    assert maker.make(setup, text("x " * 10_000), None, None).tokens  # one alone may be as large as it likes


def test_prompts_past_the_budget_are_counted_before_they_are_encoded(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode(*args: Any, **options: Any) -> Any:
        raise AssertionError("was encoded")

    longest = abs(longest_token(tokenizer) or 0)
    assert longest > 10
    with monkeypatch.context() as patch:
        patch.setattr(type(tokenizer._tokenizer), "encode", encode)
        for prompt in ("x" * (longest * 101), "the cat " * (longest * 20)):
            with pytest.raises(RequestRefused, match="at least") as caught:
                BoundedTokenizer(tokenizer, 100).encode(prompt)
            assert caught.value.status == 413
    num_tokens = len(tokenizer.encode("one two three"))
    with pytest.raises(RequestRefused, match=f"of {num_tokens} tokens") as caught:  # what the bound lets through
        make_prompt(tokenizer, {}, PromptJob(text("one two three"), None, num_tokens - 1))
    assert caught.value.status == 413
    assert make_prompt(tokenizer, {}, PromptJob(text("one two three"), None, num_tokens)).tokens


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=200), st.sampled_from(["", " ", "\n", "#", "=", "e\u0301", "한"]), st.integers(0, 400))
@example("", " ", 400)
@example("", "#", 400)
def test_no_text_has_fewer_tokens_than_the_bound(tokenizer: Any, a: str, b: str, times: int) -> None:
    prompt = a + b * times
    assert least_tokens(tokenizer, prompt) <= len(tokenizer.encode(prompt))


def test_there_is_no_bound_where_text_may_vanish() -> None:
    def longest(
        model: Any = None, normalizer: Any = None, pre_tokenizer: Any = None, added: Any = None, fallback: bool = True
    ) -> int | None:
        vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"abcdefgh": 256}
        inner = Tokenizer(model or models.BPE(vocabulary, [], byte_fallback=fallback))
        if normalizer is not None:
            inner.normalizer = normalizer
        if pre_tokenizer is not None:
            inner.pre_tokenizer = pre_tokenizer
        if added is not None:
            inner.add_special_tokens([added])
        return longest_token(PreTrainedTokenizerFast(tokenizer_object=inner))

    assert longest() == 8
    assert longest(normalizer=normalizers.Sequence([normalizers.Replace(" ", "_"), normalizers.Prepend("_")])) == 8
    assert longest(normalizer=normalizers.NFC()) == 32
    assert longest(added=AddedToken("<|ten more|>", rstrip=True)) == -12
    unigram = models.Unigram([("<unk>", 0.0), ("abc", -1.0), *((f"<0x{b:02X}>", -9.0) for b in range(256))], 0, True)
    assert longest(unigram) == 6
    for vanishing in (
        longest(fallback=False),
        longest(models.WordLevel({"a": 0, "[UNK]": 1}, "[UNK]")),
        longest(normalizer=normalizers.Strip()),
        longest(normalizer=normalizers.Replace("x", "")),
        longest(normalizer=normalizers.StripAccents()),
        longest(pre_tokenizer=pre_tokenizers.Whitespace()),
        longest(pre_tokenizer=pre_tokenizers.Split(" ", "removed")),
    ):
        assert vanishing is None
    assert least_tokens(object(), "x" * 1000) == 0


def test_an_image_prompt_is_rendered_and_no_more(setup: PromptSetup, tokenizer: Any, maker: PromptMaker) -> None:
    shown = PromptSetup("images", tokenizer, {}, has_processor=True)
    request = upstream.CompletionRequest(
        "chat",
        "",
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,x"}}]}],
        None,
        None,
    )
    template = {"chat_template": "Look at the {{ messages[0].content[0].type }}"}
    made = maker.make(shown, request, template, 10, has_images=True)
    assert made.text == "Look at the image_url" and made.tokens == []


def test_a_tokenizer_that_cannot_be_sent_works_here(tokenizer: Any, maker: PromptMaker) -> None:
    stuck = copy.copy(tokenizer)
    stuck._anything = lambda: None
    with pytest.warns(FallThroughWarning, match="cannot be sent"):
        setup = PromptSetup("stuck", stuck, {})
    made = maker.make(setup, chat("Be brief.", "Who?"), None, None)
    assert made.tokens == expected(tokenizer, chat("Be brief.", "Who?"))[0]


@pytest.mark.usefixtures("warm")
def test_a_closed_maker_refuses_and_leaves_no_process(setup: PromptSetup) -> None:
    maker = PromptMaker(make_prompt, PROCESS, seconds=60)
    maker.learn(setup)
    process = maker._for_small._process
    assert process is not None and process.poll() is None
    maker.close()
    assert process.poll() is not None
    assert refused(maker, setup, chat("Hi."), None, None).status in (400, 503)
    assert refused(maker, setup, chat("Hi."), None, None).status == 503


def test_a_process_ends_with_its_server(setup: PromptSetup) -> None:
    maker = PromptMaker(make_prompt, PROCESS, seconds=60)
    maker.learn(setup)
    process = maker._for_small._process
    assert process is not None and process.stdin is not None
    process.stdin.close()
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert process.returncode == 0
