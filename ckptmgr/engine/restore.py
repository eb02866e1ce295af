"""From an open item to a tree: match, plan, read, verify, place.

Memory: leaves are read in waves, the next one while the last is handed over. Besides the restored
arrays a restore holds the values of up to three waves that are not on their devices yet, and the
chunks being read, together about `Restore.host_bytes`; a leaf larger than a quarter of that is a
wave of its own.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ckptmgr.core import manifest, plan
from ckptmgr.core.boxes import Box
from ckptmgr.core.manifest import StoredLeaf, StoredTree
from ckptmgr.core.plan import RestorePlan, Wanted
from ckptmgr.engine.goals import Goal, Goals, family, physical, stored_tree
from ckptmgr.engine.memory import give_back_freed
from ckptmgr.engine.reader import Reader
from ckptmgr.engine.steps import OpenItem
from ckptmgr.errors import CorruptCheckpoint, TreeMismatch
from ckptmgr.options import Restore

UNIT_BYTES = 16 * 2**20
"""How much of an array without digests is read at a time."""


def make_plan(item: OpenItem, goals: Goals, options: Restore) -> RestorePlan:
    """What reading `goals` takes."""
    stored = stored_tree(item)
    wanted = []
    for goal in goals.goals:
        if goal.wish is None:
            continue
        size = manifest.itemsize(stored.leaves[goal.leaf].stored_dtype)
        wanted.append(Wanted(goal.leaf, goal.wish.boxes, goal.wish.elements * size))
    return plan.plan_restore(
        stored.leaves,
        wanted,
        whole_chunks=bool(item.digests),
        unit_bytes=UNIT_BYTES,
        host_bytes=options.host_bytes,
        notes=goals.notes,
    )


def read(
    item: OpenItem,
    goals: Goals,
    options: Restore,
    verify: bool,
    step: int | None,
    ready: Callable[[], None] = lambda: None,
) -> Any:
    """Reads, verifies and places every goal; returns the tree.

    Of goals that are spread the devices pass the parts on to each other, which takes all processes:
    `ready` returns when all have read theirs.
    """
    stored = stored_tree(item)
    reads = make_plan(item, goals, options)
    units: dict[int, list[plan.Unit]] = {}
    for unit in reads.units:
        units.setdefault(unit.leaf, []).append(unit)
    reader = Reader(step, stored, item.path, item.digests, compare=verify)
    reader.locate(reads.units)
    results: list[Any] = [None] * len(goals.goals)
    moving: list[Any] = []
    misfits: dict[str, str] = {}
    waves = _waves(goals.goals, stored, options.host_bytes)
    with (
        contextlib.closing(reader),
        contextlib.closing(_read_ahead(reader, waves, goals.goals, stored, units)) as read_in,
    ):
        for wave, into in read_in:
            jax.block_until_ready(moving)
            filled = []
            for goal in (goals.goals[i] for i in wave):
                leaf = stored.leaves[goal.leaf]
                filled.append((goal, _narrowed(goal, leaf, into.pop(goal.leaf), misfits)))
            placed = _place(filled, stored)
            del filled
            moving = [value for value in placed if isinstance(value, jax.Array)]
            for i, value in zip(wave, placed, strict=True):
                results[i] = value
    if misfits:
        raise TreeMismatch(f"step {step}", len(stored.leaves), differing=misfits)
    _broadcast(goals.goals, results, ready)
    for i, goal in enumerate(goals.goals):
        if goal.wish is None:
            value = stored.leaves[goal.leaf].value
            results[i] = int(value or 0) if goal.kind == "python" else value
    give_back_freed(len(units), reads.read_bytes)
    return goals.build(results)


def _broadcast(goals: Sequence[Goal], results: list[Any], ready: Callable[[], None]) -> None:
    """Replaces what was read in parts by the arrays as their goals want them."""
    numbers = [i for i, goal in enumerate(goals) if goal.spread is not None]
    if not numbers:
        return
    ready()
    places = [goals[i].sharding for i in numbers]
    whole = jax.jit(lambda parts: parts, out_shardings=places)([results[i] for i in numbers])
    for i, array in zip(numbers, whole, strict=True):
        results[i] = array


def _read_ahead(
    reader: Reader,
    waves: Iterator[list[int]],
    goals: Sequence[Goal],
    stored: StoredTree,
    units: Mapping[int, Sequence[plan.Unit]],
) -> Generator[tuple[list[int], dict[int, list[np.ndarray]]]]:
    """Each wave with its values, while those of the next are being read."""
    ahead: tuple[list[int], dict[int, list[np.ndarray]]] | None = None
    under_way: list[Callable[[], None]] = []
    try:
        for wave in waves:
            while under_way:
                under_way.pop()()
            boxes = {goals[i].leaf: _boxes(goals[i]) for i in wave}
            room = _Room()
            into = {
                goals[i].leaf: _buffers(goals[i], stored.leaves[goals[i].leaf], room) for i in wave
            }
            wanted = [unit for leaf in into for unit in units.get(leaf, ())]
            under_way.append(reader.start(wanted, boxes, into))
            if ahead is not None:
                yield ahead
            ahead = wave, into
        while under_way:
            under_way.pop()()
        if ahead is not None:
            yield ahead
    finally:
        for finish in under_way:  # nobody asks for it any more
            with contextlib.suppress(CorruptCheckpoint):
                finish()


WAVES, LEAST_WAVE_BYTES = 16, 16 * 2**20
"""A restore goes in about so many waves, none smaller than this: what a device does not take over
without a copy is there twice while its wave is handed over."""


def _waves(goals: Sequence[Goal], stored: StoredTree, host_bytes: int) -> Iterator[list[int]]:
    """Numbers of goals whose values are read and handed over together, a quarter of `host_bytes`
    at most: one wave is read while another is handed over, and a third may be on its way."""
    sizes = [_nbytes(goal, stored) for goal in goals]
    most = min(host_bytes // 4, max(LEAST_WAVE_BYTES, sum(sizes) // WAVES))
    wave: list[int] = []
    held = 0
    for i, goal in enumerate(goals):
        if goal.wish is None:
            continue
        if wave and held + sizes[i] > most:
            yield wave
            wave, held = [], 0
        wave.append(i)
        held += sizes[i]
    if wave:
        yield wave


def _nbytes(goal: Goal, stored: StoredTree) -> int:
    """Bytes of the buffers that a goal is read into."""
    if goal.wish is None:
        return 0
    return goal.wish.distinct * manifest.itemsize(stored.leaves[goal.leaf].stored_dtype)


def _buffers(goal: Goal, leaf: StoredLeaf, room: _Room) -> list[np.ndarray]:
    name = leaf.dtype
    if goal.kind in ("jax", "numpy") and not _is_python_number(leaf):
        name = goal.dtype
    dtype = manifest.dtype_of(name or leaf.stored_dtype)
    shared = _is_array(goal)  # numpy arrays go to the user, who may keep one of thousands
    return [room.array(box.shape, dtype, shared) for box in _boxes(goal)]


def _boxes(goal: Goal) -> tuple[Box, ...]:
    return goal.wish.boxes if goal.wish else ()


def _is_python_number(leaf: StoredLeaf) -> bool:
    return bool(leaf.pytype) and leaf.pytype != "numpy"


def _narrowed(
    goal: Goal, leaf: StoredLeaf, buffers: list[np.ndarray], misfits: dict[str, str]
) -> list[np.ndarray]:
    """A Python number, stored in 64 bits, in the width of its target; it must fit."""
    if goal.kind not in ("jax", "numpy") or not _is_python_number(leaf):
        return buffers
    (value,) = buffers
    narrow = value.astype(goal.dtype)
    if family(goal.dtype) == "int" and narrow.item() != value.item():
        misfits[leaf.dotted] = f"value: stored {value.item()} does not fit {goal.dtype}"
    return [narrow]


_ALIGNMENT = 64
SHARED_BYTES = 2**18
"""Small arrays lie together in pieces of memory of this size: an array keeps no more than that
from being freed."""


class _Room:
    """Fresh memory that the CPU backend can take over without a copy."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)
        self._at = 0

    def array(self, shape: tuple[int, ...], dtype: np.dtype, shared: bool) -> np.ndarray:
        """An array of its own, or, where it is small and `shared`, beside the one before."""
        nbytes = math.prod(shape) * dtype.itemsize
        if not shared or nbytes > SHARED_BYTES // 16:
            return np.ndarray(shape, dtype, *_aligned(nbytes))
        if self._at + nbytes > len(self._memory):
            self._memory, self._at = _aligned(SHARED_BYTES)
        found = np.ndarray(shape, dtype, self._memory, self._at)
        self._at += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        return found


