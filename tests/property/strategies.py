"""What the property tests draw: cut arrays, nested containers, plain values."""

import collections
import dataclasses
import itertools
import math
from typing import Any, NamedTuple

import flax.struct
import jax
from hypothesis import strategies as st

from ckptmgr.core.boxes import Box


class Cut(NamedTuple):
    """An array cut into a regular grid of shards, as any mesh and partition spec cut it."""

    shape: tuple[int, ...]
    boxes: list[Box]
    owners: list[int]


PIECES = st.integers(1, 7)


@st.composite
def cuts(draw: Any, sizes: Any = PIECES, even: bool = False) -> Cut:
    """0 to 3 axes; the last piece along an axis may be shorter unless `even`."""
    edges: list[list[int]] = []
    for _ in range(draw(st.integers(0, 3))):
        piece, times = (
            draw(sizes),
            draw(st.sampled_from([1, 1, 2, 3, 4] if len(edges) < 2 else [1, 2])),
        )
        end = piece * times - (0 if even else draw(st.integers(0, piece - 1)))
        edges.append(sorted({*range(0, end, piece), end}))
    spans = [list(itertools.pairwise(axis)) for axis in edges]
    boxes = [
        Box(tuple(a for a, _ in cell), tuple(b for _, b in cell))
        for cell in itertools.product(*spans)
    ]
    return Cut(tuple(axis[-1] for axis in edges), boxes, _owners(draw, spans, len(boxes)))


def _owners(draw: Any, spans: list[Any], count: int) -> list[int]:
    """One process, any process for each box, or processes in a line along one axis."""
    how = draw(st.sampled_from(["one", "any", "line"]))
    if how == "one" or not spans:
        return [0] * count
    if how == "any":
        return draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
    axis = draw(st.integers(0, len(spans) - 1))
    inner = math.prod(len(span) for span in spans[axis + 1 :])
    return [i // inner % len(spans[axis]) for i in range(count)]


@st.composite
def boxes_in(draw: Any, shape: tuple[int, ...], empty: bool = False) -> Box:
    start, stop = [], []
    for size in shape:
        a = draw(st.integers(0, size - (not empty)))
        b = draw(st.integers(a + (not empty), size))
        start.append(a)
        stop.append(b)
    return Box(tuple(start), tuple(stop))


# -- containers -------------------------------------------------------------------------------


class Pair(NamedTuple):
    first: Any
    second: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    kernel: Any
    bias: Any


@flax.struct.dataclass
class Train:
    params: Any
    step: Any


def _dicts(keys: Any, children: Any) -> Any:
    return st.dictionaries(keys, children, max_size=3)


TEXT_KEYS = st.text(max_size=4)
INT_KEYS = st.integers(-20, 20)
TUPLE_KEYS = st.tuples(st.integers(0, 3), st.integers(0, 3))


def trees(leaves: Any, user_classes: bool = True) -> Any:
    def grow(children: Any) -> Any:
        kinds = [
            st.lists(children, max_size=3),
            st.lists(children, max_size=3).map(tuple),
            _dicts(TEXT_KEYS, children),
            _dicts(INT_KEYS, children),
            _dicts(TUPLE_KEYS, children),
            _dicts(TEXT_KEYS, children).map(collections.OrderedDict),
        ]
        if user_classes:
            kinds += [
                st.builds(Pair, children, children),
                st.builds(Layer, children, children),
                st.builds(Train, children, children),
                _dicts(TEXT_KEYS, children).map(lambda found: collections.defaultdict(list, found)),
            ]
        return st.one_of(kinds)

    return st.recursive(st.none() | leaves, grow, max_leaves=12)


# -- plain values -----------------------------------------------------------------------------

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**80), 2**80)
    | st.floats()
    | st.complex_numbers()
    | st.text(max_size=6)
    | st.binary(max_size=6)
)
KEYS = (
    st.none()
    | st.booleans()
    | st.integers(-9, 9)
    | st.floats(allow_nan=False)
    | st.text("$ab", max_size=4)
    | st.sampled_from(["$float", "$map", "$bytes", "$tuple", "$array"])
    | st.binary(max_size=2)
    | st.tuples(st.integers(0, 2), st.text(max_size=1))
)
VALUES = st.recursive(
    SCALARS,
    lambda children: (
        st.lists(children, max_size=3)
        | st.lists(children, max_size=3).map(tuple)
        | st.dictionaries(KEYS, children, max_size=3)
    ),
    max_leaves=10,
)


def same(a: Any, b: Any) -> bool:
    """Equal in type and value, NaN equal to NaN, 0.0 different from -0.0."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return len(a) == len(b) and all(
            same(x, y) for x, y in zip(a.items(), b.items(), strict=True)
        )
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, (float, complex)):
        return repr(a) == repr(b)
    return bool(a == b)
