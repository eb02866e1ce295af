"""What a user can set, as small frozen values. Each checks itself when it is made."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Literal

import ml_dtypes  # noqa: F401  registers bfloat16 and friends with numpy
import numpy as np

from ckptmgr.core.advice import Adaptive
from ckptmgr.core.compression import AUTO, CODECS
from ckptmgr.core.retention import KeepAll, Policy
from ckptmgr.errors import InvalidOption


def _positive_int(name: str, value: Any, *, optional: bool = False) -> None:
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        extra = " or None" if optional else ""
        raise InvalidOption(f"{name} must be a whole number of at least 1{extra}, got {value!r}")


def _positive_number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise InvalidOption(f"{name} must be positive, got {value!r}")


def _collection(name: str, value: Any) -> Collection[Any]:
    if isinstance(value, str) or not isinstance(value, Collection):
        raise InvalidOption(f"{name} must be a tuple or another collection, got {value!r}")
    return value


def _one_of(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if value not in allowed:
        choices = ", ".join(repr(choice) for choice in allowed)
        raise InvalidOption(f"{name} must be one of {choices}; got {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Which steps `should_save` accepts; `save(force=True)` passes it by.

    Attributes:
      every_steps: steps that are a multiple of this number; None: no step by this rule. Where it
        is not given: every step, or none where one of the rules by the clock is.
      at_steps: further steps, by number.
      every_seconds: besides, the first step that is asked for so long after the last save was
        accepted, or after the manager was made; process 0's clock decides for all processes.
      continuous_seconds: besides, the first step that is asked for when no save is in flight, but
        not sooner than so long after the last was accepted; 0: at once.
      adaptive: besides, as `every_seconds`, at an interval that is worked out from what saves stop
        training for and how often it fails; the event "adapt" says when it changes, and why.
      on_preemption: watch for SIGTERM, and for JAX's preemption notice where its coordination
        service runs; the next step is then saved whatever the rules above say, synchronously and
        as `kind: preemption`. See `CheckpointManager.preempted`.
    """

    every_steps: int | Literal["not given"] | None = "not given"
    at_steps: Collection[int] = ()
    on_preemption: bool = False
    every_seconds: float | None = None
    continuous_seconds: float | None = None
    adaptive: Adaptive | None = None

    def __post_init__(self) -> None:
        if self.every_steps == "not given":
            clock = (self.every_seconds, self.continuous_seconds, self.adaptive)
            by_clock = any(rule is not None for rule in clock)
            object.__setattr__(self, "every_steps", None if by_clock else 1)
        _positive_int("Schedule.every_steps", self.every_steps, optional=True)
        if self.every_seconds is not None:
            _positive_number("Schedule.every_seconds", self.every_seconds)
        if self.continuous_seconds not in (None, 0):
            _positive_number("Schedule.continuous_seconds", self.continuous_seconds)
        if self.adaptive is not None and not isinstance(self.adaptive, Adaptive):
            raise InvalidOption(f"Schedule.adaptive must be an Adaptive, got {self.adaptive!r}")
        steps = _collection("Schedule.at_steps", self.at_steps)
        if any(isinstance(s, bool) or not isinstance(s, (int, np.integer)) or s < 0 for s in steps):
            raise InvalidOption(f"Schedule.at_steps must hold step numbers, got {self.at_steps!r}")
        object.__setattr__(self, "at_steps", frozenset(int(step) for step in steps))


