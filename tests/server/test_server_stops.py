"""Stop strings in the server: an answer is the unstopped one, cut before the first stop string."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import mlx_lm
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.cases import slow
from tests.support.models.tiny_model import make_tiny_model
from tests.support.processes.server_process import ServerProcess, cached, together
from tests.support.server.answers import COMPLETIONS, Said, ask, cut_of

pytestmark = pytest.mark.demo_model

SEVEN = {"39": 1000}  # makes the tokenizer's "7" the only answer
NUM_TOKENS = 24
WIDE = "Émile naïve 日本語の 🙂🤝🏽 e\u0301 ﷽ π≈3"  # characters that span several tokens


class Unstopped(NamedTuple):
    """A request without stop strings, and its answer."""

    body: dict[str, Any]
    text: str
    pieces: list[str]  # what each token adds to the text


@pytest.fixture(scope="module")
def unstopped(server: ServerProcess, folder: Path) -> list[Unstopped]:
    tokenizer: Any = mlx_lm.load(str(folder))[1]
    wide = {str(token): 1000 for token in tokenizer.encode(WIDE, add_special_tokens=False)}
    options = {"max_tokens": NUM_TOKENS, "presence_penalty": 100}
    prompts = ("Once upon a time", "x", "And")
    bodies = [{**options, "prompt": prompt, "logit_bias": bias} for prompt in prompts for bias in ({}, wide)]
    posted = together(lambda body: server.complete(**body, logprobs=True), bodies)
    answers = []
    for body, answer in zip(bodies, posted, strict=True):
        choice = answer["choices"][0]
        detokenizer, pieces = tokenizer.detokenizer, []
        for token in choice["logprobs"]["content"]:
            detokenizer.add_token(token["id"])
            pieces.append(detokenizer.last_segment)
        detokenizer.finalize()
        pieces[-1] += detokenizer.last_segment
        assert "".join(pieces) == choice["text"]
        answers.append(Unstopped(body, choice["text"], pieces))
    assert any(not piece for answer in answers for piece in answer.pieces)  # characters made of several tokens
    assert any("\ufffd" in answer.text for answer in answers)
    return answers


def check(answer: Said, whole: Unstopped, stops: list[str]) -> None:
    found = any(stop in whole.text for stop in stops)
    assert answer.text == cut_of(whole.text, stops)
    assert answer.finish == ("stop" if found else "length")
    needed = next((n for n in range(NUM_TOKENS) if _holds("".join(whole.pieces[: n + 1]), stops)), NUM_TOKENS - 1) + 1
    assert needed <= answer.num_tokens <= NUM_TOKENS
    if len(stops) == 1:  # with several, later characters may decide which one comes first
        assert answer.num_tokens == needed


def _holds(text: str, stops: list[str]) -> bool:
    return any(stop in text for stop in stops)


@st.composite
def stops_of(draw: st.DrawFn, text: str) -> list[str]:
    """Draw pieces of a text, which may overlap, and some that only begin like it."""
    begin = draw(st.integers(0, len(text) - 1))
    stops = []
    for _ in range(draw(st.integers(1, 3))):
        at = min(begin + draw(st.integers(0, 6)), len(text) - 1)
        stops.append(text[at : at + draw(st.integers(1, 12))] + draw(st.sampled_from(["", "", "", "#", "\u0301"])))
    return stops


@pytest.mark.parametrize("examples", [9, *slow(100)])
def test_answers_are_cut_before_the_first_stop_string(
    examples: int, server: ServerProcess, unstopped: list[Unstopped]
) -> None:
    """One to five requests at once, whole and streamed, with and without a seed."""

    @settings(max_examples=examples, deadline=None)
    @given(st.data())
    def check_cuts(data: st.DataObject) -> None:
        requests = []
        for _ in range(data.draw(st.integers(1, 5), "requests")):
            whole = data.draw(st.sampled_from(unstopped))
            stops = data.draw(stops_of(whole.text), "stop")
            seed = data.draw(st.sampled_from([{}, {"seed": 1}]))
            requests.append((whole, stops, {**whole.body, **seed, "stop": stops}, data.draw(st.booleans(), "stream")))
        answers = together(lambda each: ask(server, COMPLETIONS, each[2], stream=each[3]), requests)
        for answer, (whole, stops, *_) in zip(answers, requests, strict=True):
            check(answer, whole, stops)

    check_cuts()


def test_stop_string_inside_a_word_cuts_the_answer(server: ServerProcess, client: openai.OpenAI, folder: Path) -> None:
    """Biases make the tiny model give the demo model's answer and then end: each token once, in this order."""
    tokenizer: Any = mlx_lm.load(str(folder))[1]
    tokens = tokenizer.encode("The capital of France is Paris.", add_special_tokens=False)
    tokens.append(json.loads((folder / "config.json").read_text())["eos_token_id"])
    assert len(set(tokens)) == len(tokens)
    bias = {str(token): 1_000 - 10 * place for place, token in enumerate(tokens)}
    bias[str(tokens[-1])] += 500  # a prompt's last tokens count as present: the end token does, none of the answer's do
    messages = [{"role": "user", "content": "What?"}]
    options: dict[str, Any] = {"model": "default_model", "messages": messages, "max_tokens": 12}
    options |= {"logit_bias": bias, "presence_penalty": 500}
    whole = client.chat.completions.create(**options).choices[0]
    assert (whole.message.content, whole.finish_reason) == ("The capital of France is Paris.", "stop")
    for seed in (None, 1):
        cut = client.chat.completions.create(**options, stop="apital", seed=seed)
        assert (cut.choices[0].message.content, cut.choices[0].finish_reason) == ("The c", "stop")
        assert cut.usage.completion_tokens == 2
    parts = list(client.chat.completions.create(**options, stop=["s Paris", "e is P"], stream=True))
    assert "".join(part.choices[0].delta.content or "" for part in parts) == "The capital of Franc"
    assert parts[-1].choices[0].finish_reason == "stop"
    # Text that only begins like a stop string is held back until the end token, and then shown.
    ends = client.chat.completions.create(**options, stop=["Paris.\n"]).choices[0]
    assert (ends.message.content, ends.finish_reason) == ("The capital of France is Paris.", "stop")


