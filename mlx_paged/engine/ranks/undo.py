"""Undoing what a model call has built of writes and nobody has computed."""

from __future__ import annotations

from collections.abc import Callable

from ...kv.pool import BlockPool


def checkpoint(pool: BlockPool) -> Callable[[], None]:
    """A function that undoes the writes built after this. It is to be dropped before anything is computed: it keeps
    buffers that are to be written in place. Tables and lengths are their owner's to put back."""
    states = [(group, [storage.checkpoint() for storage in group.storages]) for group in pool.groups]

    def go_back() -> None:
        with pool.turn:
            for group, checkpoints in states:
                for storage, each in zip(group.storages, checkpoints, strict=False):
                    storage.go_back(each)
                group.note_read(len(group.storages) - 1)  # nothing: its reads are not going to be computed

    return go_back
