"""Both servers side by side: stock ``mlx_lm.server`` and ``mlx_paged.server``, the same model and chats.

    python scripts/bench.py servers --tokenizer "$(python scripts/demo_model.py)" --out out/servers
    python scripts/bench.py servers --tokenizer "$(python scripts/demo_model.py)" --random qwen3.5-tiny --turns 12

Each round starts both anew: the same products take up to an eighth more CPU time in one process than in another, for
as long as both run. Chats go to one and then to the other, each case in turn: one chat alone, and several at once.
Tokens per second are of a round's answers over its wall time, with prompts; milliseconds are of the server process's
CPU time for a token. Prompts of a round are new to both, and answers are greedy and streamed.

With ``--turns``, one chat of that many turns instead: how many tokens of each prompt are new, and how many each server
computes. A client sends the messages again in each turn; in some it has changed one in the middle.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.utils import tree_flatten
from transformers import AutoTokenizer

from mlx_paged.engine.sharing import common_length
from tests.support.processes.server_process import ServerProcess

from .models import PRESETS, SEED, random_model
from .report import BenchError, Metric, list_of, positive

METRICS = (
    Metric("tokens/s", "tokens_per_s", "more"),
    Metric("CPU ms/token", "cpu_ms_per_token", "less"),
    Metric("last first ms", "last_first_s", "less", 1e3),
    Metric("prompt", "prompt_tokens", is_plotted=False),
    Metric("new", "new_tokens", is_plotted=False),
    Metric("computed", "computed_tokens", "less"),
    Metric("first ms", "first_s", "less", 1e3),
    Metric("CPU ms", "cpu_s", "less", 1e3),
)
SIDES = {"stock": "mlx_lm", "paged": "mlx_paged"}
APART = 0.01  # seconds between clients: of more that connect at once to stock's server, five may wait
WORDS = ("river", "stone", "window", "green", "paper", "yellow", "sudden", "morning", "winter", "bottle")


def write_model(folder: Path, preset: str, tokenizer: Path) -> None:
    """Write a model of random weights, with a tokenizer and its chat template.

    Raises:
        BenchError: the tokenizer knows more tokens than the model.
    """
    known = len(json.loads((tokenizer / "tokenizer.json").read_text())["model"]["vocab"])
    args = PRESETS[preset].args
    vocabulary = args.get("text_config", args)["vocab_size"]
    if known > vocabulary:
        raise BenchError(f"{preset} knows {vocabulary:,} tokens, the tokenizer {known:,}")
    model = random_model(preset, None)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    (folder / "config.json").write_text(json.dumps(args))
    for path in tokenizer.glob("tokenizer*"):
        shutil.copy(path, folder)


class Answer(NamedTuple):
    """The answer to a chat: its text, the tokens that the server counts, and the seconds to the first event."""

    text: str
    usage: dict[str, Any]
    first_s: float


class Server(ServerProcess):
    """A server in a process of its own, which has answered a chat."""

    def __init__(self, side: str, folder: Path) -> None:
        path = os.pathsep.join(filter(None, sys.path))  # this checkout's modules
        super().__init__(folder, folder, command=SIDES[side], cold=True, PYTHONPATH=path)
        self.side = side
        self.answer([{"role": "user", "content": "hello"}], 2)

    def cpu_seconds(self) -> float:
        """Return the CPU seconds of its process; NaN without /proc."""
        stat = Path(f"/proc/{self.process.pid}/stat")
        if not stat.exists():
            return float("nan")
        fields = stat.read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def answer(self, messages: Sequence[dict[str, str]], num_tokens: int) -> Answer:
        """Return the answer to a chat."""
        begin, first, usage, text = time.perf_counter(), 0.0, {}, ""
        body = {
            "messages": list(messages),
            "max_tokens": num_tokens,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        try:
            connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                raise BenchError(f"the {self.side} server answers {response.status}: {response.read()[:200]!r}")
            for line in response:
                if line.startswith(b"data: {"):
                    first = first or time.perf_counter() - begin
                    event = json.loads(line[6:])
                    usage = event.get("usage") or usage
                    for choice in event["choices"]:
                        text += choice["delta"].get("content") or ""
        finally:
            connection.close()
        return Answer(text, usage, first)


def prompts_of(rng: random.Random, count: int, words: int) -> list[str]:
    return [" ".join(rng.choice(WORDS) for _ in range(words)) for _ in range(count)]


def measured(server: Server, prompts: Sequence[str], num_tokens: int) -> dict[str, Any]:
    """Send chats at once, and return their figures."""
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    used, begin = server.cpu_seconds(), time.perf_counter()
    with ThreadPoolExecutor(len(chats)) as pool:
        under_way = []
        for chat in chats:
            under_way.append(pool.submit(server.answer, chat, num_tokens))
            time.sleep(APART)
        found = [answer.result() for answer in under_way]
    seconds, used = time.perf_counter() - begin, server.cpu_seconds() - used
    total = sum(answer.usage["completion_tokens"] for answer in found)
    return {
        "case": f"{len(chats)} chat(s)",
        "side": server.side,
        "tokens_per_s": total / seconds,
        "cpu_ms_per_token": 1e3 * used / total,
        "last_first_s": max(answer.first_s for answer in found),
        "num_tokens": total,
    }


def converse(server: Server, tokenizer: Any, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Hold a chat, and yield the figures of each turn. The user's messages are the same in each run; the answers are
    the server's. New tokens are those after the longest prefix shared with an earlier prompt and its answer."""
    rng, messages = random.Random(SEED), []
    known: list[list[int]] = []
    for turn in range(1, args.turns + 1):
        if turn in args.edited:  # a message in the middle
            middle = len(messages) // 4 * 2
            messages[middle]["content"] = f"{prompts_of(rng, 1, 3)[0]} {messages[middle]['content']}"
        messages.append({"role": "user", "content": prompts_of(rng, 1, args.words * (5 if turn == 1 else 1))[0]})
        tokens = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        shared = max((common_length(tokens, each) for each in known), default=0)
        used = server.cpu_seconds()
        answer = server.answer(messages, args.answer)
        used = server.cpu_seconds() - used
        prompt_tokens = answer.usage["prompt_tokens"]
        cached = (answer.usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        yield {
            "case": f"turn {turn}",
            "side": server.side,
            "prompt_tokens": prompt_tokens,
            "new_tokens": len(tokens) - shared,
            "computed_tokens": prompt_tokens - cached,
            "first_s": answer.first_s,
            "cpu_s": used,
        }
        messages.append({"role": "assistant", "content": answer.text})
        known.append(tokenizer.apply_chat_template(messages, return_dict=False))


def run_turns(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the figures of the chat of ``--turns`` with each server; print their sums."""
    tokenizer = AutoTokenizer.from_pretrained(str(args.tokenizer))
    with running(args) as servers:
        results = [list(converse(server, tokenizer, args)) for server in servers]
    for mine in results:
        sums = {
            name: sum(each[name] for each in mine) for name in ("new_tokens", "computed_tokens", "first_s", "cpu_s")
        }
        print(f"{mine[0]['side']}: " + ", ".join(f"{name} {value:,.1f}" for name, value in sums.items()))
    return [figures for turn in zip(*results, strict=True) for figures in turn]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--random", choices=sorted(PRESETS), default="llama-22m", help="a model of random weights")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder of a tokenizer with a chat template")
    parser.add_argument("--chats", type=list_of(positive), default=[1, 8], help="at once")
    parser.add_argument("--rounds", type=positive, default=4)
    parser.add_argument("--words", type=positive, default=40, help="of a prompt")
    parser.add_argument("--answer", type=positive, default=128, help="tokens")
    parser.add_argument("--turns", type=positive, help="of one chat; its first message has five times --words")
    parser.add_argument(
        "--edited", type=list_of(positive), default=[], help="turns in which an old message has changed"
    )


@contextlib.contextmanager
def running(args: argparse.Namespace) -> Iterator[list[Server]]:
    """Run the servers in the context."""
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        write_model(folder, args.random, args.tokenizer)
        servers = []
        for side in SIDES:
            servers.append(Server(side, folder))
            stack.callback(servers[-1].stop)
        yield servers


def run(args: argparse.Namespace, given: Sequence[str]) -> list[dict[str, Any]]:
    """Return the figures of each server in each round, or in each turn."""
    if args.turns is not None:
        return run_turns(args)
    rng, results = random.Random(SEED), []
    for number in range(args.rounds):
        with running(args) as servers:
            for count in args.chats:  # not measured
                for server in servers:
                    measured(server, prompts_of(rng, count, args.words), 8)
            for count in args.chats:
                prompts = prompts_of(rng, count, args.words)
                for server in servers if number % 2 == 0 else reversed(servers):
                    results.append(measured(server, prompts, args.answer))
    return results
