"""What to keep: policies as values, and one pure function that decides.

Steps compare by number. Whatever the policy says, the newest step stays, the newest heartbeat, and
the step that was just written; an empty policy drops nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ckptmgr.errors import InvalidOption


class Info(Protocol):
    """What a policy looks at; `StepInfo` is one."""

    @property
    def step(self) -> int: ...
    @property
    def kind(self) -> str: ...


class Policy:
    """Base of all policies; `a | b` keeps what either keeps."""

    __slots__ = ()

    def reasons(self, infos: Sequence[Info], now: float) -> dict[int, str]:
        """The steps to keep, each with the reason; `infos` are sorted by step."""
        raise NotImplementedError

    def __or__(self, other: Policy) -> Policy:
        if not isinstance(other, Policy):
            return NotImplemented
        return _Either((*_members(self), *_members(other)))


def _members(policy: Policy) -> tuple[Policy, ...]:
    return policy.policies if isinstance(policy, _Either) else (policy,)


@dataclass(frozen=True, slots=True)
class KeepAll(Policy):
    """Deletes nothing."""

    def reasons(self, infos: Sequence[Info], now: float) -> dict[int, str]:
        return {info.step: "all are kept" for info in infos}


@dataclass(frozen=True, slots=True)
class KeepLast(Policy):
    """Keeps the `n` highest steps (n >= 1)."""

    n: int

    def __post_init__(self) -> None:
        if isinstance(self.n, bool) or not isinstance(self.n, int) or self.n < 1:
            raise InvalidOption(
                f"KeepLast(n) needs a whole number of at least 1, got {self.n!r}; "
                "to keep every step leave Options.retention out"
            )

    def reasons(self, infos: Sequence[Info], now: float) -> dict[int, str]:
        return {info.step: f"last {self.n}" for info in infos[-self.n :]}


@dataclass(frozen=True, slots=True)
class _Either(Policy):
    policies: tuple[Policy, ...]

    def reasons(self, infos: Sequence[Info], now: float) -> dict[int, str]:
        out: dict[int, str] = {}
        for policy in self.policies:
            for step, reason in policy.reasons(infos, now).items():
                out[step] = f"{out[step]}; {reason}" if step in out else reason
        return out


@dataclass(frozen=True, slots=True)
class Decision:
    """Attributes: keep: step -> why. drop: steps to delete, lowest first."""

    keep: Mapping[int, str]
    drop: tuple[int, ...]


def decide(
    infos: Sequence[Info], policy: Policy, now: float, just_saved: int | None = None
) -> Decision:
    """What of `infos` (committed steps, any order) to keep and to drop."""
    ordered = sorted(infos, key=lambda info: info.step)
    if not ordered:
        return Decision({}, ())
    keep = policy.reasons(ordered, now)
    keep.setdefault(ordered[-1].step, "newest")
    heartbeats = [info.step for info in ordered if info.kind == "heartbeat"]
    if heartbeats:
        keep.setdefault(heartbeats[-1], "newest heartbeat")
    if just_saved is not None and any(info.step == just_saved for info in ordered):
        keep.setdefault(just_saved, "just saved")
    drop = tuple(info.step for info in ordered if info.step not in keep)
    return Decision(dict(sorted(keep.items())), drop)