def _aligned(nbytes: int) -> tuple[np.ndarray, int]:
    """Fresh memory, and where in it so many aligned bytes begin."""
    memory = np.empty(nbytes + _ALIGNMENT, np.uint8)
    return memory, -memory.__array_interface__["data"][0] % _ALIGNMENT


def _place(read_in: Sequence[tuple[Goal, list[np.ndarray]]], stored: StoredTree) -> list[Any]:
    """Host buffers as what their goals ask for.

    A buffer belongs to the array made of it: the array may alias it, so none is used again.
    """
    anywhere = [
        buffers[0] for goal, buffers in read_in if _is_array(goal) and goal.sharding is None
    ]
    put = iter(jax.device_put(anywhere))
    return [_result(goal, buffers, stored.leaves[goal.leaf], put) for goal, buffers in read_in]


def _is_array(goal: Goal) -> bool:
    return goal.kind in ("jax", "key")


def _result(
    goal: Goal, buffers: list[np.ndarray], leaf: StoredLeaf, put: Iterator[jax.Array]
) -> Any:
    if _is_array(goal):
        array = next(put) if goal.sharding is None else _on_devices(goal, leaf, buffers)
        if goal.kind == "key":
            return jax.random.wrap_key_data(array, impl=leaf.impl)
        return _weakly_typed(array, goal.sharding) if goal.weak_type else array
    if goal.kind == "bytes":
        return buffers[0].tobytes()
    if goal.kind == "python":
        assert goal.convert is not None
        return goal.convert(buffers[0][()])
    return buffers[0]


