"""Figures with their unit and their reason, the page that they make, and how large a state is."""

from __future__ import annotations

import dataclasses
import math
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckptmgr.core.info import is_stateful
from ckptmgr.errors import InvalidOption

WIDTH = 100
NAME, VALUE = 23, 14
"""Columns of the page: the name, the value flush right, and from there on the reason."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of an advice.

    Attributes:
      group: the part of the page that it belongs to.
      name: what it is; no other figure of the advice has this name.
      value: in the unit: a number, or a word such as a mode.
      unit: "seconds", "bytes", "share" (of 1), "count", or "" for a word.
      why: a sentence with the formula or the source.
    """

    group: str
    name: str
    value: float | str
    unit: str
    why: str

    @property
    def shown(self) -> str:
        """The value as a person reads it."""
        if isinstance(self.value, str):
            return self.value
        return _SHOW[self.unit](self.value)


def seconds(value: float) -> str:
    """A length of time, in the unit that suits it."""
    for above, size, unit in ((2 * 86400, 86400, "d"), (7200, 3600, "h"), (600, 60, "min")):
        if value >= above:
            return f"{number(value / size)} {unit}"
    return f"{number(value)} s"


def nbytes(value: float) -> str:
    for power, unit in ((18, "EB"), (15, "PB"), (12, "TB"), (9, "GB"), (6, "MB"), (3, "kB")):
        if value >= 0.9995 * 10**power:
            return f"{number(value / 10**power)} {unit}"
    return f"{number(value)} B"


def number(value: float) -> str:
    """Three digits, and all of those before the point; no noughts at the end of a fraction."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def count(value: float) -> str:
    """As `number`, and large ones as people write them: 175e9."""
    return f"{number(value / 1e9)}e9" if value >= 1e9 else number(value)


_SHOW = {
    "seconds": seconds,
    "bytes": nbytes,
    "share": lambda value: f"{100 * value:.2f} %",
    "count": number,
}


@dataclass(frozen=True, slots=True)
class Advice:
    """What `advise` found; `print(advice)` gives the page.

    Attributes:
      mode: for `Snapshot(mode=...)`.
      config: the file to start from.
      interval_seconds: from save to save, for `Schedule(every_seconds=...)`.
      interval_steps: for `Schedule(every_steps=...)`; None where the time of a step is not known.
      goodput: the share of all time that is training that counts, at that interval.
      figures: everything that the page shows; `advice["flush"]` is one of them, by its name.
      warnings: what does not work out, a sentence each.
    """

    mode: str
    config: str
    interval_seconds: float
    interval_steps: int | None
    goodput: float
    figures: tuple[Figure, ...]
    warnings: tuple[str, ...]

    def __getitem__(self, name: str) -> Figure:
        for figure in self.figures:
            if figure.name == name:
                return figure
        names = ", ".join(repr(figure.name) for figure in self.figures)
        raise KeyError(f"there is no figure {name!r}; there are {names}")

    def __str__(self) -> str:
        lines: list[str] = []
        group = ""
        for figure in self.figures:
            if figure.group != group:
                group = figure.group
                lines += ["", group] if lines else [group]
            head = f"  {figure.name:<{NAME}}{figure.shown:>{VALUE}}  "
            lines += textwrap.wrap(
                figure.why, WIDTH, initial_indent=head, subsequent_indent=" " * len(head)
            )
        if self.warnings:
            lines += ["", "Beware"]
        for warning in self.warnings:
            lines += textwrap.wrap(warning, WIDTH, initial_indent="  - ", subsequent_indent="    ")
        return "\n".join(lines) + "\n"


def bytes_of(state: Any) -> int:
    """Bytes of all arrays of a tree: mappings, sequences, dataclasses and arrays are known.

    An array is what has `nbytes`, or `shape` and a `dtype` with an `itemsize`, such as
    `jax.ShapeDtypeStruct`. Numbers, texts, functions, iterators and None count as nothing.
    """
    size = getattr(state, "nbytes", None)
    if isinstance(size, int):
        return size
    if state is None or isinstance(state, (bool, int, float, complex, str, bytes)):
        return 0
    if isinstance(state, Mapping):
        return sum(map(bytes_of, state.values()))
    if isinstance(state, (list, tuple)):
        return sum(map(bytes_of, state))
    itemsize = getattr(getattr(state, "dtype", None), "itemsize", None)
    if itemsize is not None and hasattr(state, "shape"):
        return math.prod(state.shape) * int(itemsize)
    if dataclasses.is_dataclass(state) and not isinstance(state, type):
        nodes = [f.name for f in dataclasses.fields(state) if f.metadata.get("pytree_node", True)]
        return sum(bytes_of(getattr(state, name)) for name in nodes)
    if callable(state) or is_stateful(state):
        return 0
    raise InvalidOption(
        f"state: what a {type(state).__name__} holds is not known here; "
        "pass jax.tree.leaves(state) instead"
    )
