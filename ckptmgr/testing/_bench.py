"""Where a check of the snapshot contract works: a directory, devices, and managers it can hold."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ckptmgr
from ckptmgr.engine.store import Store
from ckptmgr.testing import _trees
from ckptmgr.testing._trees import Kind, Leaves
from ckptmgr.testing.faults import Fault, FaultyStore, Hold, Operation
from ckptmgr.testing.outcome import Broken

SAVE_LIMIT = 60.0
"""Seconds that one save may take."""


@dataclass(frozen=True, slots=True)
class Bench:
    """What a check gets.

    Attributes:
      directory: its own, empty at first.
      mode: the snapshot mode under test.
      devices: those its arrays lie on.
      make_manager: `CheckpointManager`, or something called like it.
    """

    directory: str
    mode: Any
    devices: tuple[Any, ...]
    make_manager: Callable[..., Any] = ckptmgr.CheckpointManager

    @property
    def can_hold(self) -> bool:
        """Whether `save()` returns while the writer is held: not where it waits for the writer."""
        return bool(self.mode != "sync")

    @contextmanager
    def trial(
        self, held: Iterable[int] = (), failing: Collection[int] = (), **snapshot: Any
    ) -> Iterator[Trial]:
        """A manager in a directory of its own; in the end all held saves go on, and it is closed.

        Args:
          held: steps whose writers wait for `Trial.release`; none in a mode that cannot hold.
          failing: steps whose writing fails.
          snapshot: further fields of `ckptmgr.Snapshot`.
        """
        trial = Trial(self, held if self.can_hold else (), failing, snapshot)
        with trial.manager:
            try:
                yield trial
            finally:
                trial.release()


class Trial:
    """One manager under a check.

    Attributes:
      manager: the manager.
      slots: how many of its saves may be in flight.
      peak: the most that were, as seen at each change of the store.
    """

    def __init__(
        self, bench: Bench, held: Iterable[int], failing: Iterable[int], how: Mapping[str, Any]
    ) -> None:
        self.root = tempfile.mkdtemp(dir=bench.directory)
        self.peak = 0
        self.manager: Any = None
        self._holds = {step: Hold(_writes(step)) for step in held}
        faults = [Fault(_writes(step, "arrays")) for step in failing]
        plan: list[Fault | Hold] = [Hold(self._look), *self._holds.values(), *faults]
        snapshot = ckptmgr.Snapshot(mode=bench.mode, **how)
        options = ckptmgr.Options(
            snapshot=snapshot,
            heartbeat=None,
            storage=ckptmgr.Storage(durable=False),
            coordination=ckptmgr.Coordination(deadline_seconds=SAVE_LIMIT),
        )
        self.slots = snapshot.slots
        store = FaultyStore(Store(self.root, durable=False), plan)
        self.manager = bench.make_manager(self.root, options, store=store)

    def _look(self, operation: Operation) -> bool:
        if self.manager is not None:
            self.peak = max(self.peak, self.manager.saves_in_flight)
        return False

    def save(self, step: Any, tree: Any, **args: Any) -> Any:
        """Saves; raises Broken where the save is not accepted."""
        handle = self.manager.save(step, tree, **args)
        if not handle.accepted:
            raise Broken(f"step {step}: expected an accepted save, found {handle.reason!r}")
        return handle

    def start(self, call: Callable[[], Any]) -> Call:
        """Makes a call that may have to wait on a thread of its own."""
        return Call(call)

    def settle(self, until: int) -> None:
        """Waits for the saves up to this one, the newest so far, and for what they compile."""
        self.release(until)
        self.manager.wait()
        for thread in threading.enumerate():
            if thread.name == "ckptmgr-compile":
                thread.join(SAVE_LIMIT)

    def release(self, until: int | None = None) -> None:
        """Lets the held saves go on: those of steps up to this one, or all."""
        for step, hold in self._holds.items():
            if until is None or step <= until:
                hold.release()

    def expect_steps(self, *steps: int) -> None:
        """Raises Broken unless exactly these steps are there, once all saves are durable."""
        self.release()
        self.manager.wait()
        found = [info.step for info in self.manager.steps()]
        if found != sorted(steps):
            raise Broken(f"expected the steps {sorted(steps)}, found {found}")

    def expect(
        self, step: int, number: int, kinds: Iterable[Kind] = (), host: Leaves | None = None
    ) -> None:
        """Raises Broken unless `step` holds exactly these leaves, with the values of `number`."""
        by_name = {f"params.{kind.name}": kind for kind in kinds}
        wanted = {name: _trees.values(kind, number) for name, kind in by_name.items()}
        wanted |= {f"host.{name}": value for name, value in (host or {}).items()}
        restored = self.manager.restore(step=step)
        found = {
            f"{room}.{leaf}": value for room in restored for leaf, value in restored[room].items()
        }

        def other(name: str, n: int) -> Any:
            if name in by_name:
                return _trees.values(by_name[name], n)
            return _trees.Host(n).leaves[name.removeprefix("host.")]

        if problems := _trees.differences(found, wanted, other):
            raise Broken(f"step {step} should hold number {number}: " + "; ".join(problems))

    def expect_each(
        self, numbers: Iterable[int], kinds: Sequence[Kind] = (), with_host: bool = False
    ) -> None:
        """Raises Broken unless these steps are there, and each holds the values of its number."""
        self.expect_steps(*numbers)
        for number in numbers:
            self.expect(number, number, kinds, _trees.Host(number).leaves if with_host else None)
        if self.peak > self.slots:
            raise Broken(f"expected at most {self.slots} saves in flight, found {self.peak}")

    def files(self) -> list[str]:
        """Every file and directory below the root."""
        return sorted(
            os.path.join(where, name)
            for where, folders, files in os.walk(self.root)
            for name in [*folders, *files]
        )


class Call:
    """A call on a thread of its own.

    Attributes:
      returned: set when it is over.
    """

    def __init__(self, call: Callable[[], Any]) -> None:
        self.returned = threading.Event()
        self._call = call
        self._value: Any = None
        self._error: BaseException | None = None
        threading.Thread(target=self._run, name="snapshot-contract", daemon=True).start()

    def _run(self) -> None:
        try:
            self._value = self._call()
        except BaseException as exc:
            self._error = exc
        self.returned.set()

    def result(self, seconds: float) -> Any:
        """What it returned; raises what it raised, or Broken if it takes longer."""
        if not self.returned.wait(seconds):
            raise Broken(f"expected an end within {seconds:g} s, found it waiting still")
        if self._error is not None:
            raise self._error
        return self._value


def _writes(step: int, name: str = "") -> Callable[[Operation], bool]:
    """Whether an operation writes the data of `step`; without `name`, the first one that does."""

    def writes(operation: Operation) -> bool:
        return operation.path.startswith(f"{step}.") and name in ("", operation.name)

    return writes
