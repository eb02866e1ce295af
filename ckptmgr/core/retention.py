"""What to keep: policies as values, and one pure function that decides.

Steps compare by number, whatever the order in which they were saved; a policy that goes by time
reads the times at which they were. Whatever the policy says, these stay: the newest step, the
newest heartbeat, the newest that was verified, pinned steps, those that a reader holds, and the one
that was just written.

A decision can be made after each save or once after many: what is kept is the same, since no
policy here needs a step that it would have let go.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from ckptmgr.errors import InvalidOption


class Info(Protocol):
    """What a policy looks at; `StepInfo` is one."""

    @property
    def step(self) -> int: ...
    @property
    def kind(self) -> str: ...
    @property
    def created(self) -> float | None: ...
    @property
    def metrics(self) -> Mapping[str, Any]: ...
    @property
    def pinned(self) -> bool: ...
    @property
    def verified(self) -> bool: ...
    @property
    def stored_bytes(self) -> int | None: ...
    @property
    def stored_files(self) -> int | None: ...


class Policy:
    """Base of all policies; `a | b` keeps what either keeps, `a & Budget(...)` at most that much."""

    __slots__ = ()

    def reasons(self, infos: Sequence[Info], now: float) -> dict[int, str]:
        """The steps to keep, each with the reason; `infos` are sorted by step.

        `now` is the time at which it is asked, in seconds since the epoch.
        """
        raise NotImplementedError

    def __or__(self, other: Policy) -> Policy:
        if isinstance(other, Budget):
            raise InvalidOption(_BUDGET_LAST)
        if not isinstance(other, Policy):
            return NotImplemented
        if isinstance(other, Limited) or isinstance(self, Limited):
            raise InvalidOption(_BUDGET_LAST)
        return _Either((*_members(self), *_members(other)))

    def __and__(self, other: Budget) -> Policy:
        if isinstance(other, Policy):
            raise InvalidOption(_BUDGET_LAST)
        if not isinstance(other, Budget):
            return NotImplemented
        return Limited(self, other)


_BUDGET_LAST = (
    "a Budget limits a whole policy: write (a | b) & Budget(...), with | between policies and the "
    "Budget last"
)


def _members(policy: Policy) -> tuple[Policy, ...]:
    return policy.policies if isinstance(policy, _Either) else (policy,)


def _positive(what: str, value: Any, *, whole: bool) -> None:
    kind: Any = int if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kind) or not 0 < value < math.inf:
        sort = "a whole number of at least 1" if whole else "a positive number"
        hint = "; to keep every step leave Options.retention out" if "KeepLast" in what else ""
        raise InvalidOption(f"{what} needs {sort}, got {value!r}{hint}")


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
        _positive("KeepLast(n)", self.n, whole=True)

    def reasons(self, infos: Sequence[Info], now: float) -> dict[int, str]:
        return {info.step: f"last {self.n}" for info in infos[-self.n :]}


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepEvery(Policy):
    """Keeps the steps that are a multiple of `steps`; step 0 is one."""

    steps: int

    def __post_init__(self) -> None:
        _positive("KeepEvery(steps)", self.steps, whole=True)

    def reasons(self, infos: Sequence[Info], now: float) -> dict[int, str]:
        return {i.step: f"every {self.steps} steps" for i in infos if i.step % self.steps == 0}


@dataclass(frozen=True, slots=True)
class KeepEverySeconds(Policy):
    """Keeps the lowest step, then each next one that was saved at least so long after the last kept.

    A step that was saved before the last kept one, because a clock went back or training did, is
    kept, and time counts on from it. One without a time is not kept by this.
    """

    seconds: float

    def __post_init__(self) -> None:
        _positive("KeepEverySeconds(seconds)", self.seconds, whole=False)

    def reasons(self, infos: Sequence[Info], now: float) -> dict[int, str]:
        kept: dict[int, str] = {}
        last: float | None = None
        for info in infos:
            if info.created is None:
                continue
            if last is None or info.created < last or info.created - last >= self.seconds:
                last = info.created
                kept[info.step] = f"every {self.seconds:g} s"
        return kept


@dataclass(frozen=True, slots=True)
class KeepBest(Policy):
    """Keeps the `n` steps with the best `metric`, the lowest ("min") or the highest ("max").

    Steps whose metric is missing, no number, NaN or infinite are not ranked. Of equal ones the later
    step is the better. Where no step can be ranked and there are other metrics, the name is probably
    wrong: all steps that have such are kept, with a warning.
    """

    n: int
    metric: str
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        _positive("KeepBest(n)", self.n, whole=True)
        if not isinstance(self.metric, str) or not self.metric:
            raise InvalidOption(f"KeepBest(metric) needs the name of a metric, got {self.metric!r}")
        if self.mode not in ("min", "max"):
            raise InvalidOption(f"KeepBest(mode) must be 'min' or 'max', got {self.mode!r}")

    def reasons(self, infos: Sequence[Info], now: float) -> dict[int, str]:
        ranked = self.ranked(infos)
        if not ranked:
            return {
                info.step: f"has no metric {self.metric!r} to be ranked by"
                for info in infos
                if names_of([info])
            }
        return {
            info.step: f"{_ordinal(place)} {self.metric} ({self.mode})"
            for place, info in enumerate(ranked[: self.n], 1)
        }

    def ranked(self, infos: Iterable[Info]) -> list[Info]:
        """The steps that have a rank, the best first."""
        sign = 1 if self.mode == "min" else -1
        found = [(metric_of(info, self.metric), info) for info in infos]
        numbers = [(sign * value, -info.step, info) for value, info in found if value is not None]
        return [info for _, _, info in sorted(numbers, key=lambda entry: entry[:2])]


def metric_of(info: Info, name: str) -> float | None:
    """A step's metric where it can be ranked: a finite number."""
    value = info.metrics.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return value


