"""Waiting for new steps: what an evaluator beside the training job does."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

from ckptmgr import reading
from ckptmgr.core.info import StepInfo
from ckptmgr.engine.leases import Lease
from ckptmgr.engine.listing import Entry
from ckptmgr.engine.overview import Overview
from ckptmgr.errors import InvalidOption, StoreError
from ckptmgr.events import Clock

logger = logging.getLogger("ckptmgr")


def watch(
    directory: Any,
    *,
    after: int | None = None,
    every: bool = False,
    until: Callable[[StepInfo], bool] | None = None,
    stop: threading.Event | None = None,
    timeout_seconds: float | None = None,
    poll_seconds: float = 1.0,
    lease_seconds: float = 3600.0,
    clock: Clock | None = None,
) -> Iterator[StepInfo]:
    """Yields steps of a run's directory as they are committed; it need not exist yet.

    The step that was yielded is held by a lease until the next is asked for, or the iterator is
    closed: retention leaves it alone meanwhile, and nothing is copied. Where this process cannot
    write there is no lease, with one warning. A step that is saved again counts as new; what is
    damaged or suspect is passed over.

    Args:
      after: steps up to this number are not yielded; None: what is there already is yielded first.
      every: each new step, the lowest first; else only the newest of those that are new.
      until: the iterator ends when this is true of the step it has just yielded.
      stop: the iterator ends soon after this is set.
      timeout_seconds: the iterator ends when no new step has come for so long; None: never.
      poll_seconds: how often the directory is looked at.
      lease_seconds: a lease ends by itself after so long, should this process vanish.

    Raises InvalidOption for times that are not positive.
    """
    for name, value in (("poll_seconds", poll_seconds), ("lease_seconds", lease_seconds)):
        if not value > 0:
            raise InvalidOption(f"watch({name}) must be positive, got {value!r}")
    if timeout_seconds is not None and not timeout_seconds > 0:
        raise InvalidOption(f"watch(timeout_seconds) must be positive, got {timeout_seconds!r}")
    first = -1 if after is None else reading.step_number(after)
    watched = _Watched(directory, first, every, lease_seconds, clock or Clock())
    return watched.steps(
        until or (lambda info: False), stop or threading.Event(), timeout_seconds, poll_seconds
    )


class _Watched:
    def __init__(
        self, directory: Any, after: int, every: bool, lease_seconds: float, clock: Clock
    ) -> None:
        self._catalog = reading.catalog_of(reading.local_path(directory))
        self._overview = Overview(self._catalog, clock)
        self._after = after
        self._every = every
        self._lease_seconds = lease_seconds
        self._clock = clock
        self._seen: set[tuple[int, str]] = set()
        self._warned = False

    def steps(
        self,
        until: Callable[[StepInfo], bool],
        stop: threading.Event,
        timeout_seconds: float | None,
        poll_seconds: float,
    ) -> Iterator[StepInfo]:
        last = self._clock.monotonic()
        while not stop.is_set():
            entry = self._next()
            if entry is not None:
                lease = self._lease(entry)
                try:
                    info = self._still_there(entry)
                    if info is not None:
                        self._seen.add(_identity(entry))
                        yield info
                        if until(info):
                            return
                        last = self._clock.monotonic()
                finally:
                    if lease is not None:
                        lease.end()
                continue
            waited = self._clock.monotonic() - last
            if timeout_seconds is not None and waited >= timeout_seconds:
                return
            stop.wait(poll_seconds)  # there is nobody who could tell

    def _next(self) -> Entry | None:
        """The step to yield next."""
        found = [
            entry
            for entry in self._overview.committed()
            if entry.step > self._after and not entry.suspect and _identity(entry) not in self._seen
        ]
        if not found:
            return None
        if self._every:
            return found[-1]
        self._seen |= {_identity(entry) for entry in found[1:]}
        return found[0]

    def _lease(self, entry: Entry) -> Lease | None:
        try:
            now = self._clock.time()
            return Lease(self._catalog.store, entry.step, now, self._lease_seconds)
        except StoreError as exc:
            if not self._warned:
                self._warned = True
                logger.warning(
                    "watch() cannot write a lease, so retention may delete a step while it is "
                    "read: %s",
                    exc,
                )
            return None

    def _still_there(self, entry: Entry) -> StepInfo | None:
        """The step's info, None where it has gone before the lease was there."""
        again = self._catalog.entry(entry.step)
        if again is None or again.problem is not None or _identity(again) != _identity(entry):
            return None
        return reading.info_of_entry(self._catalog.store, again)


def _identity(entry: Entry) -> tuple[int, str]:
    return entry.step, "" if entry.manifest is None else entry.manifest.attempt
