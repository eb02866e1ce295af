"""A store whose operations fail, stop halfway, or wait, when told to.

    store = FaultyStore(Store(root), [Fault(3)])              # the third change fails once
    store = FaultyStore(Store(root), [Fault("rename", effect="full")])
    with ckptmgr.CheckpointManager(root, store=store) as manager: ...

Only operations that change something count, from 1: see `CHANGES`. `arrays` stands for one wave
of array data, which TensorStore writes by itself. The manager's own thread and the thread of a
save share one count.
"""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from ckptmgr.engine.store import Store
from ckptmgr.errors import StoreError

CHANGES = (
    "make_dir",
    "write_file",
    "put_file",
    "rename",
    "exchange",
    "remove_file",
    "remove_tree",
    "arrays",
    "sync_tree",
    "sync_path",
)
"""The operations that are counted; every other one goes to the inner store as it is."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One change that was asked for.

    Attributes:
      number: its place since the store was armed, from 1.
      name: one of `CHANGES`.
      path: what it concerns, relative to the root; of two paths the first.
      target: of two paths the second, else "".
    """

    number: int
    name: str
    path: str
    target: str = ""


Where = int | str | Callable[[Operation], bool]
"""An operation by its number, by its name (the first one), or by a test of it."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One way to go wrong.

    Attributes:
      where: the operation that it hits.
      effect: what of the operation takes effect before: "none", "half" (of the bytes of a
        write_file; of anything else nothing), or "full".
      then: "fail" raises StoreError; "die" kills this process on the spot.
      for_good: every later operation fails too, without effect.
      error: the errno to fail with.
    """

    where: Where
    effect: Literal["none", "half", "full"] = "none"
    then: Literal["fail", "die"] = "fail"
    for_good: bool = False
    error: int = errno.EIO


class Hold:
    """Makes one operation wait, so that a test can look at a save in flight.

    Attributes:
      reached: set when the operation has come, and waits.
    """

    def __init__(self, where: Where) -> None:
        self.where = where
        self.reached = threading.Event()
        self._open = threading.Event()

    def release(self) -> None:
        """Lets the operation go on; one that has not come yet will not wait."""
        self._open.set()

    def pass_through(self) -> None:
        self.reached.set()
        self._open.wait()


class FaultyStore(Store):
    """`inner`, with faults.

    Attributes:
      operations: what was asked for since the store was armed, failed operations included.
    """

    def __init__(self, inner: Store, plan: Iterable[Fault | Hold] = ()) -> None:
        self.inner = inner
        self.root = inner.root
        self.durable = inner.durable
        self._lock = threading.Lock()
        self.arm(*plan)

    def arm(self, *plan: Fault | Hold) -> None:
        """Starts anew: counts from 1, with these faults and no others."""
        with self._lock:
            self.operations: list[Operation] = []
            self._waiting = list(plan)
            self._broken: Fault | None = None

    def _next(self, name: str, args: tuple[Any, ...]) -> tuple[Operation, list[Fault | Hold]]:
        """Counts an operation; gives what hits it."""
        target = args[1] if name in ("rename", "exchange") else ""
        with self._lock:
            operation = Operation(len(self.operations) + 1, name, args[0], target)
            self.operations.append(operation)
            if self._broken is not None:
                return operation, [Fault(operation.number, error=self._broken.error)]
            hits = [item for item in self._waiting if _hits(item.where, operation)]
            self._waiting = [item for item in self._waiting if item not in hits]
            for item in hits:
                if isinstance(item, Fault) and item.for_good:
                    self._broken = item
            return operation, hits

    def _do(self, name: str, *args: Any) -> Any:
        operation, hits = self._next(name, args)
        act = getattr(self.inner, name)
        for item in hits:
            if isinstance(item, Hold):
                item.pass_through()
                continue
            if item.effect == "full":
                act(*args)
            elif item.effect == "half" and name == "write_file":
                act(args[0], args[1][: len(args[1]) // 2])
            if item.then == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            raise self._error(operation, item)
        return act(*args)

    def _error(self, operation: Operation, fault: Fault) -> StoreError:
        cause = OSError(fault.error, os.strerror(fault.error), self.path(operation.path))
        error = StoreError(
            f"{operation.name} {self.path(operation.path)}: {cause.strerror} (by a test)",
            unknown=fault.effect == "full",
        )
        error.errno = fault.error
        error.__cause__ = cause
        return error

    # -- changes ----------------------------------------------------------------------------

    def make_dir(self, name: str) -> None:
        self._do("make_dir", name)

    def write_file(self, name: str, data: bytes) -> None:
        self._do("write_file", name, data)

    def put_file(self, name: str, data: bytes) -> None:
        self._do("put_file", name, data)

    def rename(self, old: str, new: str) -> bool:
        return bool(self._do("rename", old, new))

    def exchange(self, a: str, b: str) -> bool:
        return bool(self._do("exchange", a, b))

    def remove_file(self, name: str) -> None:
        self._do("remove_file", name)

    def remove_tree(self, name: str) -> None:
        self._do("remove_tree", name)

    def arrays(self, name: str) -> str:
        return str(self._do("arrays", name))

    def sync_tree(
        self, name: str, skip: Callable[[str], bool] = lambda path: False
    ) -> dict[str, int]:
        found: dict[str, int] = self._do("sync_tree", name, skip)
        return found

    def sync_path(self, name: str) -> None:
        self._do("sync_path", name)

    # -- everything else --------------------------------------------------------------------

    def path(self, name: str) -> str:
        return self.inner.path(name)

    def read_file(self, name: str) -> bytes:
        return self.inner.read_file(name)

    def names(self, name: str = "") -> list[str]:
        return self.inner.names(name)

    def is_dir(self, name: str) -> bool:
        return self.inner.is_dir(name)

    def exists(self, name: str) -> bool:
        return self.inner.exists(name)

    def sizes(self, name: str, skip: Callable[[str], bool] = lambda path: False) -> dict[str, int]:
        return self.inner.sizes(name, skip)

    def appears(self, name: str, seconds: float) -> bool:
        return self.inner.appears(name, seconds)

    def check_usable(self, create: bool) -> None:
        self.inner.check_usable(create)


def _hits(where: Where, operation: Operation) -> bool:
    if isinstance(where, int):
        return operation.number == where
    if isinstance(where, str):
        return operation.name == where
    return where(operation)
