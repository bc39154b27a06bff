"""Which models a server has loaded, for the folder of prefixes on disk."""

from __future__ import annotations

import copy
import functools
import logging
import time
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

from ..prefix.identity import digest_of, model_identity


class Identities:
    """What names the models of a provider on disk (see :func:`model_identity`). Nothing is remembered: under the same
    name, another model may have been saved since."""

    def __init__(self, model_provider: Any) -> None:
        self.provider = model_provider

    def __call__(self, key: Any) -> str | None:
        """The identity of the models that are loaded now, target and draft; None if these are not the key's, or if it
        cannot be told."""
        provider = self.provider
        if key != provider.model_key or provider.model is None:
            return None
        begin = time.monotonic()
        models = [model for model in (provider.model, provider.draft_model) if model is not None]
        try:
            identity = digest_of(model_identity(model, LoadedConfigs.of(model)) for model in models)
        except OSError as error:
            logging.warning("prefixes on disk are not used: the code of the model cannot be read: %s", error)
            return None
        logging.info("read the weights for the prefixes on disk in %.1f s", time.monotonic() - begin)
        return identity


class LoadedConfigs:
    """The config.json that each model was loaded with: the file may be another one by the time somebody asks."""

    _configs: ClassVar[dict[int, tuple[weakref.ref[Any], Any]]] = {}  # by id: modules cannot be hashed

    @classmethod
    def of(cls, model: Any) -> Any:
        """None if it is not known."""
        entry = cls._configs.get(id(model))
        return entry[1] if entry is not None and entry[0]() is model else None

    @classmethod
    def noting(cls, load: Callable[..., Any]) -> Callable[..., Any]:
        """mlx-lm's ``load``, which notes the configuration of what it loads."""

        @functools.wraps(load)
        def noting_load(*args: Any, return_config: bool = False, **kwargs: Any) -> Any:
            model, tokenizer, config = load(*args, return_config=True, **kwargs)
            key = id(model)
            cls._configs[key] = (weakref.ref(model, lambda _: cls._configs.pop(key, None)), copy.deepcopy(config))
            return (model, tokenizer, config) if return_config else (model, tokenizer)

        return noting_load