def names_of(infos: Iterable[Info]) -> list[str]:
    """The metrics by which some of these steps could be ranked."""
    return sorted({n for info in infos for n in info.metrics if metric_of(info, n) is not None})


def _ordinal(place: int) -> str:
    return "best" if place == 1 else f"{place}. best"


@dataclass(frozen=True, slots=True)
class KeepHeartbeats(Policy):
    """Keeps the `n` newest heartbeats."""

    n: int

    def __post_init__(self) -> None:
        _positive("KeepHeartbeats(n)", self.n, whole=True)

    def reasons(self, infos: Sequence[Info], now: float) -> dict[int, str]:
        beats = [info.step for info in infos if info.kind == "heartbeat"]
        return {step: f"last {self.n} heartbeats" for step in beats[-self.n :]}


@dataclass(frozen=True, slots=True)
class KeepLogSpaced(Policy):
    """Keeps the lowest step in each of `per_decade` spans, of equal ratio, from one power of ten to
    the next; and step 0. With 3: about 1, 3, 5, 10, 22, 47, 100, ...
    """

    per_decade: int

    def __post_init__(self) -> None:
        _positive("KeepLogSpaced(per_decade)", self.per_decade, whole=True)

    def reasons(self, infos: Sequence[Info], now: float) -> dict[int, str]:
        kept: dict[int, int] = {}
        for info in infos:
            # a number's logarithm may fall just short of a whole one
            span = math.floor(math.log10(info.step) * self.per_decade + 1e-9) if info.step else -1
            kept.setdefault(span, info.step)
        return {step: f"{self.per_decade} per decade" for step in kept.values()}


@dataclass(frozen=True, slots=True)
class _Either(Policy):
    policies: tuple[Policy, ...]

    def reasons(self, infos: Sequence[Info], now: float) -> dict[int, str]:
        out: dict[int, str] = {}
        for policy in self.policies:
            for step, reason in policy.reasons(infos, now).items():
                out[step] = f"{out[step]}; {reason}" if step in out else reason
        return out


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """At most so much on disk, saves in flight counted as large as the newest step.

    Where a policy would keep more, its lowest steps are given up first. What stays whatever the
    policy says is never given up: a budget that is smaller is exceeded, and says so.

    Attributes:
      bytes, files: of all steps together; None for no limit.
    """

    bytes: int | None = None
    files: int | None = None

    def __and__(self, other: object) -> Policy:
        raise InvalidOption(_BUDGET_LAST)

    __or__ = __and__

    def __post_init__(self) -> None:
        if self.bytes is None and self.files is None:
            raise InvalidOption("Budget() limits nothing; give it bytes=, files= or both")
        for name in ("bytes", "files"):
            value = getattr(self, name)
            if isinstance(value, float) and value.is_integer():  # 5e9
                object.__setattr__(self, name, int(value))
            if value is not None:
                _positive(f"Budget({name})", getattr(self, name), whole=True)


WARN_AT = 0.8
"""The part of a budget from which on is warned."""


@dataclass(frozen=True, slots=True)
class Limited(Policy):
    """A policy within a budget; what `policy & budget` makes."""

    policy: Policy
    budget: Budget

    def reasons(self, infos: Sequence[Info], now: float) -> dict[int, str]:
        return self.policy.reasons(infos, now)


