"""The job that an advice is for, in numbers, each with where it comes from."""

from __future__ import annotations

import numbers
from dataclasses import dataclass
from typing import Any

from ckptmgr.core import advice
from ckptmgr.core.advice import positive
from ckptmgr.core.figures import Figure, bytes_of, count, nbytes, number, seconds
from ckptmgr.errors import InvalidOption

DAY = 86400.0

FAILURES_PER_ACCELERATOR_DAY = 419 / (54 * 16384)
"""419 unexpected interruptions in 54 days on 16,384 H100 GPUs: A. Dubey and others, The Llama 3
Herd of Models, arXiv:2407.21783, 2024, section 3.3.4."""
BYTES_PER_PARAM = 14.0
"""Adam in mixed precision: bfloat16 weights 2, float32 master weights 4, both moments 4 each."""
ORDERING_SECONDS = 0.15
"""Ordering the copies of a save: the slowest that `docs/DESIGN.md` section 5 has for 1 GiB."""
DEVICE_BYTES_PER_SECOND = 25e9
"""Device to host, for each accelerator: about what a PCIe 4.0 link of 16 lanes carries."""
FLUSH_ROOM = 1.5
"""An interval is at least so many times the flush, since some flushes take longer than others."""
ACCELERATORS_PER_HOST = 8
MOST = 10**9
SMALL, LARGE = 64, 512
"""Fewer than 64 accelerators, up to 512, and more: what `configs/` calls small, medium, large."""

JOBS = ("training", "llm", "rl")
COPIES = {"sync": 0, "copy_on_write": 1, "double_buffer": 2}
"""How many copies of the state lie in host memory, by mode."""


def checked(asked: Any) -> Any:
    """The arguments, each found to be usable."""
    for name in ("accelerators", "hosts", "keep_last", "heartbeat_every_saves"):
        value = getattr(asked, name)
        if value is None and name != "accelerators":
            continue
        whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
        if not whole or not 1 <= value <= MOST:
            raise InvalidOption(f"{name} must be a whole number from 1 to {MOST:,}, got {value!r}")
    for name in ("bytes_per_param", "failures_per_accelerator_day", "run_days"):
        positive(name, getattr(asked, name))
    for name in _POSITIVE:
        if getattr(asked, name) is not None:
            positive(name, getattr(asked, name))
    for name in ("detect_and_restart_seconds", "undetected_seconds"):
        positive(name, getattr(asked, name), zero=True)
    if asked.stall_seconds is not None:
        positive("stall_seconds", asked.stall_seconds, zero=True)
    for name, allowed in (("mode", (None, *COPIES)), ("job", JOBS)):
        if getattr(asked, name) not in allowed:
            names = ", ".join(repr(each) for each in allowed)
            raise InvalidOption(f"{name} must be one of {names}; got {getattr(asked, name)!r}")
    sizes = (asked.params, asked.state_bytes, asked.state)
    if sum(size is not None for size in sizes) != 1:
        raise InvalidOption("the size needs one of params, state_bytes and state, and only one")
    if asked.flush_seconds is None and asked.write_bytes_per_second is None:
        raise InvalidOption(
            "the time of a save needs write_bytes_per_second, or a measured flush_seconds"
        )
    return asked


_POSITIVE = (
    *("params", "state_bytes", "step_seconds", "write_bytes_per_second", "flush_seconds"),
    *("read_bytes_per_second", "restore_seconds", "mean_seconds_between_failures"),
    *("interval_seconds", "keep_every_seconds"),
)


@dataclass(frozen=True, slots=True)
class Facts:
    """The job in numbers; all times in seconds.

    Attributes:
      stall: what an ordinary save stops training.
      heartbeat: what heartbeats add to that, spread over all saves.
      recovery: from a failure until training goes on.
      figures: these, with where they come from.
    """

    asked: Any
    mode: str
    size: float
    flush: float
    stall: float
    heartbeat: float
    recovery: float
    mtbf: float
    figures: tuple[Figure, ...]

    @property
    def cost(self) -> float:
        return self.stall + self.heartbeat

    def goodput(self, interval: float) -> float:
        return advice.goodput(interval, self.cost, self.flush, self.recovery, self.mtbf)


