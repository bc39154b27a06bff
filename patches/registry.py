"""apply_patches() and remove_patches(): which upstream symbols are replaced, and only if they are the ones we know.

``python -m mlx_paged.patches.registry --fingerprint`` says how the installed mlx-lm differs from the one known.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import inspect
import sys
import threading
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any, NamedTuple

from ..config import PagedConfig
from ..errors import PatchError
from ..kernels.build import backend

_MODELS = "mlx_lm.models"
_SHARED = (f"{_MODELS}.base", f"{_MODELS}.cache")  # by all models


class Patch(NamedTuple):
    """One upstream symbol and its replacement.

    Attributes:
        module: upstream module.
        name: a function of the module, or ``Class.method``.
        fingerprint: of the upstream source the replacement was written for (see :func:`fingerprint`).
        adapter: ``folder.module.function`` of this package, from the original to its replacement. Imported when the
            patch is applied: what it imports may be missing in this version of mlx-lm.
        adapts_attention: the symbol is the ``__call__`` of an attention class, whose layers then need no seam.
        only_cuda: elsewhere the symbol is as good as its replacement, and stays.
    """

    module: str
    name: str
    fingerprint: str
    adapter: str
    adapts_attention: bool = False
    only_cuda: bool = False

    @property
    def target(self) -> str:
        return f"{self.module}.{self.name}"

    @property
    def can_wait(self) -> bool:
        """Return whether the symbol is that of a model's module which nothing has imported yet."""
        is_of_model = self.module.startswith(f"{_MODELS}.") and self.module not in _SHARED
        return is_of_model and self.module not in sys.modules


@dataclass
class PatchReport:
    """What :func:`apply_patches` did.

    Attributes:
        applied: upstream symbols that are replaced.
        skipped: symbols left as they are, with the reason.
        waiting: symbols of models that are not loaded yet; replaced when the first cache of such a model is made.
    """

    applied: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    waiting: list[str] = field(default_factory=list)


def fingerprint(symbol: Any) -> str:
    """First 16 hex digits of the SHA-256 of a function's source, blank lines and indentation of the whole removed."""
    lines = inspect.cleandoc("\n" + inspect.getsource(symbol)).splitlines()
    return hashlib.sha256("\n".join(line.rstrip() for line in lines if line.strip()).encode()).hexdigest()[:16]


_lock = threading.RLock()
_config = PagedConfig()
_originals: dict[Patch, Any] = {}
_replacements: dict[Patch, Any] = {}
_waiting: list[Patch] = []  # for their models' modules to be imported
_adapted: set[type] = set()  # attention classes with an adapter


def _has_adapter(layer: Any) -> bool:
    # Asked for each layer of each new cache: attention is nearly always a part of the layer itself.
    if isinstance(layer, dict) and any(type(part) in _adapted for part in layer.values()):
        return True
    return any(type(module) in _adapted for _, module in layer.named_modules())


