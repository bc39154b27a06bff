"""A tokenizer without a file: a token for each byte, and a few for words and markers."""

from __future__ import annotations

from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tool_parsers import json_tools
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

EOS, EOT, THINK, THINK_END, CALL, CALL_END = range(256, 262)
MARKERS = ["<eos>", "<eot>", "<think>", "</think>", "<tool_call>", "</tool_call>"]


def byte_tokenizer(*, calls_tools: bool = False, parser: object = json_tools.parse_tool_call) -> TokenizerWrapper:
    """mlx-lm's wrapper of one with 256 bytes and MARKERS; it ends answers with EOS and EOT.

    Args:
        calls_tools: there is a format of tool calls.
        parser: of it.
    """
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    by_byte = sorted(letters, key=lambda letter: _byte_of(letter))
    inner = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(by_byte)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    # As in models that call tools, the markers of reasoning and calls are not special, those of ends are.
    inner.add_tokens([AddedToken(name, special=index < 2) for index, name in enumerate(MARKERS)])
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>")
    tools = {"tool_call_start": "<tool_call>", "tool_call_end": "</tool_call>", "tool_parser": parser}
    return TokenizerWrapper(fast, eos_token_ids=[EOS, EOT], **(tools if calls_tools else {}))


def _byte_of(letter: str) -> int:
    """Of the letters that stand for bytes in byte-level vocabularies."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    if ord(letter) in plain:
        return ord(letter)
    others = [byte for byte in range(256) if byte not in plain]
    return others[ord(letter) - 256]
