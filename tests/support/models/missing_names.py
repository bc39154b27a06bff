"""A script that tries apply_patches() on an mlx-lm that lacks one name at a time, of the given names or of all. It
prints what happened, as JSON by name, and is a separate process because it imports all adapters anew for each name."""

import ast
import functools
import importlib
import inspect
import json
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

PATCHES = Path(__file__).parents[3] / "patches"


def upstream_names() -> list[str]:
    """Return ``module:name`` of each mlx-lm name that the adapters use, and ``module:`` of each module."""
    found: set[str] = set()
    for path in PATCHES.rglob("*.py"):
        tree = ast.parse(path.read_text())
        modules: dict[str, str] = {}  # by their names in this file
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").startswith("mlx_lm"):
                for alias in node.names:
                    whole = f"{node.module}.{alias.name}"
                    if is_module(whole):
                        modules[alias.asname or alias.name] = whole
                        found.add(f"{whole}:")
                    else:
                        found |= {f"{node.module}:{alias.name}", f"{node.module}:"}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
                found.add(f"{modules[node.value.id]}:{node.attr}")
    from mlx_paged.patches import registry

    for patch in registry.all_patches():
        found |= {f"{patch.module}:", f"{patch.module}:{patch.name.split('.')[0]}"}
    return sorted(found)


def is_module(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True


def forget_adapters() -> None:
    for name in [name for name in sys.modules if name.startswith("mlx_paged.patches")]:
        del sys.modules[name]
    vars(sys.modules["mlx_paged"]).pop("patches", None)


def without(name: str) -> Iterator[None]:
    """Yield twice: the name is missing between the two. Later imports load the adapters anew."""
    module_name, _, attribute = name.partition(":")
    module = importlib.import_module(module_name)
    parent = sys.modules[module_name.rpartition(".")[0]]
    forget_adapters()
    if attribute:
        value = vars(module).pop(attribute)
    else:
        kept = vars(parent).pop(module_name.rpartition(".")[2], None)
        sys.modules[module_name] = None  # type: ignore[assignment]
    yield
    if attribute:
        setattr(module, attribute, value)
    else:
        sys.modules[module_name] = module
        if isinstance(kept, ModuleType):
            setattr(parent, module_name.rpartition(".")[2], kept)
    forget_adapters()
    yield


def outcome(model: Any, prompt: Any) -> Any:
    """Return the tokens of one sequence and of a batch, or the names of their errors."""
    results: list[Any] = []
    try:
        generation = importlib.import_module("mlx_lm.generate")
        results.append([token for token, _ in generation.generate_step(prompt, model, max_tokens=4)])
    except Exception as error:
        results.append(type(error).__name__)
    try:
        batch = generation.BatchGenerator(model)
        batch.insert([prompt.tolist(), prompt.tolist()[:7]], [3, 3])
        tokens: dict[int, list[int]] = {}
        while responses := batch.next_generated():
            for response in responses:
                tokens.setdefault(response.uid, []).append(response.token)
        batch.close()
        results.append(sorted(tokens.values()))
    except Exception as error:
        results.append(type(error).__name__)
    return results


def tried(name: str, model: Any, prompt: Any) -> dict[str, Any]:
    import mlx_paged

    steps = without(name)
    next(steps)
    try:
        stock = outcome(model, prompt)
        from mlx_paged.patches import registry

        before = {patch.target: found(patch) for patch in registry.all_patches()}
        try:
            mlx_paged.apply_patches(strict=True)
            strict = "applied"
            mlx_paged.remove_patches()
        except mlx_paged.PatchError:
            strict = "refused"
        untouched = all(found(patch) is before[patch.target] for patch in registry.all_patches())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            report = mlx_paged.apply_patches()
        result = {
            "strict": strict,
            "untouched": untouched,
            "skipped": report.skipped,
            "warnings": [str(warning.message) for warning in caught],
            "kept": all(
                found(patch) is before[patch.target]
                for patch in registry.all_patches()
                if patch.target in report.skipped
            ),
            "stock": stock,
            "patched": outcome(model, prompt),
        }
        mlx_paged.remove_patches()
        return result
    except Exception as error:
        return {"raised": f"{type(error).__name__}: {error}"}
    finally:
        next(steps)


def found(patch: Any) -> Any:
    from mlx_paged.patches import registry

    try:
        owner, attribute = registry._owner(patch)
        return getattr(owner, attribute)
    except (ImportError, AttributeError):
        return None


if __name__ == "__main__":
    from tests.support.models.builders import build, prompt_of

    inspect.getsource = functools.cache(inspect.getsource)  # called for each name; sources do not change
    a_model, a_prompt = build("llama", num_hidden_layers=1), prompt_of(20)
    print(json.dumps({name: tried(name, a_model, a_prompt) for name in sys.argv[1:] or upstream_names()}))
