"""Which models a server has loaded, for the folder of prefixes on disk."""

from __future__ import annotations

import copy
import functools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from ..by_model import ByModel
from ..prefix.identity import digest_of, model_identity


def identity_of(models: Sequence[Any]) -> str | None:
    """Return what names models, a target and perhaps its draft, on disk (see :func:`model_identity`); None if it cannot
    be told. Nothing is remembered: under the same name, another model may have been saved since."""
    begin = time.monotonic()
    try:
        identity = digest_of(model_identity(model, loaded_configs.get(model)) for model in models)
    except OSError as error:
        logging.warning("prefixes on disk are not used: the code of the model cannot be read: %s", error)
        return None
    logging.info("read the weights for the prefixes on disk in %.1f s", time.monotonic() - begin)
    return identity


# The config.json that each model was loaded with: the file may be another one by the time somebody asks.
loaded_configs: ByModel[dict[str, Any]] = ByModel()


def noting_configs(load: Callable[..., Any]) -> Callable[..., Any]:
    """mlx-lm's ``load``, which notes the configuration of what it loads."""

    @functools.wraps(load)
    def noting_load(*args: Any, return_config: bool = False, **kwargs: Any) -> Any:
        model, tokenizer, config = load(*args, return_config=True, **kwargs)
        loaded_configs.put(model, copy.deepcopy(config))
        return (model, tokenizer, config) if return_config else (model, tokenizer)

    return noting_load
