"""Host memory of one manager's snapshots: how much may be held, and buffers to use again.

A wave of copies reserves all its memory at once and gives it back when its values are written.
Reserving waits while the bound would be passed, with three exceptions, without which a save
could never end: nothing is held at all (a single shard larger than the bound runs alone), the
writer has nothing left to give back before it gets this very wave, or the save has failed.

Buffers whose kind will be wanted again are kept rather than freed (`keep`); they count as held,
and the oldest go when room is needed.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import math
import mmap
import threading
import time
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from typing import Any

import jax

Kind = Hashable
"""Buffers of the same kind are interchangeable."""


class HostMemory:
    """Used from any thread.

    Args:
      limit: bytes that may be held, None for no bound.
    """

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._changed = threading.Condition()
        self._in_use = 0
        self._kept = 0
        self._buffers: dict[Kind, list[tuple[Any, int]]] = {}

    @property
    def held(self) -> int:
        """Bytes in use or kept to be used again."""
        with self._changed:
            return self._in_use + self._kept

    def reserve(
        self, wanted: Sequence[tuple[Kind | None, int]], at_once: Callable[[], bool]
    ) -> tuple[list[Any], float]:
        """Takes memory for each (kind, bytes); waits until there is room, or `at_once()`.

        Returns, for each, a kept buffer of its kind or None, and the seconds waited.
        """
        started = time.monotonic()
        with self._changed:
            found = [self._take(kind) for kind, _ in wanted]
            total = sum(nbytes for _, nbytes in wanted)
            new = total - sum(size for _, size in filter(None, found))
            self._in_use += total - new
            waited = not self._has_room(new)
            while not self._has_room(new):
                if at_once() or self._in_use == total - new:
                    break
                self._changed.wait()
            self._in_use += new
        seconds = time.monotonic() - started if waited else 0.0
        return [entry[0] if entry else None for entry in found], seconds

    def release(self, nbytes: int, kept: Sequence[tuple[Kind, int, Any]] = ()) -> None:
        """Gives back `nbytes`, of which the buffers `kept` (kind, bytes, buffer) stay for later."""
        with self._changed:
            self._in_use -= nbytes
            for kind, size, buffer in kept:
                self._buffers.setdefault(kind, []).append((buffer, size))
                self._kept += size
            self._has_room(0)  # what is over the bound is not kept
            self._changed.notify_all()

    def keep_only(self, kinds: Collection[Kind]) -> None:
        """Frees kept buffers of other kinds: the tree has changed."""
        with self._changed:
            for kind in [kind for kind in self._buffers if kind not in kinds]:
                self._kept -= sum(size for _, size in self._buffers.pop(kind))
            self._changed.notify_all()

    def wake(self) -> None:
        """Makes waiting reservations ask `at_once()` again."""
        with self._changed:
            self._changed.notify_all()

    def _take(self, kind: Kind | None) -> tuple[Any, int] | None:
        buffers = self._buffers.get(kind) if kind is not None else None
        if not buffers:
            return None
        buffer, size = buffers.pop()
        self._kept -= size
        return buffer, size

    def _has_room(self, nbytes: int) -> bool:
        if self._limit is None:
            return True
        while self._in_use + self._kept + nbytes > self._limit and self._kept:
            kind = next(iter(self._buffers))
            if self._buffers[kind]:
                self._kept -= self._buffers[kind].pop()[1]
            else:
                del self._buffers[kind]
        return self._in_use + nbytes <= self._limit


MANY_LEAVES, SMALL_LEAVES = 256, 2**18
"""From so many leaves on what is freed is given back: each time where they have no more bytes than
this on average."""

TURNS = 10
"""Else once in so many times."""


def give_back_freed(leaves: int, nbytes: int, turn: int = 0) -> None:
    """Returns to the system what the C library keeps of freed memory, after a save or a restore of
    so many leaves and bytes.

    What many leaves take is spread over the heaps of many threads: of 3,000 leaves with 47 MiB a
    process keeps 400 to 500 MiB. Giving it back takes 2 to 40 ms, on the thread of the save, and
    the next save has to touch fresh memory: with 400 leaves of 390 MB it took a quarter longer.
    So that is done now and then only, which keeps a process from growing.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    due = nbytes <= leaves * SMALL_LEAVES or turn % TURNS == 0
    if trim is not None and leaves >= MANY_LEAVES and due:
        trim(0)


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """Python does not look for cycles meanwhile: of the many objects that a restore of thousands of
    leaves makes none is garbage, and looking through them again and again took a third of it.

    Nor, where they are very many, does it look through them right after: all that there is counts as
    old then. Garbage among it would wait for ever, so every few times everything is looked through.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            # what the user has frozen would be unfrozen
            if gc.get_count()[0] > MANY_OBJECTS and gc.get_freeze_count() < FROZEN_BY_PYTHON:
                _spare_collection()
            gc.enable()


MANY_OBJECTS = 50_000
"""A restore of 10,000 leaves leaves ten times as many; looking through them takes 30 ms and more."""

FROZEN_BY_PYTHON = 1000
"""Python 3.12 keeps some hundreds of its own there, and puts them back by itself."""

_spared = itertools.count(1)


def _spare_collection() -> None:
    if next(_spared) % TURNS == 0:
        gc.collect()
    else:  # freezing is moving all objects to a list of their own, and thawing to that of the old
        gc.freeze()
        gc.unfreeze()


FRESH_BYTES = 32 * 2**20
"""Blocks that are larger than this glibc takes from the system and gives back each time."""


def want_huge_pages(copy: jax.Array) -> None:
    """Asks for huge pages under an array in host memory, before the values have arrived there.

    Memory from the system is slow to touch page by page: of a copy of 1 GiB it was half of the time.
    Nothing comes of it where the system has no `madvise`, or the pages are there already.
    """
    if math.prod(copy.sharding.shard_shape(copy.shape)) * copy.dtype.itemsize <= FRESH_BYTES:
        return
    advise = getattr(ctypes.CDLL(None), "madvise", None)
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advise is not None and advice is not None:
        for shard in copy.addressable_shards:
            begin = shard.data.unsafe_buffer_pointer()
            start = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
            stop = (begin + shard.data.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
            advise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), advice)
