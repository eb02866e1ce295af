"""From records to medians, ratios and verdicts, and from those to a table."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

SUBJECT = "ckptmgr"  # the system that the targets are for


@dataclass(frozen=True)
class Target:
    """The median of `measure` is at most `at_most` times that of the system `against`.

    `goal` is what is aimed at, where that is less than what must be met.
    """

    measure: str
    against: str
    at_most: float
    goal: float | None = None


EVERYWHERE = (
    Target("in_save", "orbax", 0.3, goal=0.1),
    Target("peak_restore", "orbax", 1.0, goal=0.8),
)
AS_DCP = (Target("durable", "dcp", 0.9, goal=0.5), Target("restore", "dcp", 0.9, goal=0.5))
# By name of the workload, or else by its kind.
TARGETS: Mapping[str, tuple[Target, ...]] = {
    "dense": (
        Target("durable", "orbax", 0.5, goal=0.35),
        Target("restore", "orbax", 0.5, goal=0.35),
        Target("restore", "raw", 1.5, goal=1.1),
        *AS_DCP,
    ),
    "small8": (
        Target("durable", "orbax", 0.1, goal=0.05),
        Target("restore", "orbax", 0.15, goal=0.07),
    ),
    "small1": (
        Target("durable", "orbax", 0.2, goal=0.1),
        Target("restore", "orbax", 0.2, goal=0.1),
        *AS_DCP,
    ),
    "trainstate": AS_DCP,
}
# Of a dense state: a disk hides what comes on top of writing, memory does not.
DURABLE_AS_RAW = {
    "disk": Target("durable", "raw", 1.3, goal=1.1),
    "tmpfs": Target("durable", "raw", 2.0, goal=1.5),
}
RESTORED_AT_MOST = 1.1  # the peak of host memory over base in a restore, of the bytes restored


def targets(name: str, kind: str, file_system: str) -> tuple[Target, ...]:
    """Those of a workload, on a directory with this file system."""
    found = EVERYWHERE + TARGETS.get(name, TARGETS.get(kind, ()))
    if kind == "dense":
        found += (DURABLE_AS_RAW["tmpfs" if file_system == "tmpfs" else "disk"],)
    return found


@dataclass(frozen=True)
class Spread:
    """A median with the smallest and the largest value."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> "Spread":
        return cls(statistics.median(values), min(values), max(values))

    def show(self, unit_of: Callable[[float], "Unit"]) -> str:
        unit = unit_of(self.median)
        low, high = unit.show(self.low), unit.show(self.high)
        spread = "" if low == high else f" ({low} .. {high})"
        return unit.show(self.median) + unit.name + spread


@dataclass(frozen=True)
class Ratio:
    """`system` over `against`: ratio of the medians, with the spread of the ratios rep by rep."""

    measure: str
    system: str
    against: str
    value: float
    low: float
    high: float
    target: float | None = None
    goal: float | None = None

    @property
    def verdict(self) -> str:
        if self.target is None:
            return ""
        if self.value > self.target:
            return "MISS"
        if self.goal is None:
            return "OK"
        return "goal" if self.value <= self.goal else "must"

    @property
    def wanted(self) -> str:
        """Empty where there is no target; a goal stands before what must be met."""
        if self.target is None:
            return ""
        goal = "" if self.goal is None else f"{self.goal:.2f} / "
        return f"<= {goal}{self.target:.2f}"

    @property
    def shown(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f} .. {self.high:.2f})"


@dataclass(frozen=True)
class Check:
    """A figure of one system that has a limit of its own, not a ratio to another system's.

    `against` says what the limit is made of, where the title does not; `digits` are those shown.
    """

    title: str
    system: str
    value: float
    limit: float
    at_least: bool = False
    against: str = ""
    digits: int = 2

    @property
    def verdict(self) -> str:
        met = self.value >= self.limit if self.at_least else self.value <= self.limit
        return "OK" if met else "MISS"

    @property
    def shown(self) -> str:
        return f"{self.value:.{self.digits}f}"

    @property
    def wanted(self) -> str:
        return f"{'>=' if self.at_least else '<='} {self.limit:.{self.digits}f}"


class Unit(NamedTuple):
    name: str
    size: float
    digits: int

    def show(self, value: float) -> str:
        return f"{value / self.size:.{self.digits}f}"


def seconds(value: float) -> Unit:
    return Unit(" ms", 1e-3, 1) if abs(value) < 0.1 else Unit(" s", 1, 2)


def nbytes(value: float) -> Unit:
    for power, name in (3, " GiB"), (2, " MiB"), (1, " KiB"):
        if value >= 1024**power:
            return Unit(name, 1024**power, 2)
    return Unit(" B", 1, 0)


def count(value: float) -> Unit:
    return Unit("", 1, 0)


def percent(value: float) -> Unit:
    return Unit(" %", 0.01, 1)


def factor(value: float) -> Unit:
    return Unit("", 1, 2)


def show_bytes(value: float) -> str:
    unit = nbytes(value)
    return unit.show(value) + unit.name


