"""Tokenizers without a file: a token for each byte and for markers, or one for each word."""

from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tool_parsers import json_tools
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.support.models.builders import VOCAB

EOS, EOT, THINK, THINK_END, CALL, CALL_END = range(256, 262)
MARKERS = ["<eos>", "<eot>", "<think>", "</think>", "<tool_call>", "</tool_call>"]


def byte_tokenizer(*, calls_tools: bool = False, parser: object = json_tools.parse_tool_call) -> TokenizerWrapper:
    """Return mlx-lm's wrapper of a tokenizer of 256 bytes and MARKERS, whose ends of an answer are EOS and EOT.

    Args:
        calls_tools: whether it has a tool-call format.
        parser: of tool calls.
    """
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    by_byte = sorted(letters, key=lambda letter: _byte_of(letter))
    inner = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(by_byte)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    # As in models that call tools, the markers of ends are special, those of reasoning and calls are not.
    inner.add_tokens([AddedToken(name, special=index < 2) for index, name in enumerate(MARKERS)])
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>")
    tools = {"tool_call_start": "<tool_call>", "tool_call_end": "</tool_call>", "tool_parser": parser}
    return TokenizerWrapper(fast, eos_token_ids=[EOS, EOT], **(tools if calls_tools else {}))


def _byte_of(letter: str) -> int:
    """Return the byte that a letter stands for in byte-level vocabularies."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    if ord(letter) in plain:
        return ord(letter)
    others = [byte for byte in range(256) if byte not in plain]
    return others[ord(letter) - 256]


def word_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer whose tokens are the words "w0" to "w319"; none ends an answer."""
    inner = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="w0", eos_token=None)


def plain_tokenizer() -> TokenizerWrapper:
    return TokenizerWrapper(word_tokenizer())
