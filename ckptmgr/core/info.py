"""What a user is told about steps, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class StepInfo:
    """One committed step.

    Attributes:
      step: its number.
      kind: "async", "sync", "heartbeat", "preemption", or "foreign" (written by Orbax).
      status: "good", "suspect" or "quarantined".
      created: seconds since the epoch, when `save()` was called.
      nbytes: bytes of its arrays without compression; None for foreign steps.
      metrics, extra: as given to `save()`.
      pinned: whether retention must leave it.
      verified: whether a full verification is on record.
      stored_bytes, stored_files: what its directory takes, in bytes and files; None where that is
        not on record (foreign steps, and those of an early ckptmgr).
      topology: processes, devices, device kind, meshes and library versions at the save.
      plain: containers that a restore without a target gives back in a plain form, as
        "item: path" -> the class they had.
    """

    step: int
    kind: str
    status: str
    created: float
    nbytes: int | None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    extra: Any = None
    pinned: bool = False
    verified: bool = False
    stored_bytes: int | None = None
    stored_files: int | None = None
    topology: Mapping[str, Any] = field(default_factory=dict)
    plain: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Skipped:
    """A step that `restore_latest` passed over, and why."""

    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class Restored:
    """What `restore_latest` found.

    Attributes:
      step: the step restored. A loop that saves `save(i, state)` after step i goes on at i + 1.
      state: the restored tree, or `Items`.
      skipped: newer steps that were passed over.
    """

    step: int
    state: Any
    skipped: tuple[Skipped, ...] = ()


class Items(dict[str, Any]):
    """Several independent items of one step: `Items(state=..., data=iterator)`.

    A dict with attribute access. An item is a pytree, or an object with `get_state()` and
    `set_state()` such as a Grain iterator.
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"there is no item {name!r}; items: {sorted(self)}") from None


class PerProcess(tuple[Any, ...]):
    """The states that an item had in each process, in the order of their numbers.

    What a restore without a target gives where another number of processes saved them.
    """

    __slots__ = ()


def is_stateful(item: Any) -> bool:
    """Whether an item is an object that keeps its own state (a data iterator)."""
    return callable(getattr(item, "get_state", None)) and callable(getattr(item, "set_state", None))
