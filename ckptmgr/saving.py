"""What a manager does to save: which kind a save is, whether there is room, and its thread.

One save goes: survey -> kind -> room -> order the copies -> hand over to the save's thread. Saves in
flight are bounded by `Snapshot.slots`; there is no queue.
"""

from __future__ import annotations

import functools
import json
import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ckptmgr.core import cadence, layout
from ckptmgr.engine import pipeline, worker
from ckptmgr.engine.compressing import Compressing
from ckptmgr.engine.meeting import telling
from ckptmgr.engine.memory import give_back_freed
from ckptmgr.engine.overview import last_saved
from ckptmgr.engine.pacing import Pace
from ckptmgr.engine.preemption import PreemptionWatch
from ckptmgr.engine.prepare import Preparer, SaveRequest
from ckptmgr.engine.snapshot import Stager
from ckptmgr.engine.worker import SaveHandle
from ckptmgr.errors import PeerFailed, StepExists
from ckptmgr.events import Call, Event

logger = logging.getLogger("ckptmgr")


DECISIONS_KEPT = 1000
"""Steps by which another process may be behind process 0 and still read what it has decided."""


@dataclass(frozen=True, slots=True)
class _Decision:
    """What only one process can say of a step: whether a notice came, and whether it is time."""

    step: int
    noticed: bool
    timed: bool

    def to_json(self) -> bytes:
        return json.dumps([self.step, self.noticed, self.timed]).encode()


