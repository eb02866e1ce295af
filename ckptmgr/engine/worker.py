"""Saves in the background: the handle, the thread, and what happens at exit.

Each save in flight has one thread, named after its step, which ends with the save. A manager may
be dropped or never closed: the handles, not the managers, are what the interpreter waits for.

At exit: saves in flight are waited for, with a line now and then, up to a deadline. A failure
that nobody was told of ends the process with a last line on stderr and status 1. Exceptions in
exit handlers do not change the status; so once everything else has run and was flushed, when the
interpreter takes its modules apart, `os._exit` is called.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable

from ckptmgr.core.info import StepInfo
from ckptmgr.errors import ManagerClosed, SaveFailed

logger = logging.getLogger("ckptmgr")

_TELL_EVERY_SECONDS = 10.0


class SaveHandle:
    """One call of `save()`.

    Attributes:
      step: its step.
      accepted: False where the schedule or a busy snapshot said no; `reason` says why.
      reason: "" for an accepted save.
      waited: seconds that save() spent waiting for saves in flight and for host memory.
      stall: seconds that save() took besides, None until it returns.
      flush: seconds from the call of save() until the step was durable.
    """

    def __init__(self, step: int, accepted: bool = True, reason: str = "") -> None:
        self.step = step
        self.accepted = accepted
        self.reason = reason
        self.waited = 0.0
        self.stall: float | None = None
        self.flush = 0.0
        self._staged = threading.Event()
        self._settled = threading.Event()  # durable, or failed
        self._done = threading.Event()  # nothing of the save is left to do
        self._info: StepInfo | None = None
        self._error: SaveFailed | None = None
        self._told = False
        self.thread: threading.Thread | None = None
        self.warn_only = False  # a failure that nobody asked for is no reason to fail the process
        self._pid = os.getpid()
        if not accepted:
            self._staged.set()
            self._settled.set()
            self._done.set()

    def __repr__(self) -> str:
        state = "durable" if self._info else "failed" if self._error else "in flight"
        if not self.accepted:
            state = f"not accepted: {self.reason}"
        return f"SaveHandle(step={self.step}, {state})"

    @property
    def done(self) -> bool:
        """Whether the save has ended: durable or failed, retention and the user's hook run."""
        return self._done.is_set()

    @property
    def settled(self) -> bool:
        """Whether the step is durable, or the save failed: its values are no longer held."""
        return self._settled.is_set()

    def wait_settled(self) -> None:
        """Waits until `settled`; raises nothing."""
        self._settled.wait()

    def join(self, timeout: float | None = None) -> bool:
        """Waits until `done`; raises nothing, returns whether it is."""
        return self._done.wait(timeout)

    def staged(self, timeout: float | None = None) -> None:
        """Waits until the values are on the host. Raises what went wrong, or TimeoutError."""
        self._wait(self._staged, timeout, "is not on the host")
        if self._error is not None:
            self._raise()

    def result(self, timeout: float | None = None) -> StepInfo | None:
        """Waits until the step is durable and returns its info; None if it was not accepted.

        Raises SaveFailed (the cause chained), or TimeoutError after `timeout` seconds.
        """
        self._wait(self._settled, timeout, "is not durable")
        if self._error is not None:
            self._raise()
        return self._info

    def _wait(self, event: threading.Event, timeout: float | None, what: str) -> None:
        if not event.is_set() and threading.current_thread() is self.thread:
            raise RuntimeError(f"step {self.step}: a hook cannot wait for the save that calls it")
        if os.getpid() != self._pid and not event.is_set():
            raise ManagerClosed(
                f"the save of step {self.step} belongs to process {self._pid}, not to this fork"
            )
        if not event.wait(timeout):
            raise TimeoutError(f"the save of step {self.step} {what} after {timeout} s")

    def _raise(self) -> None:
        assert self._error is not None
        self._told = True
        raise self._error

    def failure(self) -> SaveFailed | None:
        """The failure that nobody was told of yet; asking does not tell."""
        return None if self._told or not self._settled.is_set() else self._error

    def take_failure(self) -> SaveFailed | None:
        """The failure that nobody was told of yet, given once."""
        error = self.failure()
        self._told = self._told or error is not None
        return error

    def _is_over(self) -> bool:
        """Whether nothing of it is left: thread ended, failure told."""
        alive = self.thread is not None and self.thread.is_alive()
        return self.done and not alive and self.failure() is None

    def _mark_staged(self) -> None:
        self._staged.set()

    def _mark_durable(self, info: StepInfo) -> None:
        self._info = info
        self._settled.set()

    def _finish(self, error: SaveFailed | None) -> None:
        if error is not None:
            self._error = error
        self._staged.set()
        self._settled.set()
        self._done.set()


