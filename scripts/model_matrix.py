"""What runs paged: builds a tiny random model of every module of mlx-lm, generates with it on stock mlx-lm and under
apply_patches(), alone and in a batch, compares, and writes the table of docs/models.md."""

from __future__ import annotations

import argparse
import re
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mlx_lm.generate import generate_step

import mlx_paged
from mlx_paged import PagedConfig, PagedKVCache, warn
from scripts.support import model_configs
from tests.support.models.batch_runs import with_packs

PAGE = Path(__file__).resolve().parents[1] / "docs" / "models.md"
TABLE = f"{'|---' * 13}|\n"  # the line below the table's header
FIGURES = "\n## On a GPU\n"  # the heading after the table
BLOCK_SIZE = 8
PROMPTS = (5, 30, 45)  # within a window, across windows and chunks of either kind
LIMIT = 1e-5
# Modules whose layers are all paged, but whose decode steps are never compiled.
NOT_COMPILED = (  # the page says why
    "dbrx", "deepseek_v32", "glm_moe_dsa", "phi3small", "stablelm", "plamo", "plamo2", "gpt_bigcode", "afm7",
)  # fmt: skip


class Row(NamedTuple):
    """A line of the table.

    Attributes:
        module: name in mlx_lm.models.
        status: paged, partly (some layers), stock, or not built.
        groups: of paged layers.
        attention: how paged layers attend: over blocks by an adapter or the seam, or over gathered arrays.
        batch: how rows decode: together, or one by one.
        packs: whether chunks of several prompts go through the model as one pack.
        compiled: whether decode steps run as one compiled function where kernels attend.
        look_up: whether prompt look-up can draft tokens.
        single, batched, packed: RMS difference of the log-probabilities from stock's single run: alone, in a batch, and
            in a batch with packed prompts; None if tokens differ.
        sharing: whether requests share prefixes: in whole blocks ("yes"), at checkpoints, or not.
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
    """Run all prompts in one batch; ``packs``: in packs, if the model allows it. Return the runs and the generator."""
    with with_packs(packs):
        generator = sys.modules["mlx_lm.generate"].BatchGenerator(model, max_tokens=num_tokens, prefill_step_size=chunk)
    if packs:
        generator._engine.scheduler.token_budget = len(PROMPTS) * chunk  # a chunk of each prompt per step
    uids = generator.insert([prompt_of(length) for length in PROMPTS])
    found: dict[int, tuple[list[int], list[np.ndarray]]] = {uid: ([], []) for uid in uids}
    while responses := generator.next_generated():
        for response in responses:
            found[response.uid][0].append(response.token)
            found[response.uid][1].append(np.array(response.logprobs))
    generator.close()
    return [(tokens, np.stack(logprobs)) for tokens, logprobs in found.values()], generator


def difference(runs: list[Run], expected: list[Run]) -> float | None:
    """Return the largest RMS difference of a run's log-probabilities; None if tokens differ."""
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
    warn._given.clear()
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
    """Return whether prompts have just been computed as packs, and no layer has refused them."""
    engine = generator._engine
    came = any(choice.path == "apart" for choice in mlx_paged.dispatch_counts())
    return engine.prefill.packs and (came or engine.pool is None)


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
    batch = "together" if engine.batch.takes_rows else "one by one"
    return Row(
        name, status, ", ".join(groups), attention_of(model), batch, "yes" if packs else "no",
        "no" if status == "stock" or name in NOT_COMPILED else "yes",
        "yes" if packs and engine.drafts is not None else "no", *figures,
        "yes" if engine.all_paged else "checkpoints", "; ".join(dict.fromkeys(reasons)),
    )  # fmt: skip


def attention_of(model: Any) -> str:
    from mlx_paged.patches.cache.layout import latent_caches_of, layout_of

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


COUNTS = "{paged} paged, {partly} partly paged, {stock} on mlx-lm's own caches, {not_built} that could not be built"


def page_of(lines: dict[str, str]) -> str:
    """Return the page with these lines (see :func:`line_of`), by module, in its table."""
    statuses = Counter(line.split(" | ")[1] for line in lines.values())
    kinds = ("paged", "partly", "stock", "not built")
    counts = COUNTS.format(**{kind.replace(" ", "_"): statuses[kind] for kind in kinds})
    before, head, rest = PAGE.read_text().partition(TABLE)
    table = "".join(lines[name] + "\n" for name in sorted(lines))
    before = re.sub(re.sub(r"\{\w+\}", r"\\d+", COUNTS), counts, before)
    return before + head + table + "".join(rest.partition(FIGURES)[1:])


def lines_of_page() -> dict[str, str]:
    """Return the current lines of the page's table by module."""
    table = PAGE.read_text().partition(TABLE)[2].partition(FIGURES)[0]
    return {line.split(" | ")[0].removeprefix("| "): line for line in table.splitlines()}


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("modules", nargs="*", help="names of mlx_lm.models (default: all)")
    modules = parser.parse_args().modules
    rows = []
    for name in modules or model_configs.modules():
        rows.append(examine(name))
        print(line_of(rows[-1]), flush=True)
    known = lines_of_page() if modules else {}
    PAGE.write_text(page_of({**known, **{row.module: line_of(row) for row in rows}}))
    return 0 if all(row.agrees for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