class Saves:
    """The saves of one manager, whose lock serialises the calls.

    Args:
      tools: what saves work with.
      stager: takes their snapshots.
    """

    def __init__(self, tools: pipeline.Tools, stager: Stager) -> None:
        self._tools = tools
        self._options = tools.options
        self._emitter = tools.emitter
        self._stager = stager
        rank, world = tools.coordinator.rank, tools.coordinator.world
        self._prepare = Preparer(tools.options.storage, stager, tools.emitter.clock, rank, world)
        self._compressing = Compressing(tools)
        self._in_flight: list[SaveHandle] = []
        self._begun = 0
        self._old: list[str] = []
        self._since_heartbeat: int | None = None
        clock, store = tools.emitter.clock, tools.catalog.store
        self._pace = Pace(tools.options, store, clock, tools.emitter)
        self._decided = 0
        self._behind = False  # whether process 0 was asked about a step that this process was not
        self._decision: _Decision | None = None
        self._watch = PreemptionWatch() if tools.options.schedule.on_preemption else None
        self._noticed = self._preemption_saved = self._closed = False
        self.skipped = 0

    # -- when -------------------------------------------------------------------------------

    def open(self, since_heartbeat: int) -> None:
        """Begins to watch for preemption. Raises InvalidOption where that is not possible.

        `since_heartbeat` is what process 0 counts.
        """
        self._since_heartbeat = since_heartbeat
        if self._tools.leads:
            self._pace.open()
        if self._watch is not None:
            self._watch.start()

    def close(self) -> None:
        """Ends what runs in the background besides the saves; again is fine."""
        if self._watch is not None:
            self._watch.stop()
        if self._tools.leads and not self._closed and not self._options.read_only:
            self._pace.close()
        self._closed = True
        self._stager.close()

    def is_due(self, step: int) -> bool:
        """Whether the schedule, or a notice of preemption, wants `step`."""
        self._poll(step)
        schedule = self._options.schedule
        assert not isinstance(schedule.every_steps, str)
        due = cadence.due(step, schedule.every_steps, schedule.at_steps)
        timed = self._decision is not None and self._decision.timed
        return due or timed or (self._noticed and not self._preemption_saved)

    @property
    def preempted(self) -> bool:
        return self._noticed

    def _poll(self, step: int) -> None:
        """What depends on a clock or a signal; in a job process 0 decides, once a step."""
        noticed = self._watch is not None and self._watch.noticed(step)
        timed = self._pace.is_time(self.count)
        mine = _Decision(step, noticed, timed)
        alike = self._watch is None or self._watch.is_agreed
        coordinator = self._tools.coordinator
        if coordinator.world > 1 and (self._pace.asks or not alike):
            if noticed and not alike:  # the signal may have come to this process alone
                coordinator.mark("preempted")
            if self._decision is not None and self._decision.step == step:
                return
            if self._tools.leads and not alike and coordinator.is_marked("preempted"):
                mine = replace(mine, noticed=True)
            mine = self._decide(mine)
        self._decision = mine
        if mine.noticed and not self._noticed:
            self._noticed = True
            logger.warning("step %d: a notice of preemption has come", step)

    def _decide(self, mine: _Decision) -> _Decision:
        """What process 0 has decided about a step. Raises PeerFailed where it was about another."""
        coordinator = self._tools.coordinator
        found = self._next_decision(mine)
        while self._behind and found.step < mine.step:
            found = self._next_decision(mine)
        self._behind = found.step < mine.step
        if found.step != mine.step:
            text = f"asks about step {mine.step}, process 0 about step {found.step}"
            raise PeerFailed(f"due.{self._decided}", {coordinator.rank: text}, ())
        if coordinator.rank == 0 and self._decided > DECISIONS_KEPT:
            coordinator.forget(f"due.{self._decided - DECISIONS_KEPT}")
        return found

    def _next_decision(self, mine: _Decision) -> _Decision:
        self._decided += 1
        # of the calls that they have missed the others hear from process 0
        call = str(mine.step).encode() if self._tools.leads else None
        answer = self._tools.coordinator.lead(
            f"due.{self._decided}", mine.to_json, self._tools.deadline, call
        )
        return _Decision(*json.loads(answer))

    def _kind(self, step: int, sync: bool) -> str:
        self._poll(step)
        if self._noticed and not self._preemption_saved:
            return "preemption"
        heartbeat = self._options.heartbeat
        if heartbeat is not None and self.since_heartbeat >= heartbeat.every_saves:
            return "heartbeat"
        return "sync" if sync or self._options.snapshot.mode == "sync" else "async"

    @property
    def since_heartbeat(self) -> int:
        """Saves since the last heartbeat, the one that is being made counted.

        Counted in memory; at the start from the latest save, so that it survives a restart.
        """
        if self._since_heartbeat is None:
            last = last_saved(self._tools.catalog)
            self._since_heartbeat = last.since_heartbeat if last is not None else 0
        return self._since_heartbeat

    # -- a save -----------------------------------------------------------------------------

    def save(
        self,
        call: Call,
        step: int,
        state: Any,
        metrics: Mapping[str, Any] | None,
        extra: Any,
        overwrite: bool,
        sync: bool,
    ) -> SaveHandle:
        """See `CheckpointManager.save`; the step is wanted."""
        self._begun += 1
        name = f"save.{self._begun}"
        self._old.append(name)
        phases = [f"{name}/open", *self._compressing.phases(name)]
        if self._options.snapshot.when_busy == "skip":
            phases.append(f"{name}/room")
        before = self.since_heartbeat
        self._since_heartbeat = before + 1
        try:
            with telling(self._tools.coordinator, *phases, own=True):
                self.raise_failures()
                self.refuse_existing(step, overwrite)
                self._prepare.compress(self._compressing.settle(name))
                request = self._prepare.survey(step, state, metrics, extra, overwrite, call.started)
                kind = self._kind(step, sync)
                reason, waited = self._make_room(name, step, kind, overwrite)
                if reason:
                    call.skip()
                    self.skipped += 1
                    self._since_heartbeat = before
                    return SaveHandle(step, False, reason)
                handle = SaveHandle(step)
                handle.waited = waited
                job, thread = self._begin(call, name, request, kind, handle)
        except BaseException:
            if self._tools.coordinator.world == 1:  # others, who did not refuse it, have counted it
                self._since_heartbeat = before
            raise
        self._order_rest(job, handle)
        handle.stall = self._emitter.since(call.started) - handle.waited
        if kind != "async" or worker.exiting():
            handle.result()
            thread.join()
        if kind == "heartbeat":
            self._since_heartbeat = 0
        self._preemption_saved = self._preemption_saved or kind == "preemption"
        return handle

    def _begin(
        self, call: Call, name: str, request: SaveRequest, kind: str, handle: SaveHandle
    ) -> tuple[pipeline.SaveJob, worker.SaveThread]:
        """Orders the copies and hands the save over to its thread."""
        handle.warn_only = self._options.on_save_error == "warn"
        thread = worker.SaveThread(handle, self._tools.deadline)
        job: pipeline.SaveJob | None = None
        try:
            job = self._job(request, name, kind)
            self._order_first(job)
            call.accept(handle, job.mode)
            before = self._in_flight[-1] if self._in_flight else None
            self._in_flight.append(handle)
            self._accepted(name, call.started)
            thread.give(functools.partial(self._finish, job, handle, before))
        except BaseException:  # an interrupt among them: nothing may wait for this save any more
            thread.cancel()
            if job is not None:
                job.close()
            self._emitter.settled(handle)
            raise
        return job, thread

    def _accepted(self, name: str, called: float) -> None:
        self._old = [name]
        self._pace.accepted(called)
        if self._decision is not None:
            self._decision = replace(self._decision, timed=False)

    def _finish(self, job: pipeline.SaveJob, handle: SaveHandle, before: SaveHandle | None) -> None:
        """On the save's own thread."""
        pipeline.finish_save(job, self._tools, handle, before)
        try:
            self._learn(job, handle)
        except Exception:
            logger.exception("step %d is saved, but what it cost was not learnt", job.step)
        leaves = sum(len(item.tree.leaves) for item in job.trees)
        give_back_freed(leaves, job.nbytes, self._begun)

    def _learn(self, job: pipeline.SaveJob, handle: SaveHandle) -> None:
        """What a durable save has shown, for those that follow."""
        usual = self._options.snapshot.mode == "sync" or job.kind in ("async", "heartbeat")
        if self._tools.leads and usual:
            flush = handle.flush
            stall = flush if job.kind != "async" or handle.stall is None else handle.stall
            self._pace.saved(job.step, stall, flush, job.kind == "heartbeat")
        self._stager.learn()
        self._compressing.learn(job, handle.flush)

    def _job(self, request: SaveRequest, name: str, kind: str) -> pipeline.SaveJob:
        mode = self._options.snapshot.mode
        heartbeat = self._options.heartbeat
        audited = kind == "heartbeat" and heartbeat is not None and heartbeat.audit
        return self._prepare.job(
            request,
            name=name,
            old=tuple(old for old in self._old if old != name),
            kind=kind,
            mode=mode if kind == "async" else "sync",
            since_heartbeat=0 if kind == "heartbeat" else self.since_heartbeat,
            audit_mode=mode if audited and mode != "sync" else None,
        )

    def _order_first(self, job: pipeline.SaveJob) -> None:
        with self._emitter.span("order", job.step, mode=job.mode) as span:
            job.ordering.first()
            span.note(nbytes=job.nbytes, staging_bytes=job.staging_bytes)

    def _order_rest(self, job: pipeline.SaveJob, handle: SaveHandle) -> None:
        """What host memory had no room for. What fails here fails the save, too."""
        try:
            for ordering in job.orderings:
                if not ordering.started_any:
                    ordering.first()
                ordering.rest()
        except BaseException:
            handle.join()
            handle.take_failure()
            raise
        waited = sum(ordering.waited for ordering in job.orderings)
        if waited:
            self._tell_wait(job.step, waited, "for host memory, see Snapshot.host_bytes")
            handle.waited += waited

    def _tell_wait(self, step: int, seconds: float, why: str) -> None:
        self._emitter.emit(Event("wait", step, seconds, detail=why))

    def refuse_existing(self, step: int, overwrite: bool) -> None:
        """Raises StepExists for a step that is there, or on its way."""
        if overwrite:
            return
        store = self._tools.catalog.store
        path = store.path(layout.step_name(step))
        for handle in self._in_flight:
            if handle.step == step and not handle.settled:
                raise StepExists(step, path + " (in flight)")
        entry = self._tools.catalog.entry(step)
        if entry is not None and entry.unreadable is not None:
            raise entry.unreadable
        if entry is not None and entry.problem is None:
            raise StepExists(step, path)

    def _make_room(self, name: str, step: int, kind: str, overwrite: bool) -> tuple[str, float]:
        """Waits for saves in flight, or says why this one is skipped; and the seconds waited.

        Saves that are not asynchronous wait for all of them. Process 0 decides what is skipped.
        """
        slots = self._options.snapshot.slots if kind == "async" else 1
        busy = [handle for handle in self._in_flight if not handle.settled]
        surplus = busy[: max(0, len(busy) - slots + 1)]
        what = f"the save of step {surplus[-1].step}" if surplus else ""
        if self._options.snapshot.when_busy == "skip" and kind != "preemption":
            told = self._tools.coordinator.lead(
                f"{name}/room", what.encode, self._tools.deadline
            ).decode()
            if told:
                return f"{told} is still in flight", 0.0
        if not surplus:
            return "", 0.0
        started = self._emitter.clock.monotonic()
        for handle in surplus:
            handle.wait_settled()
        waited = self._emitter.since(started)
        self._tell_wait(step, waited, f"for {what}, which was in flight")
        self.raise_failures()
        self.refuse_existing(step, overwrite)
        return "", waited

    # -- those in flight --------------------------------------------------------------------

    @property
    def count(self) -> int:
        """How many saves are not yet durable or failed."""
        return sum(not handle.settled for handle in list(self._in_flight))

    def drain(self) -> None:
        """Waits until nothing of any save is left to do; raises nothing."""
        for handle in list(self._in_flight):
            handle.join()

    def wait_settled(self, step: int) -> None:
        """Waits until the saves of one step are durable or failed."""
        for handle in self._in_flight:
            if handle.step == step:
                handle.wait_settled()

    def raise_failures(self) -> None:
        """Forgets ended saves; raises (or logs) the first failure nobody was told of."""
        for handle in list(self._in_flight):
            error = handle.take_failure()
            if handle.done:
                self._in_flight.remove(handle)
            if error is None:
                continue
            if self._options.on_save_error == "raise":
                raise error
            logger.warning("%s", error)

    def in_hook(self) -> bool:
        """Whether the current thread is that of a save in flight: a hook calls."""
        current = threading.current_thread()
        return any(handle.thread is current for handle in list(self._in_flight))
