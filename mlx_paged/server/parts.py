"""Parts: the parts of one server, which its handlers use."""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Any

from ..ranks.ranks import Ranks
from .clients import Clients
from .engine_loop import CLOSING
from .engine_thread import EngineThread, new_loop
from .errors import RequestRefused, unavailable
from .memory import MemoryWatch
from .model_names import ModelNames
from .options import ServerConfig
from .prompting import PromptMaker
from .ranked_loop import RankedLoop, check_for_ranks, ranked_memory_watch
from .report import ServerStats, blocks_of, dispatches, pages_of
from .request import ModelKey, ServerRequest
from .requests.responses import MAX_KEPT_BYTES, KeptResponses

if TYPE_CHECKING:
    from .loaded_models import LoadedModels


class Parts:
    """The parts of one server.

    Args:
        models: the models that it serves.
        cli_args: parsed arguments of the command line.
        config: the server's options.
        default: the model of the command line.
        fingerprint: ``system_fingerprint`` of answers.
        ranks: processes that compute the model together; None: only this one. Rank 0 has the clients.

    Attributes:
        num_answering: POST requests that are being answered.
        is_draining: no new requests are served.
    """

    def __init__(
        self,
        models: LoadedModels,
        cli_args: Any,
        config: ServerConfig,
        default: ModelKey,
        fingerprint: str = "",
        ranks: Ranks | None = None,
    ) -> None:
        self.cli_args, self.config, self.fingerprint, self.ranks = cli_args, config, fingerprint, ranks
        self.stats = ServerStats()
        self.names = ModelNames(default, config, cli_args.models)
        self.clients = Clients(config.api_keys)
        self.prompts = PromptMaker(default_tokens=cli_args.max_tokens)
        self.responses = KeptResponses(MAX_KEPT_BYTES if config.response_store else 0)
        self.num_answering = 0
        self.is_draining = False
        watch = MemoryWatch(config.memory_watermark)
        if ranks is not None:
            watch = ranked_memory_watch(config.memory_watermark, ranks)
        self.engine = EngineThread(
            models,
            self.stats,
            watch,
            config.watchdog_timeout,
            make_loop=new_loop if ranks is None else functools.partial(RankedLoop, ranks),
            on_start_error=self.on_start_error,
        )

    def on_start_error(self, error: Exception) -> None:
        """Note that the server's model cannot be served. Called in the engine's thread."""

    @property
    def defaults(self) -> dict[str, Any]:
        """Sampling parameters of requests that give none."""
        args = self.cli_args
        return {"temperature": args.temp, "top_p": args.top_p, "top_k": args.top_k, "min_p": args.min_p}

    def check_open(self) -> None:
        """Raise RequestRefused (503) if no new requests are served."""
        if self.is_draining:
            raise unavailable(CLOSING)
        self.engine.check()

    def check_for_ranks(self, request: ServerRequest) -> None:
        """Raise RequestRefused (501) for what several ranks do not support."""
        if self.ranks is None:
            return
        if request.model != self.names.resolve(None):
            what = "several ranks serve only the model of --model, without other adapters or draft models"
            raise RequestRefused(501, what, param="model")
        check_for_ranks(request)

    # Health and figures ---------------------------------------------------------------------------------------

    def health(self) -> dict[str, Any]:
        health = self.engine.health()
        if self.is_draining and health["status"] != "failed":
            health["status"] = "draining"
        return health

    def report(self, *, with_blocks: bool = False) -> dict[str, Any]:
        """Return what ``/v1/cache/stats`` says; with ``with_blocks`` also the state of every block and the requests.
        Never blocks on the engine's thread; figures are a snapshot."""
        models, requests = self.engine.models, self.engine.sequences()
        texts, cache, pool = models.texts, models.prompt_cache, models.pool
        num_waiting = self.engine.loop.num_waiting + self.prompts.num_waiting
        path = None if texts is None else texts.key.model
        report: dict[str, Any] = {
            "model": None if path is None else os.path.basename(path.rstrip("/")),
            "health": self.health(),
            "server": self.stats.as_dict(),
            "clients": self.clients.figures(),
            "running": {"running": sum(not each["waiting"] for each in requests), "waiting": num_waiting},
            "pool": None if pool is None else pool.stats().as_dict(),
            "pages": [] if pool is None else [pages_of(group) for group in pool.groups],
            "prefix_cache": cache.figures() if hasattr(cache, "figures") else None,
            "dispatch": dispatches(),
        }
        if with_blocks:
            report |= {"sequences": requests, "blocks": [] if pool is None else blocks_of(pool)}
        return report