IN_FLIGHT = {"sync": 1, "copy_on_write": 1, "double_buffer": 2}
"""How many saves may be in flight at a time, by mode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """How the values of a call reach the host, see `ckptmgr.engine.snapshot`.

    Attributes:
      mode: "copy_on_write" orders the copies and returns; host memory is taken for each save and
        given back. "double_buffer" does the same into host memory that is allocated once and used
        again in turns. "sync" returns when the step is durable.
      when_busy: with `in_flight` saves in flight, "wait" for the oldest or "skip" this one.
      in_flight: how many saves may be in flight; None: 2 for double_buffer, else 1. Each holds a
        copy of the tree on the host until it is written.
      host_bytes: host memory that snapshots may hold, all saves in flight together; None: no
        bound. What does not fit is copied in waves as earlier ones are written, and `save()`
        returns when the last is ordered.
      strict: refuse, instead of doing with one warning, what goes against the words above: a
        shard larger than `host_bytes`, or a backend that cannot do the mode.
    """

    mode: Literal["copy_on_write", "double_buffer", "sync"] = "copy_on_write"
    when_busy: Literal["wait", "skip"] = "wait"
    in_flight: int | None = None
    host_bytes: int | None = None
    strict: bool = False

    @property
    def slots(self) -> int:
        """How many saves may be in flight."""
        return self.in_flight or IN_FLIGHT[self.mode]

    def __post_init__(self) -> None:
        _one_of("Snapshot.mode", self.mode, tuple(IN_FLIGHT))
        _one_of("Snapshot.when_busy", self.when_busy, ("wait", "skip"))
        _positive_int("Snapshot.in_flight", self.in_flight, optional=True)
        _positive_int("Snapshot.host_bytes", self.host_bytes, optional=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """Every Nth accepted save is a heartbeat: synchronous, complete, and read back from storage.

    Attributes:
      every_saves: N; 1 makes every save one.
      audit: compare the asynchronous staging path with a direct read of the same arrays. Where
        they differ the save fails, naming the leaf, and the asynchronous saves since the last
        heartbeat become `suspect`.
    """

    every_saves: int = 100
    audit: bool = True

    def __post_init__(self) -> None:
        if self.every_saves == 0:
            raise InvalidOption(
                "Heartbeat.every_saves must be at least 1, got 0; "
                "Options(heartbeat=None) saves without heartbeats"
            )
        _positive_int("Heartbeat.every_saves", self.every_saves)


@dataclass(frozen=True, slots=True)
class LeafRule:
    """Storage settings for the leaves whose dotted name matches `pattern`.

    Attributes:
      pattern: shell pattern over the dotted leaf name, `"params.*.kernel"`; the first rule that
        matches a leaf is the one that counts.
      exclude: leave these leaves out of the checkpoint.
      cast: store floating-point leaves in this dtype, e.g. "bfloat16".
      chunk_bytes: overrides `Storage.chunk_bytes`.
    """

    pattern: str
    exclude: bool = False
    cast: str | None = None
    chunk_bytes: int | None = None

    def matches(self, name: str) -> bool:
        return fnmatch.fnmatchcase(name, self.pattern)

    def __post_init__(self) -> None:
        if not isinstance(self.pattern, str):
            raise InvalidOption(f"LeafRule.pattern must be text, got {self.pattern!r}")
        try:
            if self.cast is not None and not np.issubdtype(np.dtype(self.cast), np.generic):
                raise TypeError
        except TypeError as exc:
            raise InvalidOption(f"LeafRule.cast: there is no dtype {self.cast!r}") from exc
        _positive_int("LeafRule.chunk_bytes", self.chunk_bytes, optional=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """What is written.

    Attributes:
      driver: TensorStore driver, "zarr" (version 2) or "zarr3".
      compression: None; "blosc_bitshuffle" (float32 weights become a seventh smaller, bfloat16 a
        quarter), "blosc" (bytes shuffled instead of bits) or "zstd" (for plain bytes). Restores
        take longer with any of them, except from slow disks. "auto" stores the first save plainly,
        measures disk and values in the background when it is durable, and takes for all later
        saves what makes them the shortest, if that is by a tenth; the event "compression" says
        what, and why.
      chunk_bytes: about how many bytes of a large leaf go into one chunk; None: an eighth of a
        device's shard, 2 to 16 MiB, so that a mesh that is finer along the first axis reads no
        more than it needs while a device's part is 2 MiB or more.
      durable: sync files and directories to the device before a step counts as saved. Without it
        a crash of the machine (not of the process) can lose or damage the newest steps.
      leaf_options: rules by leaf name, first match wins.
    """

    driver: Literal["zarr", "zarr3"] = "zarr"
    compression: Literal["zstd", "blosc", "blosc_bitshuffle", "auto"] | None = None
    chunk_bytes: int | None = None
    durable: bool = True
    leaf_options: tuple[LeafRule, ...] = ()

    def __post_init__(self) -> None:
        _one_of("Storage.driver", self.driver, ("zarr", "zarr3"))
        _one_of("Storage.compression", self.compression, (None, *CODECS, AUTO))
        _positive_int("Storage.chunk_bytes", self.chunk_bytes, optional=True)
        rules = tuple(_collection("Storage.leaf_options", self.leaf_options))
        if not all(isinstance(rule, LeafRule) for rule in rules):
            raise InvalidOption(
                f"Storage.leaf_options must hold LeafRule, got {self.leaf_options!r}"
            )
        object.__setattr__(self, "leaf_options", rules)


@dataclass(frozen=True, slots=True, kw_only=True)
class Integrity:
    """What is checked.

    Attributes:
      verify_on_restore: compare the digest of every chunk that a restore reads.
      leaf_digests: with every save, and not only with heartbeats, take digests of the values that
        depend neither on mesh nor on chunks (about a second of one core per GB).
    """

    verify_on_restore: bool = True
    leaf_digests: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordination:
    """Working with the other processes of a job.

    Attributes:
      deadline_seconds: bound of every wait for another process, and of the wait for a save in
        flight when the interpreter exits.
      alone: this manager belongs to this process by itself and agrees on nothing with others, as
        that of an evaluator in one process of a job does; it saves no array of several processes.
    """

    deadline_seconds: float = 600.0
    alone: bool = False

    def __post_init__(self) -> None:
        _positive_number("Coordination.deadline_seconds", self.deadline_seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Restore:
    """How a restore works.

    Attributes:
      host_bytes: bytes of chunk buffers and of values not yet handed to a device that a restore
        holds besides the target; a single chunk larger than this is read alone.
      sharding: used for target leaves without a sharding: a `jax.sharding.Sharding`, or a
        function of (dotted leaf name, shape, dtype) that returns one. None: the default device.
      broadcast_replicas: in a job of several processes, what several of them want is read once, a
        part by each, and the devices pass it on to each other. `plan_restore` says of which leaves
        that is so and why not of others. Without it every process reads what its devices need.
    """

    host_bytes: int = 512 * 2**20
    sharding: Any | Callable[[str, tuple[int, ...], Any], Any] | None = None
    broadcast_replicas: bool = False

    def __post_init__(self) -> None:
        _positive_int("Restore.host_bytes", self.host_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Everything a `CheckpointManager` can be told.

    Attributes:
      heartbeat: None for no heartbeats.
      on_save_error: a failed background save is raised at the next `save`, `check`, `wait` or
        `close` ("raise"), or logged there as a warning ("warn"). With "raise", one that nobody was
        told of ends the process with status 1.
      on_committed: called with the `StepInfo` of each durable step, on the background thread; its
        exception is logged and does not undo the save.
      read_only: write nothing at all: no directory, no lock, no clean-up.
    """

    schedule: Schedule = field(default_factory=Schedule)
    snapshot: Snapshot = field(default_factory=Snapshot)
    heartbeat: Heartbeat | None = field(default_factory=Heartbeat)
    retention: Policy = field(default_factory=KeepAll)
    storage: Storage = field(default_factory=Storage)
    integrity: Integrity = field(default_factory=Integrity)
    coordination: Coordination = field(default_factory=Coordination)
    restore: Restore = field(default_factory=Restore)
    on_save_error: Literal["raise", "warn"] = "raise"
    on_committed: Callable[[Any], None] | None = None
    read_only: bool = False

    def __post_init__(self) -> None:
        _one_of("Options.on_save_error", self.on_save_error, ("raise", "warn"))
        if self.on_committed is not None and not callable(self.on_committed):
            raise InvalidOption(f"Options.on_committed must be callable, got {self.on_committed!r}")
        kinds = {
            "schedule": Schedule,
            "snapshot": Snapshot,
            "heartbeat": Heartbeat,
            "retention": Policy,
            "storage": Storage,
            "integrity": Integrity,
            "coordination": Coordination,
            "restore": Restore,
        }
        for name, kind in kinds.items():
            value = getattr(self, name)
            if not isinstance(value, kind) and not (name == "heartbeat" and value is None):
                raise InvalidOption(f"Options.{name} must be a {kind.__name__}, got {value!r}")