def _patches() -> list[Patch]:
    """Return all there are, on whatever device."""
    models, attention = _MODELS, "Attention.__call__"
    quantized, experts = "mlx.nn.layers.quantized", "QuantizedSwitchLinear.__call__"
    linear, embedding = "QuantizedLinear.__call__", "QuantizedEmbedding.as_linear"
    return [
        Patch(f"{models}.base", "scaled_dot_product_attention", "a13838be6e6c5293", "models.seam.adapt"),
        Patch(f"{models}.llama", attention, "75a76f7de7eb3586", "models.llama.adapt", adapts_attention=True),
        Patch(f"{models}.qwen3", attention, "f4d9ba397a109135", "models.qwen3.adapt", adapts_attention=True),
        Patch(f"{models}.gemma2", attention, "4adbbc3cde1384bc", "models.gemma2.adapt", adapts_attention=True),
        Patch(f"{models}.gemma3_text", attention, "e9ebcce92c86c40c", "models.gemma3.adapt", adapts_attention=True),
        Patch(f"{models}.deepseek_v3", "DeepseekV3Attention.__call__", "a81cbde5b662b1b7", "models.latent.adapt"),
        Patch(f"{models}.glm4_moe_lite", "Glm4MoeLiteAttention.__call__", "a81cbde5b662b1b7", "models.latent.adapt"),
        Patch(f"{models}.longcat_flash", "LongcatFlashMLA.__call__", "bcf7c12cb5cbfd04", "models.latent.adapt"),
        Patch(f"{models}.kimi_linear", "KimiMLAAttention.__call__", "f90ce415739ceacc", "models.latent.adapt"),
        Patch(f"{models}.kimi_k3", "KimiK3MLAAttention.__call__", "2a82ca8331e6a7cd", "models.latent.adapt_gated"),
        Patch(f"{models}.bailing_hybrid", "MultiLatentAttention.__call__", "0b66107a9d9ceb5f", "models.latent.adapt"),
        Patch(f"{models}.bailing_moe_v3", "BailingMLA.__call__", "df5523fbc5eee955", "models.latent.adapt_heads_gated"),
        Patch(f"{models}.mistral4", "Mistral4Attention.__call__", "ae8ba5a34379792c", "models.latent.adapt_scaled"),
        Patch(f"{models}.llama4", attention, "ec00d284640b9a07", "models.llama4.adapt", adapts_attention=True),
        Patch(f"{models}.llama4", "LlamaModel.__call__", "4c6a95216c9a7968", "models.llama4.adapt_model"),
        Patch(f"{models}.stablelm", attention, "cd350373ffb9d079", "models.seam.adapt_stablelm"),
        Patch(f"{models}.phi", "PhiAttention.__call__", "2eac47853096f4d3", "models.seam.adapt_phi"),
        Patch(f"{models}.phixtral", "RoPEAttention.__call__", "7515a9221787da81", "models.seam.adapt_phixtral"),
        Patch(f"{models}.plamo", attention, "d419e2fb5c647aae", "models.seam.adapt_plamo"),
        Patch(f"{models}.plamo2", attention, "07f12104004abcf5", "models.seam.adapt_plamo2"),
        Patch(
            f"{models}.gpt_bigcode",
            "GPTBigCodeModel.__call__",
            "d5a8f0bf92fed57f",
            "models.seam.adapt_bigcode",
        ),
        Patch(f"{models}.afm7", "AFMModel.__call__", "465229dcd50f6525", "models.seam.adapt_afm7"),
        Patch(f"{models}.llama", "MLP.__call__", "ec6fbfefb1f0b4c0", "models.transformer_block.adapt_mlp"),
        Patch(f"{models}.qwen3", "MLP.__call__", "ec6fbfefb1f0b4c0", "models.transformer_block.adapt_mlp"),
        Patch(f"{models}.gemma3_text", "MLP.__call__", "40fa7af8e58d245e", "models.gemma3.adapt_mlp"),
        Patch(f"{models}.llama", "TransformerBlock.__call__", "4614a766e7f00ade", "models.transformer_block.adapt"),
        Patch(f"{models}.qwen3", "TransformerBlock.__call__", "4614a766e7f00ade", "models.transformer_block.adapt"),
        Patch(f"{models}.llama", "Model.__call__", "7d7a49eb8d846b96", "models.compiled.adapt"),
        Patch(f"{models}.qwen3", "Model.__call__", "7d7a49eb8d846b96", "models.compiled.adapt"),
        Patch(f"{models}.llama4", "Model.__call__", "c8c18563d088b4a0", "models.compiled.adapt"),
        Patch(f"{models}.gemma3_text", "Model.__call__", "20512fe9e10dacf7", "models.compiled.adapt"),
        Patch(f"{models}.deepseek_v3", "Model.__call__", "67f241c5314a356b", "models.compiled.adapt"),
        Patch(f"{models}.glm4_moe_lite", "Model.__call__", "67f241c5314a356b", "models.compiled.adapt"),
        Patch(f"{models}.kimi_k25", "Model.__call__", "2269d5d3be15156b", "models.compiled.adapt"),
        Patch(f"{models}.switch_layers", experts, "ed21315c040a1498", "models.switch_layers.adapt", only_cuda=True),
        Patch(quantized, linear, "5fab14e7eb47285d", "nn.adapt_linear", only_cuda=True),
        Patch(quantized, embedding, "330736b7d2fb8ff0", "nn.adapt_as_linear", only_cuda=True),
        Patch("mlx.nn.layers.embedding", "Embedding.__call__", "b94cc661ed001c79", "nn.adapt", only_cuda=True),
        Patch(quantized, "QuantizedEmbedding.__call__", "c1fa7f3493126c18", "nn.adapt_quantized", only_cuda=True),
        Patch(f"{models}.cache", "make_prompt_cache", "bffc8beb07ff5037", "cache.prompt_cache.make_prompt_cache_patch"),
        Patch(f"{models}.cache", "save_prompt_cache", "5b558636d4e25be6", "cache.prompt_cache.save_prompt_cache_patch"),
        Patch("mlx_lm.generate", "BatchGenerator", "fb1a2ed5f7ece4b2", "generate.batch_generator.adapt"),
        Patch("mlx_lm.generate", "generate_step", "640f5f80cac74587", "generate.steps.adapt"),
        Patch("mlx_lm.generate", "speculative_generate_step", "c508203c7dac4b66", "generate.speculative.adapt"),
    ]


