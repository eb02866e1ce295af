"""Integer boxes: axis-aligned pieces of an array, half open."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

Shape = tuple[int, ...]


class Box(NamedTuple):
    """The elements with `start[d] <= index[d] < stop[d]` in every dimension."""

    start: Shape
    stop: Shape

    @property
    def shape(self) -> Shape:
        return tuple(map(operator.sub, self.stop, self.start))

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(a, b) for a, b in zip(self.start, self.stop, strict=True))

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Slices that cut this box out of an array that holds `outer`."""
        return tuple(
            slice(a - o, b - o) for a, b, o in zip(self.start, self.stop, outer.start, strict=True)
        )

    def __str__(self) -> str:
        return "[" + ", ".join(f"{a}:{b}" for a, b in zip(self.start, self.stop, strict=True)) + "]"


def whole(shape: Shape) -> Box:
    return Box((0,) * len(shape), tuple(shape))


def from_index(index: Sequence[slice], shape: Shape) -> Box:
    """The box of a tuple of unit-step slices, as JAX shardings give them."""
    bounds = [part.indices(size)[:2] for part, size in zip(index, shape, strict=True)]
    return Box(tuple(a for a, _ in bounds), tuple(b for _, b in bounds))


def intersect(a: Box, b: Box) -> Box | None:
    """The common part, or None where there is none. 0-dimensional boxes always meet."""
    start = tuple(map(max, a.start, b.start))
    stop = tuple(map(min, a.stop, b.stop))
    return Box(start, stop) if all(map(int.__lt__, start, stop)) else None


def contains(outer: Box, inner: Box) -> bool:
    return all(o <= i for o, i in zip(outer.start, inner.start, strict=True)) and all(
        i <= o for o, i in zip(outer.stop, inner.stop, strict=True)
    )


def bounding(boxes: Iterable[Box]) -> Box:
    """The smallest box around all of `boxes` (at least one)."""
    first, *rest = boxes
    start, stop = first
    for box in rest:
        start, stop = tuple(map(min, start, box.start)), tuple(map(max, stop, box.stop))
    return Box(start, stop)


def count_tiles(box: Box, tile: Shape) -> int:
    """How many cells `tiles` gives."""
    spans = zip(box.start, box.stop, tile, strict=True)
    return math.prod(-(-stop // size) - start // size for start, stop, size in spans)


def tiles(box: Box, tile: Shape) -> Iterator[Box]:
    """The cells of the regular grid of `tile` at the origin that meet `box`, cut to it."""
    if not box.size:
        return
    ranges = [range(a // t * t, b, t) for a, b, t in zip(box.start, box.stop, tile, strict=True)]
    for corner in itertools.product(*ranges):
        start = tuple(map(max, corner, box.start))
        stop = tuple(min(c + t, b) for c, t, b in zip(corner, tile, box.stop, strict=True))
        yield Box(start, stop)


def assert_exact_cover(leaf: str, shape: Shape, boxes: Sequence[Box]) -> None:
    """Raises ValueError unless `boxes` tile an array of `shape` with no gap and no overlap.

    Works on the grid that all box boundaries span, so it costs one cell per box for the grids
    that shardings make.
    """
    outer = whole(shape)
    boxes = [box for box in boxes if box.size]
    for box in boxes:
        if not contains(outer, box):
            raise ValueError(f"leaf {leaf!r}: box {box} lies outside the array of shape {shape}")
    if len(boxes) == 1 and boxes[0].size == outer.size:
        return
    edges = [
        sorted({0, size, *(box.start[d] for box in boxes), *(box.stop[d] for box in boxes)})
        for d, size in enumerate(shape)
    ]
    places = [{edge: i for i, edge in enumerate(axis)} for axis in edges]
    count = np.zeros([len(axis) - 1 for axis in edges], np.int32)
    for box in boxes:
        count[
            tuple(
                slice(place[a], place[b])
                for place, a, b in zip(places, box.start, box.stop, strict=True)
            )
        ] += 1
    bad = np.argwhere(count != 1)
    if len(bad):
        cell = [int(i) for i in bad[0]]
        where = Box(
            tuple(axis[i] for axis, i in zip(edges, cell, strict=True)),
            tuple(axis[i + 1] for axis, i in zip(edges, cell, strict=True)),
        )
        times = int(count[tuple(cell)])
        raise ValueError(f"leaf {leaf!r}: elements {where} would be written {times} times")
