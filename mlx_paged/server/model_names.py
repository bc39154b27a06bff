"""ModelNames: which models clients may ask for, by which names, and what ``/v1/models`` lists."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from .errors import RequestRefused, invalid, not_found
from .request import ModelKey

if TYPE_CHECKING:
    from .options import ServerConfig

DEFAULT = "default_model"


class ModelNames:
    """Names under which clients may ask for models.

    Served are the models of the command line (by alias, folder name and path) and those under ``--model-dir``; with
    neither, those in the hub's cache. Any other model requires ``--allow-any-model``.

    Args:
        default: the model of the command line.
        config: the server's options.
        models: all models of the command line, the default first.
    """

    def __init__(self, default: ModelKey, config: ServerConfig, models: Sequence[str] = ()) -> None:
        self._default, self._folder = default, config.model_dir
        self._others = {name: ModelKey(each) for each in models[1:] for name in (Path(each).name, each)}
        self.allows_any = config.allow_any_model
        self._serves_downloaded = default.model is None and config.model_dir is None
        self.own: list[str] = []
        if default.model is not None:
            folder = Path(default.model).expanduser()
            path = str(folder.resolve()) if folder.exists() else default.model
            self.own = list(dict.fromkeys([*config.served_model_names, Path(path).name, path]))

    def _known(self) -> dict[str, ModelKey]:
        """Return the models of the command line and of ``--model-dir``, by name; reads the folder anew."""
        known = self._others | dict.fromkeys([*self.own, *filter(None, [self._default.model])], self._default)
        if self._folder is not None and self._folder.is_dir():
            for folder in sorted(self._folder.iterdir()):
                if (folder / "config.json").is_file():
                    known.setdefault(folder.name, ModelKey(str(folder)))
        return known

    def resolve(self, name: str | None, adapter: str | None = None, draft: str | None = None) -> ModelKey:
        """Return the model that a request asks for.

        Raises:
            RequestRefused: 404, the model is unknown; 400, adapters and draft models are not allowed.
        """
        draft = None if draft == DEFAULT else draft
        for param, value in (("adapters", adapter), ("draft_model", draft)):
            if value is not None and not self.allows_any:
                raise invalid(f"{param} requires --allow-any-model", param)
        known = self._known()
        if name is None or name == DEFAULT:
            key = self._default
            if key.model is None:
                raise not_found(f"model is required; {_listed(list(known))}", param="model", code="model_not_found")
        elif name in known:
            key = known[name]
        elif self.allows_any or (self._serves_downloaded and _is_downloaded(name)):
            key = ModelKey(name, None, self._default.draft)
        else:
            raise self.unknown(name)
        return ModelKey(key.model, adapter or key.adapter, draft or key.draft)

    def unknown(self, name: str) -> RequestRefused:
        """Return a 404 for an unknown model, which names the known ones."""
        words = f"no such model: {name[:200]!r}; {_listed(list(self._known()))}; --served-model-name adds names"
        return not_found(words, param="model", code="model_not_found")

    def shown(self, name: str | None) -> str:
        """Return the name of a request's model, for answers and the log."""
        if name is None or name == DEFAULT:
            return self.own[0] if self.own else DEFAULT
        return name

    def listed(self, created: int, **figures: Any) -> list[dict[str, Any]]:
        """Return the objects of ``/v1/models``; ``figures`` are added to the command line's model."""
        names = [name for name, key in self._known().items() if key != self._default]
        return [*(_object(name, created, **figures) for name in self.own), *(_object(name, created) for name in names)]

    def find(self, name: str, created: int, **figures: Any) -> dict[str, Any] | None:
        """Return the ``/v1/models`` object of one model, or None."""
        if name == DEFAULT and self.own:
            return _object(name, created, **figures)
        # Clients may leave out the leading slash of a path: ``/v1/models/PATH`` has one already.
        return next((each for each in self.listed(created, **figures) if each["id"] in (name, f"/{name}")), None)


def _listed(names: list[str]) -> str:
    if not names:
        return "the server was started without --model"
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return f"available models: {', '.join(map(repr, names[:8]))}{more}"


def _object(name: str, created: int, **figures: Any) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created, "owned_by": "mlx_paged", **figures}


def _is_downloaded(name: str) -> bool:
    try:
        return isinstance(try_to_load_from_cache(name, "config.json"), str)
    except HFValidationError:  # a path is no repository id
        return False