def _patches_here() -> list[Patch]:
    """Those for this machine."""
    return [patch for patch in _patches() if not patch.only_cuda or backend() == "cuda"]


def is_applied() -> bool:
    """Return whether the patches are in force."""
    return bool(_originals)


def apply_patches(config: PagedConfig | None = None, *, strict: bool = False) -> PatchReport:
    """Make mlx-lm generate through the paged cache.

    Idempotent, reversible with :func:`remove_patches`, thread-safe. Called again, it only changes the configuration,
    for caches made from then on.

    Example:
        >>> apply_patches(PagedConfig(kv_cache_memory="2GB"))
        >>> from mlx_lm import generate, load
        >>> model, tokenizer = load("path/to/model")
        >>> generate(model, tokenizer, prompt="What is the capital of France?")

    Args:
        config: options; None reads the ``MLX_PAGED_*`` variables (or keeps the present options if patched already).
        strict: raise instead of skipping a symbol whose upstream source is not the one known; all model modules are
            imported for that.

    Returns:
        Which symbols are replaced, which are not, and which will be when their model is used.

    Raises:
        PatchError: strict, and a symbol, or a name that its replacement needs, is missing or has changed. Nothing is
            patched then.
        KernelUnavailableError: the configuration demands a kernel this device does not have.
        ConfigError: an ``MLX_PAGED_*`` variable has an unusable value, or kv_rotate is without kv_bits.
    """
    global _config
    with _lock:
        config = config or (_config if _originals else PagedConfig.from_env())
        config.check_rotation()
        config.check_kernel()
        waiting = [] if strict else [patch for patch in _patches_here() if patch.can_wait]
        report = _apply([patch for patch in _patches_here() if patch not in waiting], strict=strict)
        _waiting[:] = waiting
        report.waiting = [patch.target for patch in waiting]
        _call_if_loaded("cache.layer_cache", "mask_rows", False)
        _config = config
        return report


