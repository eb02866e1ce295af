"""Preemption notices: SIGTERM, and JAX's own notice where its preemption service runs.

A notice concerns the process: every watch of it answers yes from then on, one started later too.
Who has the signal:

- No service: a handler of ours, one for all watches, from the first `start` to the last `stop`. It
  sets a flag and calls the Python handler that was there before; the default action is not taken.
  Python runs handlers in the main thread between two bytecodes, so a long call into native code
  delays the notice until it returns. Whoever installs a handler on top should call ours.
- The service (`jax.distributed.initialize`, unless `jax_enable_preemption_service` is off): its
  handler takes SIGTERM below Python, which does not see that: `signal.getsignal` answers as before,
  and no Python handler from before runs any more. Ours would take the notice from it, so JAX is
  asked instead. It looks for the signal once a second and names a step that is right for all
  processes of the job: the next one that none of them has asked for yet.

A watch older than the service hands over to it, and takes over if it is shut down, each at the
next `noticed`. A watch that is stopped in another thread than the main one, or dropped, cannot
give the handler back at once: it does so by itself at the next signal, which then acts as if it had
never been there. A forked child begins without watches, notice and handler of ours.

Not guaranteed:

- With the service, a Python handler that somebody installs later takes the notice from JAX, unseen
  by us; and a signal in the very moments of a shutdown may reach nobody.
- Several processes: without the service each knows of its own signal only. With it, every process
  asks for the same steps, in the same order, at each step; a notice while they go back to an
  earlier one may be told at different steps. While JAX agrees on the step, `noticed` waits in
  native code, with the interpreter's lock: milliseconds, or up to three minutes if a process hangs.
- A previous handler that did not come from Python is neither called nor put back.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import jax
from jax.experimental import multihost_utils

from ckptmgr.errors import InvalidOption

_Previous = Callable[[int, FrameType | None], Any] | int | None

_STEPS = 2**31 - 1
"""JAX takes a step as a C int, so larger ones begin at 0 again."""

_ASK_ALL = 1000
"""How many steps that were left out are asked for one by one."""


class PreemptionWatch:
    """Whether this process was told that it will be preempted."""

    def __init__(self) -> None:
        self._part_of: _Process | None = None

    def start(self) -> None:
        """Takes part in notices; again is fine.

        Raises InvalidOption where a handler is needed and this is not the main thread.
        """
        process = _process
        with process.lock:
            if self._part_of is process:
                return
            process.watches.add(self)
            try:
                if _ask_jax(process.step) is None:
                    process.install()
            except BaseException:
                process.watches.discard(self)
                raise
            self._part_of = process

    def noticed(self, step: int) -> bool:
        """Whether a notice arrived; True from then on. Does not raise.

        A watch that takes part asks JAX, where its service runs, so it has to be called at every
        step, by all processes alike; again for the same step is fine.
        """
        process = _process
        if self._part_of is process and not process.noticed:
            with process.lock:
                process.look(step % _STEPS)
        return process.noticed

    @property
    def is_agreed(self) -> bool:
        """Whether JAX tells all processes of a job alike; else each knows of its own signal."""
        return not _process.has_signal

    def stop(self) -> None:
        """Takes no part any more; the last one puts the previous handler back. Again is fine."""
        process = _process
        with process.lock:
            if self._part_of is not process:
                return
            self._part_of = None
            process.watches.discard(self)
            if not process.watches and process.has_signal and _ask_jax(process.step) is None:
                process.has_signal = False
                _give_back()


class _Process:
    """What all watches of this process share.

    Attributes:
      lock: for everything but the handler, which must wait for nobody. The main thread may be
        interrupted by a handler of the user that comes here, so it can be taken again.
      watches: those that take part.
      noticed: whether a notice arrived.
      has_signal: whether SIGTERM reaches a handler of ours, as far as we know.
      step: the last one that JAX was asked for; JAX counts from 0.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.watches: weakref.WeakSet[PreemptionWatch] = weakref.WeakSet()
        self.noticed = False
        self.has_signal = False
        self.step = 0

    def install(self) -> None:
        """Makes a handler of ours the one that Python calls."""
        current = _installed()
        handler = current if isinstance(current, _Handler) else _Handler(current)
        try:
            signal.signal(signal.SIGTERM, handler)
        except ValueError as exc:
            raise InvalidOption(
                "Schedule(on_preemption=True) handles SIGTERM, which Python allows in the main "
                "thread of the main interpreter only: make the manager there, or leave "
                "on_preemption off"
            ) from exc
        self.has_signal = True

    def look(self, step: int) -> None:
        """Asks JAX, or sees to it that SIGTERM reaches us."""
        for asked in _to_ask(self.step, step):
            reached = _ask_jax(asked)
            if reached is None:
                self._keep_signal()
                return
            self.has_signal = False
            self.step = asked
            if reached:
                self.noticed = True
                return

    def _keep_signal(self) -> None:
        if not self.has_signal:  # the service was shut down, but its handler is still there
            with contextlib.suppress(InvalidOption):  # not in this thread
                self.install()


class _Handler:
    """The handler of SIGTERM. Each has the one that it replaced for good, so that it stays harmless
    wherever it is kept and whoever puts it back."""

    def __init__(self, previous: _Previous) -> None:
        self.previous = previous if previous is not None else signal.SIG_DFL

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if _process.watches:
            _process.noticed = True
        elif _installed() is self:  # left behind
            signal.signal(number, self.previous)
            signal.raise_signal(number)
            return
        if callable(self.previous):
            self.previous(number, frame)


def _installed() -> Any:
    return signal.getsignal(signal.SIGTERM)


def _give_back() -> None:
    """Puts the previous handler back, unless somebody has installed another on top of ours."""
    current = _installed()
    if isinstance(current, _Handler):
        with contextlib.suppress(ValueError):  # not in this thread; at the next signal, then
            signal.signal(signal.SIGTERM, current.previous)


def _to_ask(last: int, step: int) -> Iterable[int]:
    """The steps to ask JAX for at `step`, when `last` was asked for before.

    Its answer is yes at one step alone, the one after the last that anybody had asked for when the
    notice came. So that one is never left out, wherever the caller goes.
    """
    if last < step <= last + _ASK_ALL:
        return range(last + 1, step + 1)
    if last == step:
        return (step,)
    return (last + 1, step)


def _ask_jax(step: int) -> bool | None:
    """Whether JAX wants `step` saved for a preemption; None where its service does not run."""
    if not jax.distributed.is_initialized():
        return None
    try:
        return bool(multihost_utils.reached_preemption_sync_point(step))
    except RuntimeError:
        return None


_process = _Process()


def _in_forked_child() -> None:
    """The child was told of nothing, and what ends it is its own affair."""
    global _process
    _process = _Process()
    _give_back()


os.register_at_fork(after_in_child=_in_forked_child)