@pytest.mark.parametrize(
    ("kind", "flags"), [("llama", ()), ("mamba", ()), *slow(("llama", ("--no-prefix-cache",)), ("gemma3", ()))]
)  # fmt: skip
def test_stopped_request_ends_at_once_and_its_prefix_stays_cached(
    kind: str, flags: tuple[str, ...], demo_model_folder: Path, tmp_path: Path, serve: Any, server: ServerProcess
) -> None:
    if (kind, flags) != ("llama", ()):
        server = serve(*flags, model=make_tiny_model(tmp_path / kind, demo_model_folder, kind))

    def chat(name: str, **options: Any) -> int:
        """Return how many tokens the turn after an answer of 40 tokens finds cached."""
        answer = ask(server, COMPLETIONS, {"prompt": f"{name}: ", "logit_bias": SEVEN, **options})
        assert answer.num_tokens == 40
        assert server.stats()["running"] == {"running": 0, "waiting": 0}
        assert not flags or server.stats()["pool"]["live_blocks"] == 0
        return cached(server.complete(f"{name}: " + "7" * 40 + " and", max_tokens=1, logit_bias=SEVEN))

    by_itself = chat("a", max_tokens=40)
    assert chat("b", max_tokens=4000, stop="7" * 40) == by_itself
    assert by_itself == 0 if flags else by_itself >= 32
    assert kind == "mamba" or server.is_idle  # that model has no blocks


def test_answers_with_a_draft_model_are_cut_before_stop_strings(
    folder: Path, unstopped: list[Unstopped], serve: Any
) -> None:
    server = serve("--kv-cache-memory", "8MB", "--draft-model", folder)
    for whole in unstopped[:2]:
        for begin in range(0, len(whole.text) - 4, 29):
            stops = [whole.text[begin + 2 : begin + 5]]
            body = {**whole.body, "stop": stops, "num_draft_tokens": 1 + begin % 3}
            check(ask(server, COMPLETIONS, body, stream=begin % 2 == 0), whole, stops)


def test_logprobs_cover_only_the_shown_tokens(server: ServerProcess, unstopped: list[Unstopped]) -> None:
    for whole in unstopped[:2]:
        content = server.complete(**whole.body, logprobs=True)["choices"][0]["logprobs"]["content"]
        assert len(content) == NUM_TOKENS
        for begin in range(0, len(whole.text), 19):
            stop = whole.text[begin : begin + 9]
            body = server.complete(**whole.body, logprobs=True, top_logprobs=2, stop=stop)
            text, shown = body["choices"][0]["text"], body["choices"][0]["logprobs"]["content"]
            assert [token["id"] for token in shown] == [token["id"] for token in content[: len(shown)]]
            assert all(len(token["top_logprobs"]) == 2 for token in shown)
            # The last token has part of the text; the next one would have none.
            before, after = "".join(whole.pieces[: max(0, len(shown) - 1)]), "".join(whole.pieces[: len(shown)])
            assert len(before) < len(text) <= len(after) if text else not shown
            assert body["usage"]["completion_tokens"] >= len(shown)


def test_many_stop_strings_are_accepted_and_invalid_ones_refused(
    server: ServerProcess, unstopped: list[Unstopped]
) -> None:
    whole = unstopped[0]
    stops = [f"<{number}>" for number in range(1000)] + [whole.text[11:14]]
    check(ask(server, COMPLETIONS, {**whole.body, "stop": stops}), whole, stops)
    for off in ("", [""], []):
        assert ask(server, COMPLETIONS, {**whole.body, "stop": off}).text == whole.text
    for wrong in (["a" * 16_001], [1], {"a": 1}, ["a"] * 1025):
        refused = server.post(COMPLETIONS, {**whole.body, "stop": wrong})
        assert refused.status == 400 and refused.json["error"]["param"] == "stop"