class SaveThread:
    """The thread of one save. It is started before the copies are ordered, while the cores are
    idle, and given its work after; without work it ends.

    Where no thread can be started, as while the interpreter exits (Python 3.12 and later), the work
    is done where it is given.
    """

    def __init__(self, handle: SaveHandle, deadline_seconds: float) -> None:
        self._handle = handle
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        name = f"ckptmgr-save-{handle.step}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        _registry.add(handle, deadline_seconds)
        try:
            self._thread.start()
            handle.thread = self._thread
        except RuntimeError as exc:
            logger.warning("step %d is saved before save() returns: %s", handle.step, exc)
            handle.thread = threading.current_thread()
        except BaseException:  # an interrupt, after which the thread may be there or not
            self.cancel()
            raise

    def give(self, work: Callable[[], None]) -> None:
        """Runs `work`, which marks the handle on its way; its outcome settles the handle."""
        self._work.put(work)
        del work
        if self._handle.thread is not self._thread:
            self._run()
            self._handle.thread = None  # this thread has done with it

    def join(self) -> None:
        """Waits until the thread has ended."""
        if self._handle.thread is self._thread:
            self._thread.join()

    def cancel(self) -> None:
        """There will be no work: the call that made this thread failed and says so itself."""
        self._work.put(None)
        self._handle._finish(None)
        _registry.discard(self._handle)

    def _run(self) -> None:
        work = self._work.get()
        error: SaveFailed | None = None
        try:
            if work is not None:
                work()
        except BaseException as exc:
            error = SaveFailed(self._handle.step, exc)
            error.__cause__ = exc
        work = None  # drops the arrays before anyone is told that the save has ended
        self._handle._finish(error)


class _Registry:
    """Handles that the interpreter must not leave behind."""

    def __init__(self) -> None:
        self._handles: dict[SaveHandle, float] = {}
        self._lock = threading.Lock()
        self.exiting = False

    def add(self, handle: SaveHandle, deadline_seconds: float) -> None:
        with self._lock:
            for old in [h for h in self._handles if h._is_over()]:
                del self._handles[old]
            self._handles[handle] = deadline_seconds
        if exiting():
            return  # exit handlers run: one that is registered now might never
        # the last handler registered runs first: before what JAX tears down
        atexit.unregister(_at_exit)
        atexit.register(_at_exit)

    def discard(self, handle: SaveHandle) -> None:
        with self._lock:
            self._handles.pop(handle, None)

    def items(self) -> list[tuple[SaveHandle, float]]:
        with self._lock:
            return list(self._handles.items())


_registry = _Registry()


def exiting() -> bool:
    """Whether exit handlers run: nobody may wait any more for a save that starts now."""
    return _registry.exiting or not threading.main_thread().is_alive()


def _in_forked_child() -> None:
    """The child saves, closes and flushes nothing of its parent."""
    global _registry
    _registry = _Registry()
    atexit.unregister(_at_exit)


os.register_at_fork(after_in_child=_in_forked_child)


def _at_exit() -> None:
    _registry.exiting = True
    lost = []
    for handle, deadline_seconds in _registry.items():
        until = time.monotonic() + deadline_seconds
        while not handle.done and time.monotonic() < until:
            wait = min(_TELL_EVERY_SECONDS, until - time.monotonic())
            if not handle.join(max(0.0, wait)) and time.monotonic() < until:
                print(f"ckptmgr: waiting for the save of step {handle.step}", file=sys.stderr)
        if not handle.done:
            lost.append(f"step {handle.step} was not saved within {deadline_seconds:g} s at exit")
            continue
        if handle.thread is not None and handle.thread is not threading.current_thread():
            # a thread that still drops arrays when the interpreter goes would abort the process
            handle.thread.join(max(0.0, until - time.monotonic()))
        if (error := handle.take_failure()) is not None:
            if handle.warn_only:
                logger.warning("%s", error)
            else:
                lost.append(str(error))
    if lost:
        # the module `sys` is taken apart last, after the user's own objects
        sys._ckptmgr_last_word = _LastWord("; ".join(lost))  # type: ignore[attr-defined]


class _LastWord:
    """Ends the process when the interpreter drops its modules, after all other exit handlers."""

    def __init__(self, text: str) -> None:
        self._line = f"\nckptmgr: CHECKPOINT LOST: {text}\n".encode(errors="replace")

    def __del__(
        self,
        write: Callable[[int, bytes], int] = os.write,
        leave: Callable[[int], None] = os._exit,
    ) -> None:
        write(2, self._line)
        leave(1)
