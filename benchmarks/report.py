"""From records to medians, ratios and verdicts, and from those to a table."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

SUBJECT = "ckptmgr"  # the system that the targets are for


@dataclass(frozen=True)
class Target:
    """The median of `measure` is at most `at_most` times that of the system `against`."""

    measure: str
    against: str
    at_most: float


# By kind of workload.
TARGETS: Mapping[str, tuple[Target, ...]] = {
    "dense": (
        Target("in_save", "orbax", 1.0),
        Target("durable", "orbax", 0.6),
        Target("restore", "orbax", 0.7),
    ),
    "small": (
        Target("in_save", "orbax", 1.0),
        Target("durable", "orbax", 0.3),
        Target("restore", "orbax", 0.3),
    ),
}


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

    @property
    def verdict(self) -> str:
        if self.target is None:
            return ""
        return "OK" if self.value <= self.target else "MISS"


@dataclass(frozen=True)
class Check:
    """A figure of one system that has a limit of its own, not a ratio to another system's."""

    title: str
    system: str
    value: float
    limit: float
    at_least: bool = False

    @property
    def verdict(self) -> str:
        met = self.value >= self.limit if self.at_least else self.value <= self.limit
        return "OK" if met else "MISS"

    @property
    def wanted(self) -> str:
        return f"{'>=' if self.at_least else '<='} {self.limit:.2f}"


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
    ("durable", "to durable", seconds),
    ("restore", "restore", seconds),
    ("cpu_save", "CPU, save", seconds),
    ("cpu_restore", "CPU, restore", seconds),
    ("disk_bytes", "bytes on disk", nbytes),
    ("files", "files", count),
)
RATIO_MEASURES = ("in_save", "durable", "restore", "cpu_save", "cpu_restore")


def values(records: list[dict], system: str, measure: str) -> list[float]:
    """One value per repetition, the warm-up left out."""
    return [
        record["measures"][measure]
        for record in records
        if record["system"] == system and not record["warmup"]
    ]


def ratio(
    records: list[dict], measure: str, system: str, against: str, target: float | None
) -> Ratio:
    ours = values(records, system, measure)
    theirs = values(records, against, measure)
    pairs = [_divide(a, b) for a, b in zip(ours, theirs, strict=True)]
    of_medians = _divide(statistics.median(ours), statistics.median(theirs))
    return Ratio(measure, system, against, of_medians, min(pairs), max(pairs), target)


def compare(
    records: list[dict],
    pairs: Iterable[tuple[str, str]],
    measures: Iterable[str],
    targets: Iterable[Target],
    subjects: Iterable[str] = (SUBJECT,),
) -> list[Ratio]:
    """Each (system, against) in each measure, with the target where the system has one."""
    limits = {(target.measure, target.against): target.at_most for target in targets}
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


def ratios(kind: str, systems: list[str], records: list[dict]) -> list[Ratio]:
    """The first system against each of the others, with the target where there is one."""
    subject, *others = systems
    pairs = [(subject, against) for against in others]
    return compare(records, pairs, RATIO_MEASURES, TARGETS[kind])


def table(systems: list[str], records: list[dict], rows: Rows = ROWS) -> str:
    """Median (smallest .. largest) of each measure for each system."""
    lines = [["", *systems]]
    for measure, title, unit_of in rows:
        line = [title]
        for system in systems:
            line.append(Spread.of(values(records, system, measure)).show(unit_of))
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
            line.append(f"{item.value:.2f} ({item.low:.2f} .. {item.high:.2f})")
            line.append("" if item.target is None else f"<= {item.target:.2f} {item.verdict}")
        lines.append(line)
    return columns(lines)


def check_table(found: Iterable[Check]) -> str:
    lines = [
        [item.system, item.title, f"{item.value:.2f}", f"{item.wanted} {item.verdict}"]
        for item in found
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
            lines.append(f"{item.system}, {item.title}: {item.value:.2f}, {item.wanted} wanted")
        else:
            lines.append(
                f"{item.system}, {titles[item.measure]}: {item.value:.2f} of {item.against}, "
                f"at most {item.target:.2f} wanted"
            )
    return lines


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