# What a table shows, in this order: the measure, its name for people, the unit for its size.
Rows = Sequence[tuple[str, str, Callable[[float], Unit]]]
ROWS: Rows = (
    ("in_save", "in save()", seconds),
    ("cpu_in_save", "CPU of the caller in save()", seconds),
    ("durable", "to durable", seconds),
    ("restore", "restore", seconds),
    ("restore_warm", "restore, warm memory", seconds),
    ("cpu_save", "CPU, save", seconds),
    ("cpu_restore", "CPU, restore", seconds),
    ("disk_bytes", "bytes on disk", nbytes),
    ("files", "files", count),
)
RATIO_MEASURES = ("in_save", "cpu_in_save", "durable", "restore", "cpu_save", "cpu_restore")
MEMORY_ROWS: Rows = (
    ("peak_save", "peak over base, save", nbytes),
    ("peak_restore", "peak over base, restore", nbytes),
    ("restored_bytes", "bytes restored", nbytes),
    ("of_restored", "peak of the restore, of these", factor),
)
MEMORY_MEASURES = ("peak_restore",)


def values(records: list[dict], system: str, measure: str) -> list[float]:
    """One value per repetition, the warm-up left out; none where the system has no such value."""
    found = [
        record["measures"][measure]
        for record in records
        if record["system"] == system and not record["warmup"]
    ]
    return [value for value in found if value is not None]


def ratio(
    records: list[dict], measure: str, system: str, against: str, target: Target | None
) -> Ratio:
    ours = values(records, system, measure)
    theirs = values(records, against, measure)
    pairs = [_divide(a, b) for a, b in zip(ours, theirs, strict=True)]
    of_medians = _divide(statistics.median(ours), statistics.median(theirs))
    limits = (target.at_most, target.goal) if target else (None, None)
    return Ratio(measure, system, against, of_medians, min(pairs), max(pairs), *limits)


def compare(
    records: list[dict],
    pairs: Iterable[tuple[str, str]],
    measures: Iterable[str],
    targets: Iterable[Target],
    subjects: Iterable[str] = (SUBJECT,),
) -> list[Ratio]:
    """Each (system, against) in each measure, with the target where the system has one."""
    limits = {(target.measure, target.against): target for target in targets}
    held = set(subjects)
    measures = tuple(measures)
    return [
        ratio(
            records,
            measure,
            system,
            against,
            limits.get((measure, against)) if system in held else None,
        )
        for system, against in pairs
        for measure in measures
    ]


def table(systems: list[str], records: list[dict], rows: Rows = ROWS) -> str:
    """Median (smallest .. largest) of each measure for each system."""
    lines = [["", *systems]]
    for measure, title, unit_of in rows:
        line = [title]
        for system in systems:
            found = values(records, system, measure)
            line.append(Spread.of(found).show(unit_of) if found else "")
        lines.append(line)
    return columns(lines)


def ratio_table(found: list[Ratio], rows: Rows = ROWS) -> str:
    """A line per measure; for each pair of systems the ratio, and beside it the target if any."""
    by_key = {(item.measure, item.system, item.against): item for item in found}
    pairs = list(dict.fromkeys((item.system, item.against) for item in found))
    lines = [["", *(cell for a, b in pairs for cell in (f"{a} / {b}", "target"))]]
    for measure, title, _ in rows:
        items = [by_key.get((measure, *pair)) for pair in pairs]
        if None in items:
            continue
        line = [title]
        for item in items:
            line += [item.shown, f"{item.wanted} {item.verdict}".strip()]
        lines.append(line)
    return columns(lines)


def check_table(found: Iterable[Check]) -> str:
    lines = [
        [item.system, item.title, item.shown, f"{item.wanted} {item.verdict}"] for item in found
    ]
    return columns([["", "", "found", "target"], *lines])


def missed(found: Iterable[Ratio | Check], rows: Rows = ROWS) -> list[str]:
    """A line for each target that was missed."""
    titles = {measure: title for measure, title, _ in rows}
    lines = []
    for item in found:
        if item.verdict != "MISS":
            continue
        if isinstance(item, Check):
            beside = f" ({item.against})" if item.against else ""
            lines.append(f"{item.system}, {item.title}{beside}: {item.shown}, {item.wanted} wanted")
        else:
            lines.append(
                f"{item.system}, {titles[item.measure]}: {item.value:.2f} of {item.against}, "
                f"at most {item.target:.2f} wanted"
            )
    return lines


def judged(name: str, found: Iterable[Ratio | Check], rows: Rows = ROWS) -> list[dict[str, str]]:
    """A line of the last table for each target of the workload: its columns and their cells."""
    titles = {measure: title for measure, title, _ in rows}
    lines = []
    for item in found:
        if isinstance(item, Check):
            title, must = item.title, f"{item.limit:.{item.digits}f}"
            goal = must
        elif item.target is not None:
            title, must = titles[item.measure], f"{item.target:.2f}"
            goal = must if item.goal is None else f"{item.goal:.2f}"
        else:
            continue
        lines.append(
            {
                "workload": name,
                "measure": title,
                "against": item.against,
                "found": item.shown,
                "goal": goal,
                "must": must,
                "verdict": "goal" if item.verdict == "OK" else item.verdict,
            }
        )
    return lines


def verdict_table(lines: Sequence[Mapping[str, str]]) -> str:
    """All targets, one a line."""
    return columns([list(lines[0]), *(list(line.values()) for line in lines)]) if lines else ""


def columns(lines: list[list[str]]) -> str:
    """A markdown table; the first line is its head."""
    widths = [max(3, *(len(cell) for cell in column)) for column in zip(*lines, strict=True)]
    shown = [
        "| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |"
        for line in lines
    ]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([shown[0], rule, *shown[1:]])


def _divide(a: float, b: float) -> float:
    return a / b if b else float("inf")