def _apply(patches: Sequence[Patch], *, strict: bool) -> PatchReport:
    """Replace what these patches are for, and warn of what cannot be replaced; or raise PatchError, and replace
    nothing."""
    report = PatchReport()
    found: dict[Patch, tuple[Any, Any]] = {}
    for patch in patches:
        known = next((old for old in _originals if old.target == patch.target), None)
        if known is not None:
            report.applied.append(patch.target)
            continue
        reason, original = _inspect(patch)
        if reason is None:
            try:
                found[patch] = original, _replacement_of(patch, original)
            except Exception as error:
                reason = f"its adapter cannot be used with this version of mlx-lm ({type(error).__name__}: {error})"
        if reason is None:
            report.applied.append(patch.target)
        else:
            report.skipped[patch.target] = reason
    if report.skipped and strict:
        raise PatchError("; ".join(f"{target}: {reason}" for target, reason in report.skipped.items()))
    for target, reason in report.skipped.items():
        warnings.warn(f"mlx_paged: {target} is not patched: {reason}; mlx-lm's own code runs", stacklevel=3)
    for patch, (original, replacement) in found.items():
        _install(patch, original, replacement)
    return report


def _apply_to_loaded_models() -> None:
    """Replace the symbols of models whose modules have been imported since the patches were applied."""
    if all(patch.can_wait for patch in _waiting):
        return
    with _lock:
        ready = [patch for patch in _waiting if not patch.can_wait]
        _apply(ready, strict=False)
        _waiting[:] = [patch for patch in _waiting if patch not in ready]


def check_known(target: str) -> None:
    """Raise PatchError if this upstream symbol is not the one that its adapter was written for."""
    patch = next(patch for patch in _patches() if patch.target == target)
    reason = None if any(old.target == target for old in _originals) else _inspect(patch)[0]
    if reason is not None:
        raise PatchError(f"{target}: {reason} (mlx-lm {metadata.version('mlx-lm')} is installed)")


def remove_patches() -> None:
    """Put every upstream symbol back, as the very object it was. Caches made so far keep working where they are used
    with mlx-lm's code through ``update_and_fetch``.

    Example:
        >>> apply_patches()
        >>> remove_patches()  # mlx-lm is as it was
    """
    with _lock:
        _call_if_loaded("cache.turns", "unguard")
        for patch, original in _originals.items():
            owner, attribute = _owner(patch)
            if isinstance(owner, type):
                setattr(owner, attribute, original)
            else:
                _rebind(attribute, _replacements[patch], original)
        _originals.clear()
        _replacements.clear()
        _waiting.clear()
        _adapted.clear()
        _call_if_loaded(
            "cache.layer_cache", "mask_rows", True
        )  # batches that live on are read by mlx-lm's attention from now on
        _call_if_loaded("cache.pools", "forget_pools")
        _call_if_loaded("cache.layout", "forget_layouts")


def _call_if_loaded(module: str, function: str, *args: Any) -> None:
    """Call a function of another module of this package, if it has been imported: what it imports may be missing."""
    if loaded := sys.modules.get(f"{__package__}.{module}"):
        getattr(loaded, function)(*args)


def _owner(patch: Patch) -> tuple[Any, str]:
    """Return the class or module that holds the symbol, and the attribute's name."""
    owner: Any = importlib.import_module(patch.module)
    *path, attribute = patch.name.split(".")
    for part in path:
        owner = getattr(owner, part)
    return owner, attribute


def _inspect(patch: Patch) -> tuple[str | None, Any]:
    """Why the symbol cannot be patched (None if it can), and the symbol."""
    try:
        owner, attribute = _owner(patch)
        original = getattr(owner, attribute)
        present = fingerprint(original)
    except (ImportError, AttributeError) as error:
        return f"not found ({error})", None
    except (OSError, TypeError):
        return "its source cannot be read", None
    if present != patch.fingerprint:
        return "its source in this version of mlx-lm is not the one this adapter was written for", None
    return None, original


def _replacement_of(patch: Patch, original: Any) -> Any:
    module, _, name = patch.adapter.rpartition(".")
    adapt = getattr(importlib.import_module(f".{module}", __package__), name)
    if patch.name == "make_prompt_cache":
        return adapt(original, config=lambda: _config, adapted=_has_adapter, prepare=_apply_to_loaded_models)
    return adapt(original)


