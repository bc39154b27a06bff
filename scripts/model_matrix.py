"""What runs paged: builds a tiny random model of every module of mlx-lm, generates with it on stock mlx-lm and under
apply_patches(), alone and in a batch, compares, and writes docs/models.md."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from mlx_lm.generate import generate_step  # noqa: E402

import mlx_paged  # noqa: E402
from mlx_paged import PagedConfig, PagedKVCache, warn  # noqa: E402
from scripts.support import model_configs  # noqa: E402

PAGE = ROOT / "docs" / "models.md"
FIGURES = "\n## On a GPU\n"  # what follows is measured by hand, and kept
BLOCK_SIZE = 8
PROMPTS = (5, 30, 45)  # within a window, across windows and chunks of either kind
LIMIT = 1e-5
# Of modules whose layers are all paged, those whose decode steps are never compiled.
NOT_COMPILED = {
    "dbrx": "chooses experts on the host",
    "deepseek_v32": "chooses tokens in long contexts only",
    "glm_moe_dsa": "the same",
    "phi3small": "attends over gathered arrays",
}


class Row(NamedTuple):
    """A line of the table.

    Attributes:
        module: of mlx_lm.models.
        status: paged, partly (some layers), stock, or not built.
        groups: of paged layers.
        attention: how paged layers attend: over blocks by an adapter or the seam, or over gathered arrays.
        batch: together, or one by one.
        packs: whether chunks of several prompts go through the model as one pack.
        compiled: whether decode steps run as one compiled function where kernels attend.
        look_up: whether rows may propose tokens that they had before.
        single, batched, packed: RMS of the log-probabilities against stock's single run, alone, in a batch, and in one
            whose prompts are packed; None if tokens differ.
        sharing: whether requests share prefixes: to the token ("yes"), at checkpoints, or not.
        reasons: what is not paged and why.
    """

    module: str
    status: str
    groups: str = ""
    attention: str = ""
    batch: str = ""
    packs: str = ""
    compiled: str = ""
    look_up: str = ""
    single: float | None = None
    batched: float | None = None
    packed: float | None = None
    sharing: str = ""
    reasons: str = ""

    @property
    def agrees(self) -> bool:
        figures = [self.single, self.batched] + ([self.packed] if self.packs == "yes" else [])
        return self.status == "not built" or all(x is not None and x <= LIMIT for x in figures)


Run = tuple[list[int], np.ndarray]


def prompt_of(length: int) -> list[int]:
    return np.random.default_rng(length).integers(0, model_configs.VOCAB, length).tolist()


def alone(model: Any, length: int, num_tokens: int, chunk: int = model_configs.CHUNK) -> Run:
    tokens, logprobs = [], []
    prompt = mx.array(prompt_of(length), mx.uint32)
    for token, logprob in generate_step(prompt, model, max_tokens=num_tokens, prefill_step_size=chunk):
        tokens.append(int(token))
        logprobs.append(np.array(logprob))
    return tokens, np.stack(logprobs)


def batched(
    model: Any, num_tokens: int, chunk: int = model_configs.CHUNK, packs: bool | None = None
) -> tuple[list[Run], Any]:
    """All prompts in one batch, with ``packs`` in packs if the model allows it; and the generator."""

    kind = type("Generator", (sys.modules["mlx_lm.generate"].BatchGenerator,), {"packs": packs})
    generator = kind(model, max_tokens=num_tokens, prefill_step_size=chunk)
    if packs and generator._engine is not None:
        generator._engine.scheduler.token_budget = len(PROMPTS) * chunk  # of each prompt a chunk in a step
    uids = generator.insert([prompt_of(length) for length in PROMPTS])
    found: dict[int, tuple[list[int], list[np.ndarray]]] = {uid: ([], []) for uid in uids}
    while responses := generator.next_generated():
        for response in responses:
            found[response.uid][0].append(response.token)
            found[response.uid][1].append(np.array(response.logprobs))
    generator.close()
    return [(tokens, np.stack(logprobs)) for tokens, logprobs in found.values()], generator


def difference(runs: list[Run], expected: list[Run]) -> float | None:
    """Largest RMS of a run's log-probabilities; None if tokens differ."""
    if any(run[0] != other[0] for run, other in zip(runs, expected, strict=True)):
        return None
    figures = []
    for (_, logprobs), (_, others) in zip(runs, expected, strict=True):
        same = logprobs == others  # -inf, where a model rules a token out
        errors = np.where(same, 0.0, logprobs.astype(np.float64) - others)
        figures.append(float(np.sqrt(np.mean(errors**2))))
    return max(figures)