@dataclass(frozen=True, slots=True)
class Decision:
    """What stays and what goes.

    Attributes:
      keep: step -> why.
      drop: steps to delete, lowest first.
      given_up: of `drop`, what the policy would have kept and the budget did not allow -> why it
        would have been.
      warnings: what the user should know: a budget that is nearly used up, or exceeded; a metric
        that no step has.
    """

    keep: Mapping[int, str]
    drop: tuple[int, ...]
    given_up: Mapping[int, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


def decide(
    infos: Sequence[Info],
    policy: Policy,
    now: float,
    just_saved: int | None = None,
    held: Collection[int] = (),
    in_flight: int = 0,
) -> Decision:
    """What of `infos` (committed steps, any order) to keep and to drop.

    Args:
      now: seconds since the epoch.
      just_saved: the step that was written last.
      held: steps that somebody reads at the moment.
      in_flight: saves that are not committed yet; they count in a budget.
    """
    ordered = sorted(infos, key=lambda info: info.step)
    if not ordered:
        return Decision({}, ())
    always = _always(ordered, just_saved, held)
    keep = policy.reasons(ordered, now)
    for step, reason in always.items():
        keep.setdefault(step, reason)
    warnings = _unranked(policy, ordered)
    given_up: dict[int, str] = {}
    if isinstance(policy, Limited):
        given_up, more = _give_up(ordered, keep, always, policy.budget, in_flight)
        warnings += more
    keep = {step: why for step, why in sorted(keep.items()) if step not in given_up}
    drop = tuple(info.step for info in ordered if info.step not in keep)
    return Decision(keep, drop, given_up, tuple(warnings))


def _always(
    ordered: Sequence[Info], just_saved: int | None, held: Collection[int]
) -> dict[int, str]:
    """What stays whatever the policy says."""
    found: dict[int, list[str]] = {}

    def add(steps: Iterable[int], reason: str) -> None:
        for step in steps:
            found.setdefault(step, []).append(reason)

    add([ordered[-1].step], "newest")
    add([info.step for info in ordered if info.kind == "heartbeat"][-1:], "newest heartbeat")
    add([info.step for info in ordered if info.verified][-1:], "newest verified")
    add([info.step for info in ordered if info.pinned], "pinned")
    add([info.step for info in ordered if info.step in held], "being read")
    add([info.step for info in ordered if info.step == just_saved], "just saved")
    return {step: "; ".join(reasons) for step, reasons in found.items()}


def first_best(policy: Policy) -> KeepBest | None:
    """The first KeepBest of a policy."""
    return next(iter(_bests(policy)), None)


def _bests(policy: Policy) -> list[KeepBest]:
    whole = policy.policy if isinstance(policy, Limited) else policy
    return [one for one in _members(whole) if isinstance(one, KeepBest)]


def _unranked(policy: Policy, ordered: Sequence[Info]) -> list[str]:
    """Of each KeepBest that ranks nothing."""
    names = names_of(ordered)
    there = (
        f"there are {', '.join(map(repr, names))}, and all such steps stay" if names else "none has"
    )
    return [
        f"no step has a number as metric {one.metric!r} for KeepBest; {there}"
        for one in _bests(policy)
        if not one.ranked(ordered)
    ]


def _give_up(
    ordered: Sequence[Info],
    keep: Mapping[int, str],
    always: Mapping[int, str],
    budget: Budget,
    in_flight: int,
) -> tuple[dict[int, str], list[str]]:
    """The steps that the budget does not allow, and what to warn of."""
    kept = [info for info in ordered if info.step in keep]
    given_up: dict[int, str] = {}
    warnings = []
    for name, limit, size_of in (
        ("bytes", budget.bytes, _bytes_of),
        ("files", budget.files, _files_of),
    ):
        if limit is None:
            continue
        used = sum(size_of(info) for info in kept if info.step not in given_up)
        used += in_flight * size_of(ordered[-1])
        for info in kept:
            if used <= limit:
                break
            if info.step not in always and info.step not in given_up:
                given_up[info.step] = keep[info.step]
                used -= size_of(info)
        if used > limit:
            warnings.append(
                f"the budget of {limit} {name} is exceeded: {used} are used by steps that are "
                f"never given up ({', '.join(f'{s}: {why}' for s, why in sorted(always.items()))})"
            )
        elif used > WARN_AT * limit:
            warnings.append(f"{used} of the budget of {limit} {name} are used")
    return given_up, warnings


def _bytes_of(info: Info) -> int:
    return info.stored_bytes or 0


def _files_of(info: Info) -> int:
    return info.stored_files or 0
