"""Candidate: a model that is to take the present one's place in the server, if it can be loaded."""

from __future__ import annotations

import copy
import functools
import gc
import logging
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm import server as upstream
from mlx_lm import utils

from ...config import free_memory
from ...model_folder import check_model_folder, check_weight_files
from ..replaced import replaced

ModelKey = tuple[Any, Any, Any]  # model, adapter, draft model


def key_of(provider: Any, wanted: upstream.ModelDescription) -> ModelKey:
    """What mlx-lm's model provider is going to call a model."""
    return (
        provider._model_map.get(wanted.model, wanted.model),
        provider._adapter_map.get(wanted.model, wanted.adapter),
        provider._draft_model_map.get(wanted.draft, wanted.draft),
    )


class Candidate:
    """Everything but the weights' bytes is read at once: configuration, tokenizer, names and shapes. So what can be
    wrong with a model shows while the present one is still there.

    Args:
        provider: mlx-lm's model provider.
        key: what it calls the model.

    Raises:
        Exception: the model cannot be loaded; the provider is as it was.
    """

    def __init__(self, provider: Any, key: ModelKey) -> None:
        self._provider = provider
        path, adapter, draft = key
        if path is None:
            raise ValueError("the server was started without --model: name one")
        for name in (path, draft):
            check_model_folder(name)
            if name is not None:
                check_weight_files(Path(name) if Path(name).exists() else utils._download(name))
        if adapter is not None and not (Path(adapter) / "adapter_config.json").exists():
            raise ValueError(f"there is no adapter in {adapter}")
        self._loaded = copy.copy(provider)
        with replaced(upstream, load=functools.partial(upstream.load, lazy=True)):
            self._loaded._load(*key)

    @property
    def _weights(self) -> list[mx.array]:
        models = (self._loaded.model, self._loaded.draft_model)
        return [x for model in models if model is not None for _, x in tree_flatten(model.parameters())]

    @property
    def fits_beside(self) -> bool:
        """Whether there is memory for it and the present model."""
        return sum(x.nbytes for x in self._weights) <= free_memory()

    def take_over(self) -> None:
        """Read the weights and put the model in the present one's place. If memory does not hold both, the present one
        goes first.

        Raises:
            Exception: the weights cannot be read. The present model stays unless it had to go.
        """
        provider = self._provider
        if provider.model is not None and not self.fits_beside:
            logging.warning(
                "memory does not hold two models: %s is unloaded before %s is read",
                provider.model_key[0],
                self._loaded.model_key[0],
            )
            provider.reset()
            gc.collect()
            mx.clear_cache()
        mx.eval(self._weights)
        vars(provider).update(vars(self._loaded))
        gc.collect()
        mx.clear_cache()
