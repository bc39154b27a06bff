"""Trials: what ends, stops or fills the process that tries a grammar is refused, and nobody else is concerned."""

import random
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest

from mlx_paged.engine.grammar import check, trial
from mlx_paged.engine.grammar.compiler import MAX_VERDICTS, GrammarCompiler, GrammarSource
from mlx_paged.engine.grammar.trial import TrialProcess, Verdict
from mlx_paged.errors import GrammarAbandoned, GrammarError
from tests.support.models.tokenizers import byte_tokenizer
from tests.support.without_collector import without_collector

ENDLESS = GrammarSource.json({"type": "integer", "multipleOf": 16777216})
FINE = GrammarSource.regex("[a-z]+")


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> GrammarCompiler:
    monkeypatch.setattr(check, "TRIAL_SECONDS", 0.5)
    return make()


def make() -> GrammarCompiler:
    tokenizer = byte_tokenizer()
    return GrammarCompiler(tokenizer._tokenizer, tokenizer.eos_token_ids)


def num_started(compiler: GrammarCompiler) -> int:
    return sum(process.num_started for process in compiler.trials._idle)


TOO_LONG = [
    ENDLESS,
    GrammarSource.json({"properties": {"a": {"type": "integer", "multipleOf": 2147483648}}}),
    GrammarSource.regex("a?" * 60_000),
]


@pytest.mark.parametrize("source", TOO_LONG, ids=lambda source: f"{source.kind}-{source.text[:20]}")
def test_what_takes_long_is_refused_and_not_tried_again(compiler: GrammarCompiler, source: GrammarSource) -> None:
    for _ in range(2):
        with pytest.raises(GrammarError, match=r"takes more than 0\.5 s to compile"):
            compiler.compile(source)
    assert num_started(compiler) == 1
    compiler.compile(FINE)
    assert num_started(compiler) == 2


def test_what_takes_much_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "TRIAL_BYTES", 80 << 20)  # the stack takes 64 MB
    monkeypatch.setattr(check, "TRIAL_SECONDS", 60.0)
    compiler = make()
    with pytest.raises(GrammarError, match="more memory"):
        compiler.compile(ENDLESS)
    compiler.compile(GrammarSource.regex("a"))


def test_what_crashes_llguidance_is_refused(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    crash = GrammarSource.json({"const": -(2**63)})
    for name in ("mlx_paged.engine.grammar.compiler.fault_of_size",):
        monkeypatch.setattr(name, lambda kind, text: "")  # which refuses it before
    with pytest.raises(GrammarError, match="more memory or depth"):
        compiler.compile(crash)
    compiler.compile(FINE)
    assert num_started(compiler) == 2


def test_a_process_is_started_when_it_is_needed_and_kept() -> None:
    compiler = make()
    assert num_started(compiler) == 0
    for number in range(20):
        compiler.compile(GrammarSource.regex(f"{number}"))
    assert num_started(compiler) == 1


def test_a_process_that_has_grown_is_not_used_again() -> None:
    compiler = make()
    compiler.compile(GrammarSource.json({"enum": [f"v{i}" for i in range(20_000)]}))
    compiler.compile(FINE)
    assert num_started(compiler) == 2


def test_what_was_tried_elsewhere_is_not_tried_again() -> None:
    compiler = make()
    compiler.compile(FINE, is_checked=True)
    assert num_started(compiler) == 0


def test_verdicts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = make()
    monkeypatch.setattr(compiler.trials, "try_out", lambda kind, text, is_cancelled: Verdict("no"))
    for number in range(MAX_VERDICTS + 10):
        with pytest.raises(GrammarError, match="no"):
            compiler.check(GrammarSource.regex(f"{number}"))
    assert len(compiler._verdicts) == MAX_VERDICTS


class Client:
    """Compiles in a thread of its own until its event is set."""

    def __init__(self, compiler: GrammarCompiler, source: GrammarSource) -> None:
        self.has_gone, self.is_asked = threading.Event(), threading.Event()
        self.raised: list[BaseException] = []
        self.thread = threading.Thread(target=self._run, args=(compiler.compile, source))
        self.thread.start()

    def _run(self, compile_it: Callable[..., object], source: GrammarSource) -> None:
        try:
            compile_it(source, is_cancelled=self._is_cancelled)
        except BaseException as error:
            self.raised.append(error)

    def _is_cancelled(self) -> bool:
        self.is_asked.set()
        return self.has_gone.is_set()

    def leave(self) -> None:
        self.has_gone.set()
        self.thread.join(60)
        (error,) = self.raised
        assert isinstance(error, GrammarAbandoned)


def test_others_are_served_while_one_is_tried_and_its_trial_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "TRIAL_SECONDS", 600.0)
    compiler = make()
    processes = list(compiler.trials._idle)
    one = Client(compiler, ENDLESS)
    assert one.is_asked.wait(60)
    for number in range(5):
        compiler.compile(GrammarSource.regex(f"{number}"))
    assert one.thread.is_alive() and not one.raised
    two = Client(compiler, GrammarSource.json({"type": "integer", "multipleOf": 16777218}))
    three = Client(compiler, GrammarSource.regex("new"))  # waits, and is told apart by its client's leaving
    assert two.is_asked.wait(60) and three.is_asked.wait(60)
    compiler.compile(GrammarSource.regex("3"))  # which was compiled before
    three.leave()
    two.leave()
    one.leave()
    assert [process._process.poll() for process in processes if process._process] == [-9, -9]
    compiler.compile(FINE)


def test_many_who_want_one_grammar_have_it_tried_once(compiler: GrammarCompiler) -> None:
    clients = [Client(compiler, ENDLESS) for _ in range(16)]
    for client in clients:
        client.thread.join(60)
        (error,) = client.raised
        assert "takes more than" in str(error)
    assert num_started(compiler) == 1


def test_a_process_that_was_ended_is_started_again(compiler: GrammarCompiler) -> None:
    compiler.compile(FINE)
    (process,) = [process for process in compiler.trials._idle if process._process is not None]
    assert process._process is not None
    process._process.kill()
    process._process.wait()
    compiler.compile(GrammarSource.regex("b"))


def test_nothing_of_the_current_folder_or_the_environment_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("json", "llguidance", "sitecustomize", "usercustomize", "signal"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    compiler = make()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    compiler.compile(FINE)
    assert num_started(compiler) == 1 and not (tmp_path / "ran").exists()


def test_the_process_ends_with_its_owner() -> None:
    def use() -> tuple[weakref.ref[TrialProcess], Callable[[], int | None]]:
        compiler = make()
        compiler.compile(FINE)
        (owner,) = [process for process in compiler.trials._idle if process._process is not None]
        assert owner._process is not None
        return weakref.ref(owner), owner._process.poll

    with without_collector():
        owner, status = use()
        assert owner() is None and status() is not None


def test_a_lexer_that_was_used_up_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(check.LIMITS, "max_lexer_states", 500)
    source, compiler = GrammarSource.regex("(.*a.{12})+"), make()

    def use_up() -> None:
        letters, grammar = random.Random(0), compiler.compile(source).start()
        for _ in range(2000):
            grammar.accept(ord(letters.choice("ab")))

    for _ in range(3):  # each time it is fresh at first
        with pytest.raises(GrammarError, match=r"more work .*: lexer error: too many states"):
            use_up()


def test_the_bound_of_time_is_of_the_processs_own() -> None:
    assert trial.WALL_FACTOR * check.TRIAL_SECONDS >= 30, "a busy machine does not make grammars fail"