def _on_devices(goal: Goal, leaf: StoredLeaf, buffers: Sequence[np.ndarray]) -> jax.Array:
    """One call for all devices: JAX takes 2 us of a shard so, and 20 for an array on its own."""
    assert goal.wish is not None
    sharding = goal.spread or physical(goal.sharding, leaf)
    if not buffers:  # all of it lies in other processes
        dtype = manifest.dtype_of(goal.dtype or leaf.stored_dtype)
        return jax.make_array_from_single_device_arrays(
            leaf.stored_shape, sharding, [], dtype=dtype
        )
    if not goal.wish.devices:  # the index of a shard, as JAX gives it, cuts it out
        return jax.make_array_from_callback(leaf.stored_shape, sharding, buffers[0].__getitem__)
    by_start = {box.start: buffer for box, buffer in zip(goal.wish.boxes, buffers, strict=True)}

    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        return by_start[tuple(cut.start or 0 for cut in index)]

    return jax.make_array_from_callback(leaf.stored_shape, sharding, part)


def _weakly_typed(array: jax.Array, sharding: Any) -> jax.Array:
    """The same values with the weak type that only Python numbers give, where it exists."""
    kinds: dict[str, Any] = {"int": 0, "float": 0.0, "complex": 0j}
    zero = kinds.get(family(array.dtype.name))
    if zero is None or jnp.asarray(zero).dtype != array.dtype:
        return array
    weak = jnp.broadcast_to(jnp.asarray(zero), array.shape).at[...].set(array)
    return weak if sharding is None else jax.device_put(weak, sharding)
