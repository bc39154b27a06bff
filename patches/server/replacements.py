"""What replaces names of mlx_lm/server.py: the prompt cache, the computing thread and the HTTP handler."""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable, Hashable
from typing import Any

from mlx_lm import server as upstream
from mlx_lm.models.cache import LRUPromptCache

from ...engine.ranks.ranks import Ranks
from ...prefix.spill import SpillStore
from ...serve.http.listener import Listener
from ...serve.identities import Identities, noting_configs
from ...serve.model_names import ModelNames
from ...serve.prompt_maker import PromptMaker
from ...serve.server_config import ServerConfig
from ..cache.lru_prompt_cache import PagedPromptCache, PromptStore
from ..registry import fingerprint
from ..sharded_load import sharded_load
from .handler import PagedAPIHandler
from .prompt_job import PROCESS, make_prompt
from .response_generator import PagedResponseGenerator

# Upstream's functions that the subclasses here call or inherit.
KNOWN = {
    "ResponseGenerator.__init__": "6aa176f1f2a24831",
    "ResponseGenerator.generation_available": "8ff47c6c56064b8f",
    "ResponseGenerator.join": "25e97412ab9c7699",
    "ResponseGenerator._tokenize": "ec31a09902520a3e",
    "ResponseGenerator._make_state_machine": "098c3fe2d12b40e3",
    "ResponseGenerator._is_batchable": "8e89df733585547a",
    "ResponseGenerator._serve_single": "a3e9e3aa7d3dd5b2",
    "APIHandler.__init__": "faafdb5ed6e9050b",
    "APIHandler._set_cors_headers": "e28a23a37df1859f",
    "APIHandler._set_stream_headers": "13d88b2c21ca501e",
    "APIHandler.do_OPTIONS": "f94e2bd4aa83e218",
    "APIHandler.handle_chat_completions": "c05d35788d6cc86e",
    "_run_http_server": "3eb4368eeee268de",
    "run": "1f26d0701397089d",
}
_config = ServerConfig()
_ranks: Ranks | None = None
_generator: PagedResponseGenerator | None = None
_start_errors: list[Exception] = []
Identify = Callable[[Hashable], str | None]


def configure(config: ServerConfig, ranks: Ranks | None = None) -> None:
    """Set the options for servers made from now on, and the ranks that they compute on."""
    global _config, _ranks
    _config, _ranks = config, ranks


def start_error() -> Exception | None:
    """Why the server that ran could not be started, if so."""
    return _start_errors[-1] if _start_errors else None


def begin_drain() -> bool:
    """Let the requests of the server that runs finish, and end it then. False: end it now."""
    return _generator is not None and _generator.begin_drain()


def make_prompt_cache_store(max_size: int | None) -> PromptStore:
    """Replacement of ``LRUPromptCache`` in the server: as the options say."""
    config, ranks = _config, _ranks
    if not config.prefix_cache:
        return LRUPromptCache(max_size=0)  # which keeps nothing
    spill, folder = None, config.prefix_cache_dir
    if folder is not None and ranks is None:
        spill = SpillStore(folder, max_bytes=config.prefix_cache_dir_bytes)
    elif folder is not None and ranks is not None:
        folder /= f"rank-{ranks.rank}-of-{ranks.size}"
        spill = SpillStore(folder, max_bytes=config.prefix_cache_dir_bytes, everywhere=ranks.exchange)
    clock = time.monotonic if ranks is None else lambda: ranks.now
    return PagedPromptCache(max_size, ttl=config.prefix_cache_ttl, clock=clock, spill=spill)


def make_response_generator(
    model_provider: upstream.ModelProvider, prompt_cache: PromptStore
) -> PagedResponseGenerator:
    """Replacement of ``ResponseGenerator``."""
    if isinstance(prompt_cache, PagedPromptCache) and prompt_cache.spill is not None:
        prompt_cache.identify = _known_to_all(Identities(model_provider))
    names = ModelNames(model_provider.cli_args.model, _config.served_model_names)
    names.teach(model_provider)
    prompts = PromptMaker(make_prompt, PROCESS, allow_template=_config.allow_chat_template_override)
    if _ranks is None or _ranks.rank == 0:
        prompts.start()  # while the model is loaded
    global _generator
    _generator = PagedResponseGenerator(
        model_provider, prompt_cache, prompts, _config, on_start_error=_start_errors.append, ranks=_ranks
    )
    return _generator


def _known_to_all(identify: Identify) -> Identify:
    """None on all ranks if one of them cannot tell."""
    ranks = _ranks
    if ranks is None:
        return identify

    def identify_alike(key: Hashable) -> str | None:
        identity = identify(key)
        return identity if all(ranks.exchange(identity is not None)) else None

    return identify_alike


def replacements(module: Any) -> dict[str, Any]:
    """Names of ``mlx_lm.server`` and what to put in their place; empty, with a warning, if it is not the one known."""
    changed = [name for name, known in KNOWN.items() if not _is_known(module, name, known)]
    if changed:
        warnings.warn(
            f"mlx_paged: mlx_lm.server ({', '.join(changed)}) is not the one this adapter was written for: its own "
            "code runs, without shared prefixes, /metrics and /cache",
            stacklevel=2,
        )
        return {}
    return {
        "LRUPromptCache": make_prompt_cache_store,
        "ResponseGenerator": make_response_generator,
        "load": noting_configs(module.load),
        "sharded_load": noting_configs(sharded_load),
        "_run_http_server": functools.partial(
            module._run_http_server, server_class=Listener, handler_class=PagedAPIHandler
        ),
    }


def _is_known(module: Any, name: str, known: str) -> bool:
    try:
        return fingerprint(functools.reduce(getattr, name.split("."), module)) == known
    except (AttributeError, OSError, TypeError):
        return False