def _install(patch: Patch, original: Any, replacement: Any) -> None:
    owner, attribute = _owner(patch)
    if isinstance(owner, type):
        setattr(owner, attribute, replacement)
        if patch.adapts_attention:
            _adapted.add(owner)
    else:
        _rebind(attribute, original, replacement)
    _originals[patch] = original
    _replacements[patch] = replacement


def _rebind(name: str, old: Any, new: Any) -> None:
    """Replace ``old`` under its name in every module that imported it, the caller's script included."""
    for module in list(sys.modules.values()):
        namespace = getattr(module, "__dict__", None)
        if isinstance(namespace, dict) and namespace.get(name) is old:
            namespace[name] = new


# What a new mlx-lm needs ---------------------------------------------------------------------------------------------


def installed_fingerprint(target: str) -> str:
    """Return the fingerprint of an upstream symbol as it is installed; the patches must not be applied.

    Args:
        target: such as ``mlx_lm.models.llama.Attention.__call__``.

    Raises:
        PatchError: there is no such symbol, or its source cannot be read.
    """
    *path, last = target.split(".")
    inner = [last]
    while path:
        try:
            symbol: Any = importlib.import_module(".".join(path))
        except ModuleNotFoundError as error:
            if not f"{'.'.join(path)}.".startswith(f"{error.name}."):  # something that the module needs
                raise PatchError(f"{target} cannot be imported: {error}") from None
            inner.insert(0, path.pop())
            continue
        try:
            for name in inner:
                symbol = getattr(symbol, name)
            return fingerprint(symbol)
        except AttributeError as error:
            raise PatchError(f"{target} does not exist: {error}") from None
        except (OSError, TypeError):
            raise PatchError(f"{target} has no source that can be read") from None
    raise PatchError(f"{target} does not exist: there is no module {target.split('.')[0]!r}")


def known_fingerprints() -> dict[str, str]:
    """Return the upstream symbols that are replaced or recognised, those of the server included, and the fingerprints
    they must have.

    Raises:
        PatchError: the server's adapter cannot be imported with this version of mlx-lm.
    """
    known = {patch.target: patch.fingerprint for patch in _patches()}
    try:
        server = importlib.import_module(".server", __package__)
    except (ImportError, AttributeError) as error:
        raise PatchError(f"mlx_lm.server lacks a name that its adapter needs: {error}") from None
    known |= {f"mlx_lm.server.{name}": value for name, value in server.KNOWN.items()}
    samplers = importlib.import_module(".generate.upstream", __package__)
    return known | {f"mlx_lm.sample_utils.{name}": value for name, value in samplers.KNOWN.items()}


def main(argv: Sequence[str] | None = None) -> None:
    """Print fingerprints of the installed mlx-lm, a line for each symbol: name, fingerprint, and whether it is the
    known one. Exits with 1 if some symbol that is replaced is missing or another than the one known.

    Raises:
        SystemExit: with that status, or with a message where the symbol asked for does not exist.
    """
    parser = argparse.ArgumentParser(
        prog="python -m mlx_paged.patches.registry", description="Fingerprints of mlx-lm as it is installed."
    )
    parser.add_argument(
        "--fingerprint",
        metavar="NAME",
        nargs="?",
        required=True,
        help="an upstream symbol, such as mlx_lm.models.llama.Attention.__call__; all that are replaced if left out",
    )
    name = parser.parse_args(argv).fingerprint
    try:
        known = known_fingerprints()
    except PatchError as error:
        known = {patch.target: patch.fingerprint for patch in _patches()}
        print(f"{parser.prog}: {error}", file=sys.stderr)
    differs = False
    for target in known if name is None else [name]:
        try:
            present = installed_fingerprint(target)
        except PatchError as error:
            if name is not None:
                sys.exit(f"{parser.prog}: {error}")
            present = "missing"
        if target not in known:
            verdict = "not replaced by this package"
        elif present == known[target]:
            verdict = "known"
        else:
            verdict, differs = f"not the known one, {known[target]}", True
        print(f"{target}  {present}  {verdict}")
    sys.exit(int(differs))


if __name__ == "__main__":
    main()
