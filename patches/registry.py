"""apply_patches() and remove_patches(): replace upstream symbols if their fingerprints are known, and restore them.

``scripts/fingerprints.py`` shows how the installed mlx-lm differs from the known one.
"""

from __future__ import annotations

import importlib
import sys
import threading
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

from ..config import PagedConfig
from ..errors import PatchError
from ..kernels.availability import backend
from .patch import PATCHES, Patch, fingerprint

# Modules of adapters, which register their patches when they are imported (see replaces()).
ADAPTERS = (
    "models.seam",
    "models.states",
    "models.attention",
    "models.latent",
    "nn",
    "samplers",
    "cache.prompt_cache",
    "generate.batch_generator",
    "generate.steps",
)


@dataclass
class PatchReport:
    """The result of :func:`apply_patches`.

    Attributes:
        applied: upstream symbols that are replaced.
        skipped: symbols left unchanged, and modules of adapters that cannot be imported, with the reason.
        waiting: symbols of models that are not loaded yet; replaced when the first cache of such a model is made.
    """

    applied: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    waiting: list[str] = field(default_factory=list)


_lock = threading.RLock()
_config = PagedConfig()
_originals: dict[Patch, Any] = {}
_replacements: dict[Patch, Any] = {}
_waiting: list[Patch] = []  # until their models' modules are imported


def _load_adapters() -> dict[str, str]:
    """Import the adapters. Returns why some cannot be imported: this version of mlx-lm may lack a name they need."""
    unusable = {}
    for name in ADAPTERS:
        try:
            importlib.import_module(f".{name}", __package__)
        except Exception as error:
            reason = f"it cannot be used with this version of mlx-lm ({type(error).__name__}: {error})"
            unusable[f"{__package__}.{name}"] = reason
    return unusable


def all_patches() -> list[Patch]:
    """Return all patches, for any device."""
    _load_adapters()
    return PATCHES


def _patches_here() -> list[Patch]:
    """Return the patches for this machine."""
    return [patch for patch in all_patches() if not patch.only_cuda or backend() == "cuda"]


def is_applied() -> bool:
    """Return whether the patches are applied."""
    return bool(_originals)


def apply_patches(config: PagedConfig | None = None, *, strict: bool = False) -> PatchReport:
    """Make mlx-lm generate through the paged cache.

    Idempotent, reversible with :func:`remove_patches`, thread-safe. A second call only changes the configuration of
    caches made afterwards.

    Example:
        >>> apply_patches(PagedConfig(kv_cache_memory="2GB"))
        >>> from mlx_lm import generate, load
        >>> model, tokenizer = load("path/to/model")
        >>> generate(model, tokenizer, prompt="What is the capital of France?")

    Args:
        config: options; None reads the ``MLX_PAGED_*`` variables (or keeps the present options if patched already).
        strict: raise instead of skipping a symbol whose upstream source is not the known one. Imports all model modules
            to check them.

    Returns:
        Which symbols are replaced, which are not, and which will be when their model is used.

    Raises:
        PatchError: strict, and a symbol, or a name that its replacement needs, is missing or has changed. Nothing is
            patched then.
        KernelUnavailableError: the configuration demands a kernel this device does not have.
        ConfigError: an ``MLX_PAGED_*`` variable has an invalid value, or kv_rotate is set without kv_bits.
    """
    global _config
    with _lock:
        config = config or (_config if _originals else PagedConfig.from_env())
        config.check_rotation()
        config.check_kernel()
        unusable, patches = _load_adapters(), _patches_here()
        waiting = [] if strict else [patch for patch in patches if patch.can_wait]
        report = _apply([patch for patch in patches if patch not in waiting], unusable, strict=strict)
        _waiting[:] = waiting
        report.waiting = [patch.target for patch in waiting]
        _config = config
        return report


def _apply(patches: Sequence[Patch], unusable: Mapping[str, str], *, strict: bool) -> PatchReport:
    """Apply these patches and warn of symbols that cannot be replaced; if strict, raise PatchError for such symbols and
    replace nothing.

    Args:
        unusable: modules of adapters that cannot be imported, and why.
    """
    report = PatchReport(skipped=dict(unusable))
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
    _install(found)
    return report


def _apply_to_loaded_models() -> None:
    """Replace the symbols of models whose modules have been imported since the patches were applied."""
    if all(patch.can_wait for patch in _waiting):
        return
    with _lock:
        ready = [patch for patch in _waiting if not patch.can_wait]
        _apply(ready, {}, strict=False)
        _waiting[:] = [patch for patch in _waiting if patch not in ready]


def check_known(target: str) -> None:
    """Raise PatchError unless this upstream symbol is the one that its adapter was written for."""
    patch = next(patch for patch in all_patches() if patch.target == target)
    reason = None if any(old.target == target for old in _originals) else _inspect(patch)[0]
    if reason is not None:
        raise PatchError(f"{target}: {reason} (mlx-lm {metadata.version('mlx-lm')} is installed)")


def remove_patches() -> None:
    """Restore every upstream symbol to its original object. Existing caches keep working with mlx-lm's code that uses
    them through ``update_and_fetch``, except those of models with an indexer.

    Example:
        >>> apply_patches()
        >>> remove_patches()  # mlx-lm is as it was
    """
    with _lock:
        _call_if_loaded("models.model_calls", "unguard")
        _replace({patch: (_replacements[patch], original) for patch, original in _originals.items()})
        _originals.clear()
        _replacements.clear()
        _waiting.clear()
        _call_if_loaded("cache.pools", "forget_pools")
        _call_if_loaded("cache.layout", "forget_layouts")


def _call_if_loaded(module: str, function: str, *args: Any) -> None:
    """Call a function of another module of this package, if that was imported: mlx-lm may lack a name it needs."""
    if loaded := sys.modules.get(f"{__package__}.{module}"):
        getattr(loaded, function)(*args)


def _owner(patch: Patch) -> tuple[Any, str]:
    """Return the class or module that contains the symbol, and the attribute's name."""
    owner: Any = importlib.import_module(patch.module)
    *path, attribute = patch.name.split(".")
    for part in path:
        owner = getattr(owner, part)
    return owner, attribute


def _inspect(patch: Patch) -> tuple[str | None, Any]:
    """Return why the symbol cannot be patched, or None if it can, and the symbol."""
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
    if patch.name == "make_prompt_cache":
        return patch.adapt(original, config=lambda: _config, prepare=_apply_to_loaded_models)
    return patch.adapt(original)


def _install(found: Mapping[Patch, tuple[Any, Any]]) -> None:
    """Replace originals by replacements, given as (original, replacement) for each patch."""
    _replace(found)
    for patch, (original, replacement) in found.items():
        _originals[patch] = original
        _replacements[patch] = replacement


def _replace(values: Mapping[Patch, tuple[Any, Any]]) -> None:
    """Replace the old value of each symbol by the new one: in its class, or in every module that imported it, the
    caller's script included. A process has thousands of modules, so one pass replaces all symbols."""
    imported: list[tuple[str, Any, Any]] = []
    for patch, (old, new) in values.items():
        owner, attribute = _owner(patch)
        if isinstance(owner, type):
            setattr(owner, attribute, new)
        else:
            imported.append((attribute, old, new))
    names = {name for name, _, _ in imported}
    for module in list(sys.modules.values()) if names else ():
        namespace = getattr(module, "__dict__", None)
        if not isinstance(namespace, dict) or namespace.keys().isdisjoint(names):
            continue
        for name, old, new in imported:
            if namespace.get(name) is old:
                namespace[name] = new
