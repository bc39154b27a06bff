"""Weights: a loaded model, and load_weights()."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm import utils
from mlx_lm.models import cache as stock_cache

from ..machine import memory_beside
from ..model_folder import check_model_folder, check_weight_files, explain_load_errors, weight_bytes
from ..patches.cache.pools import count_weights
from ..patches.generate.drafting import check_same_tokens, why_not_drafted
from ..patches.models.mtp import MTPHead, find_head, folder_of, load_head
from ..patches.sharded import sharded_load
from ..prefix.identity import noting_configs
from .request import ModelKey


class Weights(NamedTuple):
    """A loaded model.

    Attributes:
        key: folders or hub repositories that it was loaded from.
        is_batchable: whether its requests can be computed together.
    """

    key: ModelKey
    model: nn.Module
    tokenizer: Any
    config: dict[str, Any]
    draft_model: nn.Module | None
    is_batchable: bool

    @property
    def arrays(self) -> list[mx.array]:
        models = (self.model, self.draft_model)
        return [x for model in models if model is not None for _, x in tree_flatten(model.parameters())]

    @property
    def separate_draft(self) -> nn.Module | None:
        """Return the draft model; None if there is none or it is a prediction head, which only batches use."""
        return None if isinstance(self.draft_model, MTPHead) else self.draft_model


def load_weights(key: ModelKey, cli_args: Any, *, group: Any = None) -> Weights:
    """Load a model as mlx-lm's server does, except for the bytes of its weights, which are read on first use.

    Args:
        key: folders or hub repositories.
        cli_args: arguments of the command line.
        group: the ranks that the model is sharded over; None: this process has all of it.

    Raises:
        Exception: the model cannot be loaded.
    """
    path, adapter, draft = key
    for name in (path, draft):
        check_model_folder(name)
        if name is not None and group is None:
            check_weight_files(Path(name) if Path(name).exists() else utils._download(name))
    memory_beside(weight_bytes(path, draft, adapter=adapter) // (1 if group is None else group.size()))
    if adapter is not None and not (Path(adapter) / "adapter_config.json").exists():
        raise ValueError(f"the adapter {adapter} has no adapter_config.json")
    head = find_head(folder_of(path)) if cli_args.mtp and draft is None and path is not None else None
    tokenizer_config: dict[str, Any] = {"trust_remote_code": cli_args.trust_remote_code}
    if cli_args.chat_template:
        tokenizer_config["chat_template"] = cli_args.chat_template
    options: dict[str, Any] = {"tokenizer_config": tokenizer_config, "return_config": True}
    options["trust_remote_code"] = cli_args.trust_remote_code
    if group is not None:
        load = explain_load_errors(noting_configs(sharded_load))
        model, tokenizer, config = load(path, tensor_group=group, **options)
    else:
        load = explain_load_errors(noting_configs(utils.load))
        model, tokenizer, config = load(path, adapter_path=adapter, lazy=True, **options)
    if cli_args.use_default_chat_template and tokenizer.chat_template is None:
        tokenizer.chat_template = tokenizer.default_chat_template
    draft_model = None
    if draft is not None:
        draft_model, draft_tokenizer = load(draft, lazy=True)
        check_same_tokens(tokenizer, draft_tokenizer)
    elif head is not None:
        draft_model = load_head(model, head)
    count_weights(model, *([] if draft_model is None else [draft_model]))
    together = all(hasattr(c, "merge") for c in stock_cache.make_prompt_cache(model))
    if draft_model is not None and (why_not := why_not_drafted(model, draft_model)) is not None:
        logging.warning("requests run one at a time, as in mlx-lm: %s", why_not)
        together = False
    return Weights(key, model, tokenizer, config, draft_model, together)
