"""From records to medians, ratios and verdicts, and from those to a table."""

import statistics
from collections.abc import Callable, Mapping
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


class Unit(NamedTuple):
    name: str
    size: float
    digits: int

    def show(self, value: float) -> str:
        return f"{value / self.size:.{self.digits}f}"


def seconds(value: float) -> Unit:
    return Unit(" ms", 1e-3, 1) if value < 0.1 else Unit(" s", 1, 2)


def nbytes(value: float) -> Unit:
    for power, name in (3, " GiB"), (2, " MiB"), (1, " KiB"):
        if value >= 1024**power:
            return Unit(name, 1024**power, 2)
    return Unit(" B", 1, 0)


def count(value: float) -> Unit:
    return Unit("", 1, 0)


def show_bytes(value: float) -> str:
    unit = nbytes(value)
    return unit.show(value) + unit.name


# What the table shows, in this order: the measure, its name for people, the unit for its size.
ROWS: tuple[tuple[str, str, Callable[[float], Unit]], ...] = (
    ("in_save", "in save()", seconds),
    ("durable", "to durable", seconds),
    ("restore", "restore", seconds),
    ("cpu_save", "CPU, save", seconds),
    ("cpu_restore", "CPU, restore", seconds),
    ("disk_bytes", "bytes on disk", nbytes),
    ("files", "files", count),
)
TITLES = {measure: title for measure, title, _ in ROWS}
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


def ratios(kind: str, systems: list[str], records: list[dict]) -> list[Ratio]:
    """The first system against each of the others, with the target where there is one."""
    subject, *others = systems
    targets = {(t.measure, t.against): t.at_most for t in TARGETS[kind]}
    found = []
    for against in others:
        for measure in RATIO_MEASURES:
            target = targets.get((measure, against)) if subject == SUBJECT else None
            found.append(ratio(records, measure, subject, against, target))
    return found


def table(systems: list[str], records: list[dict]) -> str:
    """Median (smallest .. largest) of each measure for each system."""
    lines = [["", *systems]]
    for measure, title, unit_of in ROWS:
        line = [title]
        for system in systems:
            line.append(Spread.of(values(records, system, measure)).show(unit_of))
        lines.append(line)
    return _columns(lines)


def ratio_table(found: list[Ratio]) -> str:
    """A line per measure; for each other system the ratio, and beside it the target if any."""
    by_pair = {(item.measure, item.against): item for item in found}
    against = list(dict.fromkeys(item.against for item in found))
    lines = [[f"{found[0].system} over", *(cell for other in against for cell in (other, ""))]]
    for measure in RATIO_MEASURES:
        line = [TITLES[measure]]
        for other in against:
            item = by_pair[measure, other]
            line.append(f"{item.value:.2f} ({item.low:.2f} .. {item.high:.2f})")
            line.append("" if item.target is None else f"<= {item.target:.2f} {item.verdict}")
        lines.append(line)
    return _columns(lines)


def miss(item: Ratio) -> str:
    title = TITLES[item.measure]
    return f"{title}: {item.value:.2f} of {item.against}, at most {item.target:.2f} wanted"


def _divide(a: float, b: float) -> float:
    return a / b if b else float("inf")


def _columns(lines: list[list[str]]) -> str:
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    padded = (zip(line, widths, strict=True) for line in lines)
    return "\n".join(
        "  " + "  ".join(cell.ljust(width) for cell, width in line).rstrip() for line in padded
    )
