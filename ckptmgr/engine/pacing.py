"""When by the clock: after so many seconds, whenever nothing is in flight, or at an interval that is
worked out from what saves and failures were seen to cost.

What was seen survives a restart in `_ckptmgr/pace.json`, which also says that a manager is at work: one
that finds it so at its start counts a failure.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import threading

from ckptmgr.core import layout
from ckptmgr.core.advice import Measured, adapt
from ckptmgr.engine.store import Store
from ckptmgr.errors import StoreError
from ckptmgr.events import Clock, Emitter, Event
from ckptmgr.options import Options

logger = logging.getLogger("ckptmgr")


class Pace:
    """The clock's part of the schedule of one manager, on process 0.

    Attributes:
      interval: seconds from one accepted save to the next, None where the clock asks for none.
    """

    def __init__(self, options: Options, store: Store, clock: Clock, emitter: Emitter) -> None:
        schedule = options.schedule
        self._adaptive = schedule.adaptive
        self._continuous = schedule.continuous_seconds
        self._store = store
        self._clock = clock
        self._emitter = emitter
        self._lock = threading.Lock()
        self._at_work = False
        self._last = self._seen = clock.monotonic()
        beats = None if options.heartbeat is None else options.heartbeat.every_saves
        self._measured = Measured(heartbeat_every=beats)
        self.interval = schedule.every_seconds
        if self._adaptive is not None:
            self.interval, _ = adapt(self._adaptive, self._measured, schedule.every_seconds)

    @property
    def asks(self) -> bool:
        """Whether the clock has a say at all."""
        return self.interval is not None or self._continuous is not None

    def open(self) -> None:
        """Goes on from what earlier runs have seen, and says that this one is at work."""
        if self._adaptive is None:
            return
        known, at_work = self._load()
        if known is not None:
            beats = self._measured.heartbeat_every
            self._measured = dataclasses.replace(known, heartbeat_every=beats)
            self._measured = self._measured.ran(0.0, failed=at_work)
        self._adapt(0)
        self._at_work = True
        self._keep()

    def close(self) -> None:
        """The run has ended as it should."""
        if self._adaptive is not None:
            self._at_work = False  # also for a save that is still in flight
            self._run_on()
            self._keep()

    def is_time(self, in_flight: int) -> bool:
        """Whether a save is due by the clock, with so many in flight."""
        since = max(0.0, self._clock.monotonic() - self._last)
        if self.interval is not None and since >= self.interval:
            return True
        return self._continuous is not None and not in_flight and since >= self._continuous

    def accepted(self, called: float) -> None:
        """A save was accepted that was called at this monotonic time."""
        self._last = called

    def saved(self, step: int, stall: float, flush: float, heartbeat: bool) -> None:
        """A save is durable, `flush` seconds after its call; it stopped training for `stall`."""
        if self._adaptive is None:
            return
        self._measured = self._measured.saved(stall, flush, heartbeat=heartbeat)
        self._run_on()
        self._adapt(step)
        self._keep()

    def _run_on(self) -> None:
        now = self._clock.monotonic()
        self._measured = self._measured.ran(now - self._seen)
        self._seen = now

    def _adapt(self, step: int) -> None:
        assert self._adaptive is not None
        before = self.interval
        self.interval, reason = adapt(self._adaptive, self._measured, before)
        if self.interval != before:
            self._emitter.emit(Event("adapt", step, self.interval, detail=reason))

    def _load(self) -> tuple[Measured | None, bool]:
        """What is on record, and whether a run was at work when it was written."""
        try:
            found = json.loads(self._store.read_file(layout.PACE))
            return Measured(**found["measured"]), bool(found["at_work"])
        except (StoreError, ValueError, KeyError, TypeError):
            return None, False

    def _keep(self) -> None:
        """A few numbers that may be lost: not synced."""
        with self._lock:
            known = {"measured": dataclasses.asdict(self._measured), "at_work": self._at_work}
            try:
                self._store.make_dir(layout.PRIVATE)
                self._store.remove_file(layout.PACE)
                self._store.put_file(layout.PACE, json.dumps(known).encode())
            except StoreError as exc:
                logger.warning("what saves cost is not on record: %s", exc)
