"""Clear errors for unreadable model folders and prompt caches."""

from __future__ import annotations

import functools
import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .errors import ModelFolderError, PagedCacheError, PromptCacheError


def check_model_folder(model: str | None) -> str | None:
    """Check that mlx-lm can read a model given as a folder, and return ``model``; names of hub repositories pass.

    Raises:
        ModelFolderError: the path does not exist, config.json is missing or broken, or there are no weights.
    """
    if model is None:
        return None
    folder = Path(model)  # as mlx-lm reads it: ~ is the shell's
    if not folder.exists():
        if model.startswith((".", "/", "~")) or model.count("/") != 1:
            raise ModelFolderError(f"model folder {model} does not exist")
        return model
    if not folder.is_dir():
        raise ModelFolderError(f"{model} is a file; a model is a folder with config.json and *.safetensors")
    config = folder / "config.json"
    if not config.exists():
        raise ModelFolderError(f"{model} has no config.json")
    try:
        parsed = json.loads(config.read_text())
    except (OSError, ValueError) as error:
        raise ModelFolderError(f"{config} cannot be read: {error}") from None
    if not isinstance(parsed, dict) or "model_type" not in parsed:
        raise ModelFolderError(f"{config} has no model_type")
    if not any(folder.glob("model*.safetensors")):
        raise ModelFolderError(f"{model} has no model*.safetensors")
    return model


def weight_bytes(*models: str | None, adapter: str | None = None) -> int:
    """Return the bytes of the weight files of models and an adapter; 0 for a hub's model that is not in its cache."""
    files = [] if adapter is None else list(Path(adapter).glob("adapters.safetensors"))
    for model in models:
        if model is None:
            continue
        folder = Path(model)
        if not folder.is_dir():
            config = importlib.import_module("huggingface_hub").try_to_load_from_cache(model, "config.json")
            if not isinstance(config, str):
                continue
            folder = Path(config).parent
        files += folder.glob("model*.safetensors")
    return sum(file.stat().st_size for file in files)


def explain_load_errors(original: Callable[..., Any], prompt_cache: str | None = None) -> Callable[..., Any]:
    """Wrap a loading function so that its errors about broken files become one clear error.

    Args:
        original: mlx-lm's ``load`` or ``load_prompt_cache``.
        prompt_cache: name of the prompt cache's file; None: ``original`` loads a model.

    Raises (when called):
        ModelFolderError, PromptCacheError: with the original message.
    """

    @functools.wraps(original)
    def load(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except PagedCacheError:
            raise
        except (OSError, ValueError, RuntimeError, KeyError, TypeError, IndexError) as error:
            text = f"{type(error).__name__}: {error}"
            if type(error).__module__.startswith("huggingface_hub"):
                why = str(error).split("\n")[0].removeprefix("Got: ")
                raise ModelFolderError(
                    f"the model {args[0]} is no folder, and the hub cannot be asked: {why}"
                ) from error
            if prompt_cache is not None:
                raise PromptCacheError(f"the prompt cache {prompt_cache} cannot be read: {text}") from error
            raise ModelFolderError(f"the model {args[0] if args else ''} cannot be loaded: {text}") from error

    return load


def check_weight_files(folder: Path) -> None:
    """Check that weight files are as long as their headers say; MLX finds out only when it reads the weights.

    Raises:
        ModelFolderError: a file is not in the safetensors format, or is cut off.
    """
    for path in sorted(folder.glob("model*.safetensors")):
        try:
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                size = path.stat().st_size
                header = json.loads(file.read(length)) if length <= size else {}
                ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelFolderError(f"{path} cannot be read: {type(error).__name__}: {error}") from None
        if 8 + length + max(ends, default=0) > size:
            raise ModelFolderError(f"{path} is truncated")