def facts_of(asked: Any) -> Facts:
    mode = asked.mode or suitable(asked)[0]
    size, size_why = _size(asked)
    flush, flush_why = _flush(asked, size)
    read, read_why = _read(asked, size, flush)
    stall, stall_why = _stall(asked, mode, size, flush)
    heartbeat, heartbeat_why = _heartbeat(asked, flush, read, stall)
    recovery = asked.detect_and_restart_seconds + read
    mtbf, mtbf_why = _mtbf(asked)
    rows = (
        ("state", size, "bytes", size_why),
        ("flush", flush, "seconds", flush_why),
        ("stall", stall, "seconds", stall_why),
        ("heartbeat", heartbeat, "seconds", heartbeat_why),
        ("time between failures", mtbf, "seconds", mtbf_why),
        (
            "recovery",
            recovery,
            "seconds",
            f"from a failure until training goes on: {seconds(asked.detect_and_restart_seconds)} to "
            f"notice it and start again, {seconds(read)} to read{read_why}.",
        ),
    )
    figures = tuple(Figure("The job", *row) for row in rows)
    return Facts(asked, mode, size, flush, stall, heartbeat, recovery, mtbf, figures)


def _size(asked: Any) -> tuple[float, str]:
    if asked.state_bytes is not None:
        return float(asked.state_bytes), "as given."
    if asked.state is not None:
        size = bytes_of(asked.state)
        if not size:
            raise InvalidOption("state holds no array, so there is nothing to save")
        return float(size), "the bytes of all arrays of the state."
    each = f"{count(asked.params)} parameters of {number(asked.bytes_per_param)} bytes"
    if asked.bytes_per_param == BYTES_PER_PARAM:
        each += ": Adam in mixed precision, weights 2 and master weights 4, both moments 4 each"
    return float(asked.params * asked.bytes_per_param), f"{each}."


def _flush(asked: Any, size: float) -> tuple[float, str]:
    if asked.flush_seconds is not None:
        return float(asked.flush_seconds), "from save() to durable, as given."
    rate = asked.write_bytes_per_second
    return size / rate, f"from save() to durable: {nbytes(size)} at {nbytes(rate)}/s."


def _read(asked: Any, size: float, flush: float) -> tuple[float, str]:
    if asked.restore_seconds is not None:
        return float(asked.restore_seconds), ""
    if asked.read_bytes_per_second is not None:
        rate = asked.read_bytes_per_second
        return size / rate, f" {nbytes(size)} at {nbytes(rate)}/s"
    return flush, ", taken to be as fast as writing"


def _stall(asked: Any, mode: str, size: float, flush: float) -> tuple[float, str]:
    if asked.stall_seconds is not None:
        return float(asked.stall_seconds), "what a save stops training, as given."
    if mode == "sync":
        return flush, "what a save stops training: all of it, since it is synchronous."
    copies = size / asked.accelerators / DEVICE_BYTES_PER_SECOND
    return ORDERING_SECONDS + copies, (
        f"what a save stops training: {ORDERING_SECONDS:g} s to order the copies, and {number(copies)} "
        f"s until the next step may overwrite what is copied, {nbytes(size / asked.accelerators)} an "
        f"accelerator at {nbytes(DEVICE_BYTES_PER_SECOND)}/s; both assumed, a run's stall tells more."
    )


def _heartbeat(asked: Any, flush: float, read: float, stall: float) -> tuple[float, str]:
    every = asked.heartbeat_every_saves
    if every is None:
        return 0.0, "there are no heartbeats."
    more = max(0.0, flush + read - stall)
    return more / every, (
        f"what heartbeats add to the stall of each save: every {number(every)} saves, {seconds(more)} "
        "more to wait until it is written and read back."
    )


def _mtbf(asked: Any) -> tuple[float, str]:
    if asked.mean_seconds_between_failures is not None:
        return float(asked.mean_seconds_between_failures), "of the whole job, as given."
    rate = asked.failures_per_accelerator_day
    source = "as given"
    if rate == FAILURES_PER_ACCELERATOR_DAY:
        source = "419 in 54 days on 16,384 GPUs: The Llama 3 Herd of Models, 2024, 3.3.4"
    mtbf = positive("the time between failures that follows", DAY / (asked.accelerators * rate))
    return mtbf, (
        f"of the whole job: {number(asked.accelerators)} accelerators with {number(rate * 1000)} "
        f"failures a day per thousand ({source})."
    )


def suitable(asked: Any) -> tuple[str, str, str]:
    """Mode, file in configs/, and why."""
    many = asked.accelerators
    if asked.job == "llm":
        return "double_buffer", "llm", "pre-training of a language model: throughput goes first"
    if asked.job == "rl":
        mode = "sync" if many < SMALL else "copy_on_write"
        return mode, "rl", "every policy version exactly, and none left out"
    if many < SMALL:
        return "sync", "small", f"fewer than {SMALL} accelerators: nothing is simpler"
    if many <= LARGE:
        why = f"{SMALL} to {LARGE} accelerators: save() only orders the copies"
        return "copy_on_write", "medium", why
    why = f"more than {LARGE} accelerators: two saves in flight, and a heartbeat now and then"
    return "double_buffer", "large", why
