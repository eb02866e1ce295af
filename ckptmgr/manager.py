"""`CheckpointManager`: what a training loop talks to. It owns no format and no policy."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from ckptmgr import checking, reading
from ckptmgr.core import layout, retention
from ckptmgr.core.info import Restored, StepInfo
from ckptmgr.engine import coord, meeting, pipeline
from ckptmgr.engine.catalog import Catalog
from ckptmgr.engine.listing import Entry
from ckptmgr.engine.recovery import Recovery
from ckptmgr.engine.retaining import Retention
from ckptmgr.engine.snapshot import Stager
from ckptmgr.engine.store import Store, local_path
from ckptmgr.engine.worker import SaveHandle
from ckptmgr.errors import (
    InvalidOption,
    ManagerClosed,
    NotAllowedHere,
    Problem,
    ReadOnly,
    StepNotFound,
)
from ckptmgr.events import Clock, Emitter, Sink
from ckptmgr.options import Options
from ckptmgr.restoring import Restores, found
from ckptmgr.saving import Saves
from ckptmgr.sinks import log_sink

logger = logging.getLogger("ckptmgr")


class CheckpointManager:
    """Saves and restores the steps below one directory.

    Args:
      directory: `str`, `os.PathLike` or epath; a relative path is made absolute now. Created
        unless `read_only`.
      options: see `Options`.
      clock, store, new_attempt, coordinator, stager: seams for tests.
      events: further sinks for `ckptmgr.events.Event`.

    Calls from two threads are serialised; `steps`, `latest_step` and `info` never wait. Raises
    StoreError if the directory is a file, or cannot be created or written; InvalidOption for a
    path that is not local or a step's own directory.
    """

    def __init__(
        self,
        directory: Any,
        options: Options | None = None,
        *,
        clock: Clock | None = None,
        store: Store | None = None,
        new_attempt: Callable[[], str] | None = None,
        coordinator: meeting.Coordinator | None = None,
        stager: Stager | None = None,
        events: Sequence[Sink] = (),
    ) -> None:
        self._options = options if options is not None else Options()
        if not isinstance(self._options, Options):
            raise InvalidOption(f"options must be ckptmgr.Options, got {options!r}")
        self._clock = clock or Clock()
        root = local_path(directory)
        reading.refuse_inside_a_step(root)
        self._store = store or Store(root, durable=self._options.storage.durable)
        self._catalog = Catalog(self._store, self._clock, new_attempt or reading.new_attempt)
        copies = stager or Stager(self._options.snapshot)
        if callable(events):
            raise InvalidOption("events must be a list of sinks, as [sink]")
        self._emitter = Emitter([log_sink, *events], self._clock, lambda: copies.held)
        self._coordinator = coordinator or coord.of_this_job(root, self._options.coordination.alone)
        self._retention = Retention(self._catalog, self._options.retention, self._clock)
        tools = pipeline.Tools(
            self._catalog, self._coordinator, self._emitter, self._options, self._retention
        )
        self._saves = Saves(tools, copies)
        self._restores = Restores(tools)
        self._lock = threading.RLock()
        self._closed = False
        self._calls = 0
        self._settled: list[str] = []
        self._pid = os.getpid()
        if not self._options.read_only:
            self._start()

    def _start(self) -> None:
        """Process 0 makes the directory and looks after what a crash has left."""

        def recover() -> bytes:
            self._store.check_usable(create=True)
            recovery = Recovery(self._store, self._clock)
            recovery.recover()
            recovery.sweep_in_background()
            return str(self._saves.since_heartbeat).encode()

        deadline = self._options.coordination.deadline_seconds
        with meeting.unwrapped():
            count = self._coordinator.lead("start", recover, deadline)
        self._store.check_usable(create=True)
        self._saves.open(int(count))

    @property
    def directory(self) -> str:
        """The absolute path of the root."""
        return self._store.root

    @property
    def options(self) -> Options:
        return self._options

    # -- saving -----------------------------------------------------------------------------

    def should_save(self, step: Any) -> bool:
        """Whether the schedule wants `step`."""
        return self._saves.is_due(reading.step_number(step))

    @property
    def preempted(self) -> bool:
        """Whether a notice of preemption had come when `should_save` or `save` was last called."""
        return self._saves.preempted

    def save(
        self,
        step: Any,
        state: Any,
        metrics: Mapping[str, Any] | None = None,
        extra: Any = None,
        force: bool = False,
        overwrite: bool = False,
        sync: bool = False,
    ) -> SaveHandle:
        """Saves `state` as `step`, in the background unless `sync` or the options say otherwise.

        When it returns, donating, deleting or changing any leaf is safe.

        Args:
          step: a whole number from 0; numpy and 0-d jax integers are taken by value.
          state: a pytree, or `Items`.
          metrics: numbers to keep with the step.
          extra: any JSON-like value to keep with the step.
          force: save whatever the schedule says.
          overwrite: replace the step if it exists; the old one stays until the new is durable.
          sync: return when the step is durable.

        Raises:
          SaveFailed: an earlier background save failed (once), or this one with `sync`.
          StepExists, UnsupportedLeaf, SnapshotLost, InvalidOption: this call, before anything
            was written.
        """
        number = reading.step_number(step)
        self._refuse_in_hook("save()")
        with self._emitter.call(number) as call, self._open_for("save"):
            if self._options.read_only:
                raise ReadOnly("a read-only manager does not save")
            if not (force or self._saves.is_due(number)):
                self._saves.raise_failures()
                return SaveHandle(number, False, f"step {number} is not in the schedule")
            return self._saves.save(call, number, state, metrics, extra, overwrite, sync)

    # -- waiting ----------------------------------------------------------------------------

    def wait(self) -> None:
        """Waits until no save is in flight; raises the first failure not yet told of."""
        self._refuse_in_hook("wait()")
        with self._open_for("wait", drain=True):
            self._saves.raise_failures()

    def check(self) -> None:
        """Raises the failure of a background save not yet told of, if there is one."""
        with self._open_for("check"):
            self._saves.raise_failures()

    def close(self) -> None:
        """Waits for the saves in flight and closes; again is fine. Raises like `wait`."""
        self._refuse_in_hook("close()")
        if self._is_forked_child():
            return
        self._saves.drain()
        with self._lock:
            self._closed = True
            self._saves.close()
        self._saves.drain()  # saves that began meanwhile
        with self._lock:
            self._saves.raise_failures()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            self.close()
        except Exception as exc:
            if error is None:
                raise
            error.add_note(f"besides, {type(exc).__name__}: {exc}")

    @property
    def saves_in_flight(self) -> int:
        """How many saves are not yet durable or failed."""
        return self._saves.count

    @property
    def saves_skipped(self) -> int:
        """How many saves were turned down because others were in flight."""
        return self._saves.skipped

    # -- what there is ----------------------------------------------------------------------

    def steps(self) -> tuple[StepInfo, ...]:
        """The committed steps, oldest first, read from the directory."""
        return tuple(self._info(e) for e in sorted(self._committed(), key=lambda e: e.step))

    def latest_step(self) -> int | None:
        """The newest committed step, or None."""
        return next((entry.step for entry in self._committed()), None)

    def info(self, step: Any) -> StepInfo:
        """All about one step, without reading array data. Raises StepNotFound or
        CorruptCheckpoint."""
        number = reading.step_number(step)
        return reading.open_entry(self._store.root, found(self._catalog, number)).info

    def best_step(self, metric: str | None = None, mode: str = "min") -> int | None:
        """The step with the best `metric`, None where no step has a number for it.

        Without `metric` that of the policy's first `KeepBest`; raises InvalidOption where it has
        none. Ties and what is no finite number as in `KeepBest`.
        """
        if metric is None:
            best = retention.first_best(self._options.retention)
            if best is None:
                raise InvalidOption(
                    "best_step() needs a metric, or a KeepBest in Options.retention"
                )
        else:
            best = retention.KeepBest(1, metric, mode)  # type: ignore[arg-type]
        ranked = best.ranked([info for info in self.steps() if info.status == "good"])
        return ranked[0].step if ranked else None

    # -- pins -------------------------------------------------------------------------------

    def pin(self, step: Any, reason: str) -> None:
        """Has retention and `delete` leave a step, whoever runs them, until `unpin`.

        In a job one process is enough. Raises StepNotFound, or InvalidOption without a reason.
        """
        number = reading.step_number(step)
        if not isinstance(reason, str) or not reason:
            raise InvalidOption(f"pin() needs a reason, a text that is not empty, got {reason!r}")
        with self._open_for("pin"):
            self._must_write("pin")
            self._saves.wait_settled(number)
            found(self._catalog, number)
            self._catalog.records.put_pin(number, reason, self._clock.time())

    def unpin(self, step: Any) -> None:
        """Takes a pin back; a step that has none is fine."""
        number = reading.step_number(step)
        with self._open_for("unpin"):
            self._must_write("unpin")
            self._catalog.records.remove_pin(number)

    def _refuse_pinned(self, steps: Sequence[int]) -> None:
        pinned = {step: self._catalog.records.pin(step) for step in steps}
        for step, reason in pinned.items():
            if reason:
                raise InvalidOption(f"step {step} is pinned ({reason}); unpin({step}) first")

    def _committed(self) -> Iterator[Entry]:
        return self._catalog.committed()

    def _info(self, entry: Entry) -> StepInfo:
        return reading.info_of_entry(self._store, entry)

    # -- restoring --------------------------------------------------------------------------

    def restore(
        self,
        like: Any = None,
        *,
        step: Any = None,
        item: str | None = None,
        cast: bool = False,
        partial: bool = False,
    ) -> Any:
        """The state of `step` (None: the latest committed one).

        Args:
          like: a tree of arrays or `jax.ShapeDtypeStruct` with shardings, or `Items` of such and
            of iterators to set; None: everything as it was saved, arrays as numpy.
          item: only this item.
          cast: convert floating-point leaves to the target's dtype; integers only to wider ones.
          partial: the target may lack leaves that are stored; they are not read.

        Raises:
          StepNotFound: no such step, or none at all.
          TreeMismatch: every leaf that does not fit.
          CorruptCheckpoint: what of the step is damaged.
        """
        number = None if step is None else reading.step_number(step)
        with self._open_for("restore"):
            if number is not None:
                self._saves.wait_settled(number)
            return self._restores.restore(number, like, item, cast, partial)

    def restore_latest(self, like: Any) -> Restored | None:
        """The newest step that can be read and verified, in a job by every process.

        Returns None only where there is no step at all. `skipped` names newer steps that were
        passed over as damaged. Raises CorruptCheckpoint when all are damaged, TreeMismatch when
        the newest good one does not fit `like`.
        """
        with self._open_for("restore_latest", drain=True):
            return self._restores.restore_latest(like)

    def verify(
        self,
        step: Any = None,
        *,
        from_storage: bool = False,
        leaf_digests: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> tuple[Problem, ...]:
        """Reads all of `step` (None: the newest, damaged or not); gives everything that is wrong.

        A step that is right goes on record (`StepInfo.verified`), and is still verified when it is
        restored. One that is damaged is not put aside by this: the next `restore_latest` does so.
        Of a step of Orbax's only that it can be read is known. Other threads may use the manager
        meanwhile. Arguments as of `ckptmgr.verify`. Raises StepNotFound.
        """
        number = None if step is None else reading.step_number(step)
        with self._open_for("verify"):
            if number is not None:
                self._saves.wait_settled(number)
        how = checking.How(from_storage, leaf_digests, progress)
        found = checking.verify_in(self._store.root, number, how)
        if found.step is not None and not self._options.read_only:
            self._catalog.record_verdict(found.step, found.attempt, found.problems)
        return found.problems

    # -- deleting ---------------------------------------------------------------------------

    def delete(self, step: Any) -> None:
        """Deletes a step, after the saves in flight; in a job all processes call it. Raises
        StepNotFound."""
        number = reading.step_number(step)
        with self._open_for("delete", drain=True):
            self._must_write("delete")
            self._once(f"deletes step {number}", lambda: self._delete(number))

    def _delete(self, number: int) -> list[int]:
        entry = self._catalog.entry(number)
        real = entry is not None and not reading.is_no_step(entry)
        if real and not self._store.is_own_dir(layout.step_name(number)):
            raise StepNotFound(f"step {number} is a link, which is not ours to delete", number)
        self._refuse_pinned([number] if real else [])
        if not real or not self._catalog.forget(number):
            raise StepNotFound(f"there is no step {number} in {self._store.root}", number)
        return [number]

    def truncate_after(self, step: Any) -> tuple[int, ...]:
        """Deletes every step above `step`, newest first; returns them. To roll back; in a job all
        processes call it."""
        number = reading.step_number(step)
        with self._open_for("truncate_after", drain=True):
            self._must_write("truncate_after")
            what = f"deletes the steps above {number}"
            return tuple(self._once(what, lambda: self._truncate(number)))

    def _truncate(self, number: int) -> list[int]:
        entries = [e for e in self._catalog.entries() if not reading.is_no_step(e)]
        if entries and not any(e.step <= number and e.problem is None for e in entries):
            raise InvalidOption(
                f"no good step at or below {number} would remain; the steps are "
                f"{sorted(e.step for e in entries)}"
            )
        gone = [entry.step for entry in entries if entry.step > number]
        self._refuse_pinned(gone)
        return [found for found in gone if self._catalog.forget(found)]

    def _once(self, what: str, work: Callable[[], list[int]]) -> list[int]:
        """What `work` returns, done by process 0 when all processes ask for the same."""

        def answer(payloads: Sequence[bytes]) -> bytes:
            for old in self._settled:  # all have come to this call, so nobody waits in those
                self._coordinator.forget(old)
            self._settled = [phase]
            wrong = meeting.odd_ones(phase, [payload.decode() for payload in payloads])
            if wrong is not None:
                raise wrong
            return json.dumps(work()).encode()

        self._calls += 1
        phase = f"once.{self._calls}"
        deadline = self._options.coordination.deadline_seconds
        with meeting.unwrapped():
            found = self._coordinator.exchange(phase, what.encode(), deadline, answer)
        return list(json.loads(found))

    def _must_write(self, what: str) -> None:
        if self._options.read_only:
            raise ReadOnly(f"a read-only manager does not {what}")

    # -- guards -----------------------------------------------------------------------------

    @contextmanager
    def _open_for(self, what: str, drain: bool = False) -> Iterator[None]:
        """Serialises a call; refuses it on a closed manager and in a forked child.

        With `drain` it first waits for the saves in flight, without the lock: a hook of theirs may
        itself wait for another thread that uses this manager.
        """
        if self._is_forked_child():
            raise ManagerClosed(
                f"{what}: this manager belongs to process {self._pid}; "
                f"make one in process {os.getpid()} if it needs one"
            )
        if self._in_hook():
            yield  # the thread that holds the lock may be waiting for this very save
            return
        if drain:
            self._saves.drain()
        with self._lock:
            if self._closed:
                raise ManagerClosed(f"{what}: the manager of {self._store.root} is closed")
            yield

    def _is_forked_child(self) -> bool:
        return os.getpid() != self._pid

    def _in_hook(self) -> bool:
        return self._saves.in_hook()

    def _refuse_in_hook(self, what: str) -> None:
        if self._in_hook():
            raise NotAllowedHere(f"{what} is not allowed in a hook of the save it would wait for")
