"""ModelNames: what clients may call the server's own model, and what ``/v1/models`` says of models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import scan_cache_dir
from huggingface_hub.errors import CacheNotFound

FILES = {"config.json", "model.safetensors.index.json", "tokenizer_config.json"}  # as in mlx-lm


class ModelNames:
    """The names of the model that the command line names: aliases, its folder's name, and where it is.

    Args:
        model: folder or hub repository; None: the server has none of its own.
        aliases: ``--served-model-name``.
    """

    def __init__(self, model: str | None, aliases: Sequence[str] = ()) -> None:
        self.model = model
        self.names: list[str] = []
        self.path: str | None = None
        if model is not None:
            folder = Path(model).expanduser()
            self.path = str(folder.resolve()) if folder.exists() else model
            self.names = list(dict.fromkeys([*aliases, Path(self.path).name]))

    def teach(self, provider: Any) -> None:
        """Have mlx-lm's provider take the names for its default model, with its adapter."""
        if self.model is None:
            return
        for name in self.names:
            provider._model_map[name] = self.model
            provider._adapter_map[name] = provider._adapter_map.get("default_model")
        # By its place, as mlx-lm does: without the adapter, unless the request names one.
        provider._model_map[self.path] = self.model

    def listed(self, created: int) -> list[dict[str, Any]]:
        """The objects of ``/v1/models``: the server's own model by each of its names, and those in the hub's cache."""
        own = [] if self.path is None else [*self.names, self.path]
        names = [*own, *(name for name in _downloaded() if name not in own)]
        return [_object(name, created) for name in names]

    def find(self, name: str, created: int) -> dict[str, Any] | None:
        """The object of one model."""
        if name == "default_model" and self.model is not None:
            return _object(name, created)
        # A path's leading slash is one that clients put between the address and the name, too.
        return next((each for each in self.listed(created) if each["id"] in (name, f"/{name}")), None)


def _object(name: str, created: int) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created, "owned_by": "mlx_paged"}


def _downloaded() -> list[str]:
    """Repositories in the hub's cache that look like models of mlx-lm."""
    try:
        repos = scan_cache_dir().repos
    except (CacheNotFound, ValueError):  # a folder that is not there has no models in it
        return []
    return [
        repo.repo_id
        for repo in repos
        if repo.repo_type == "model"
        and "main" in repo.refs
        and {file.file_path.name for file in repo.refs["main"].files} >= FILES
    ]