def examine(name: str, num_tokens: int = 64) -> Row:
    """Build a module's model, run it both ways and compare. Leaves mlx-lm unpatched."""
    chunk = model_configs.CHUNKS.get(name, model_configs.CHUNK)
    try:
        model = model_configs.build(name)
        expected = [alone(model, length, num_tokens, chunk) for length in PROMPTS]
    except (Exception, SystemExit) as error:
        return Row(name, "not built", reasons=reason_of(error))
    warn.forget_warnings()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mlx_paged.apply_patches(PagedConfig(block_size=BLOCK_SIZE, kv_cache_memory=1 << 28))
        try:
            single = difference([alone(model, length, num_tokens, chunk) for length in PROMPTS], expected)
            runs, generator = batched(model, num_tokens, chunk)
            together = difference(runs, expected)
            mlx_paged.reset_dispatch_counts()
            runs, packing = batched(model, num_tokens, chunk, packs=True)
            packed = difference(runs, expected) if packs_of(packing) else None
            return row_of(name, model, (single, together, packed), generator, packs_of(packing), caught)
        finally:
            mlx_paged.remove_patches()


def reason_of(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return "it asks for a package that is not installed"
    return (str(error).splitlines() or [type(error).__name__])[0]


def packs_of(generator: Any) -> bool:
    """Whether prompts have just gone through the model as packs, and no layer would not have it."""
    engine = generator._engine
    came = any(choice.path == "apart" for choice in mlx_paged.dispatch_counts())
    return engine is not None and engine.prefill.packs and (came or engine.pool is None)


def row_of(
    name: str, model: Any, figures: tuple[float | None, ...], generator: Any, packs: bool, caught: list[Any]
) -> Row:
    from mlx_lm.models.cache import make_prompt_cache

    from mlx_paged.cache.composites import leaves

    caches = leaves(make_prompt_cache(model))
    pool = mlx_paged.pool_of(model)
    paged = [cache for cache in caches if isinstance(cache, PagedKVCache)]
    status = "stock" if not paged else "paged" if len(paged) == len(caches) else "partly"
    groups = []
    for group in pool.groups if pool is not None else ():
        heads, k_dim, v_dim, *_ = group.geometry
        dim = str(k_dim) if k_dim == v_dim else f"{k_dim}/{v_dim}"
        groups.append(f"{len(group.spec.layers)} {group.spec.name.split(',')[0]} ({heads} x {dim})")
    reasons = []
    for warning in caught:
        if issubclass(warning.category, mlx_paged.NotPagedWarning):
            reasons.append(str(warning.message).removeprefix("mlx_paged: ").split(": ", 1)[-1].split(";")[0])
    engine = generator._engine
    batch = "mlx-lm's" if engine is None else engine.batch.kind
    return Row(
        name, status, ", ".join(groups), attention_of(model), batch, "yes" if packs else "no",
        "no" if status == "stock" or name in NOT_COMPILED else "yes",
        "yes" if packs and engine.drafts is not None else "no", *figures,
        "no" if engine is None else "yes" if engine.all_paged else "checkpoints", "; ".join(dict.fromkeys(reasons)),
    )  # fmt: skip


def attention_of(model: Any) -> str:
    from mlx_paged.patches.cache.layout import layout_of
    from mlx_paged.patches.models.latent import latent_caches_of

    layout = layout_of(model)
    if layout is None or not layout.groups:
        return ""
    if layout.adapted:
        return "blocks (adapter)"
    caches = max(latent_caches_of(module) for _, module in model.named_modules())
    if caches:
        return "latents, chosen" if caches > 1 else "latents"
    seam = [heads is not None for _, heads in layout.geometries]
    return "blocks" if all(seam) else "blocks, some gathered" if any(seam) else "gathered"


HEADER = """# Models

Every model module of mlx-lm 0.32 (`mlx_lm.models`): {paged} paged, {partly} partly paged, {stock} on mlx-lm's own
caches, {not_built} that could not be built here. Written by `scripts/model_matrix.py`, which builds the smallest
configuration of each (`scripts/support/model_configs.py`) with random f32 weights and compares {tokens} greedy tokens
after prompts of {prompts} tokens with stock mlx-lm's, each prompt alone: windows and chunks of {window} tokens, prefill
in steps of {chunk}, blocks of {block}. `make test-models` repeats it.

- **Paged**: all layers, some (the others hold states that are not keys and values), or none (there are states alone, or
  what the last column says).
- **Groups**: paged layers by window and geometry (KV heads x head size; keys/values where they differ).
- **Attention**: over the blocks, which is the kernel on a GPU if it has the head size and MLX's attention elsewhere; or
  over arrays gathered from them, where the model computes with keys and values itself. Over latents (MLA): decode steps
  over the blocks, prompts over keys and values made of them, where there are kernels
  ([ADR 0033](adr/0033-latent-pages.md)); else over gathered arrays. "Chosen": a second group of pages holds the keys of
  an indexer. Up to `index_topk` tokens of context, attention is as over any latents; beyond, index keys and latents are
  gathered and mlx-lm's own code chooses, on any device ([ADR 0072](adr/0072-index-keys.md)).
- **Batch**: rows decode in one call, or one by one in models that cannot take rows of different lengths.
- **Packs**: on a GPU, chunks of several prompts go through the model in one call, as rows of one token; else alone.
  Layers with states take the tokens of several sequences side by side ([ADR 0069](adr/0069-packs-with-states.md)).
- **Look-up**: whether rows may propose tokens that they had before ([look-up](reference.md#look-up)).
- **Alone**, **batched**, **packed**: RMS of the log-probabilities against stock's run, on a CPU. The tokens are equal.
- **Compiled**: on a GPU, if all paged layers attend in the kernel, decode steps run as one compiled function, with the
  states of the other layers as inputs ([ADR 0005](adr/0005-compiled-decode-step.md)). Not compiled:
  models without a paged layer, {not_compiled}.
- **States** (SSM, convolutions, linear attention) lie in mlx-lm's own cache objects. Those of requests and of
  checkpoints count in the pool's budget, and checkpoints go to disk with the blocks. Where mlx-lm has no kernel, linear
  attention of Qwen3-Next, Qwen3.5 and OLMo hybrid takes prompts by chunks of tokens
  ([ADR 0066](adr/0066-gated-delta-rule.md)), and one token of Mamba 2's layers takes half of the
  operations ([ADR 0076](adr/0076-one-token-of-a-state-space.md)).
- **Prefixes**: whether requests share what they have in common: "yes", to the token; "checkpoints", where the states of
  layers that are not paged were kept ([checkpoints](reference.md#checkpoints), [ADR 0053](adr/0053-checkpoints.md)).

With `kv_bits` ([ADR 0026](adr/0026-quantised-pages.md)), by kind of layer:

- global layers, sliding windows, layers with sinks or soft caps, layers that attend to another one's keys, keys and
  values beside states in a hybrid or a composite: quantised, if key and value are multiples of `kv_group_size` long;
- latents (MLA), and whatever else a model computes with by itself ("gathered" above): stay as they are;
- states (SSM, convolutions, linear attention), and layers that are not paged: mlx-lm's own caches, as without.

"""
COLUMNS = (
    "Module", "Paged", "Groups", "Attention", "Batch", "Packs", "Compiled", "Look-up", "Alone", "Batched", "Packed",
    "Prefixes", "Why not",
)  # fmt: skip


def page_of(lines: dict[str, str], num_tokens: int = 64) -> str:
    """The Markdown page of these lines (see :func:`line_of`), by module."""
    statuses = [line.split(" | ")[1] for line in lines.values()]
    counts = {kind.replace(" ", "_"): statuses.count(kind) for kind in ("paged", "partly", "stock", "not built")}
    not_compiled = ", ".join(f"{name} ({why})" for name, why in NOT_COMPILED.items())
    header = HEADER.format(
        **counts, tokens=num_tokens, prompts=", ".join(map(str, PROMPTS)), window=model_configs.WINDOW,
        chunk=model_configs.CHUNK, block=BLOCK_SIZE, not_compiled=not_compiled,
    )  # fmt: skip
    header += f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|\n"
    page = header + "".join(lines[name] + "\n" for name in sorted(lines))
    _, title, figures = PAGE.read_text().partition(FIGURES) if PAGE.exists() else ("", "", "")
    return page + title + figures


def lines_of_page() -> dict[str, str]:
    """The page's lines by module, as they are at present."""
    if not PAGE.exists():
        return {}
    page = PAGE.read_text().partition(FIGURES)[0]
    lines = [line for line in page.splitlines() if line.startswith("| ")][1:]
    return {line.split(" | ")[0].removeprefix("| "): line for line in lines}


def line_of(row: Row) -> str:
    cells = [row.module, row.status, row.groups, row.attention, row.batch, row.packs, row.compiled, row.look_up]
    cells += [
        figure(row, row.single),
        figure(row, row.batched),
        figure(row, row.packed) if row.packs == "yes" else "",
        row.sharing,
        row.reasons,
    ]
    return "| " + " | ".join(cell.replace("|", "\\|") or " " for cell in cells) + " |"


def figure(row: Row, value: float | None) -> str:
    if row.status == "not built":
        return ""
    return "tokens differ" if value is None else "0" if value == 0 else f"{value:.0e}"


def examine_apart(name: str, num_tokens: int) -> Row:
    """:func:`examine` in a process of its own: a crash in a module ends that process only."""
    command = [sys.executable, __file__, "--json", "--tokens", str(num_tokens), name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    for line in reversed(done.stdout.splitlines()):
        if line.startswith("{"):
            return Row(**json.loads(line))
    return Row(name, "failed", reasons=f"exit status {done.returncode}: {(done.stderr.splitlines() or [''])[-1]}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("modules", nargs="*", help="names of mlx_lm.models (default: all)")
    parser.add_argument("--tokens", type=int, default=64, help="tokens to generate after each prompt")
    parser.add_argument("--json", action="store_true", help="one JSON object per module, in this process")
    parser.add_argument("--check", action="store_true", help="do not write the page")
    options = parser.parse_args(arguments)
    if options.json:
        for name in options.modules:
            print(json.dumps(examine(name, options.tokens)._asdict()), flush=True)
        return 0
    rows = []
    for name in options.modules or model_configs.modules():
        rows.append(examine_apart(name, options.tokens))
        row = rows[-1]
        print(line_of(row), flush=True)
    if not options.check:
        known = lines_of_page() if options.modules else {}
        PAGE.write_text(page_of({**known, **{row.module: line_of(row) for row in rows}}))
    return 0 if all(row.agrees for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
