"""Leaf digests at the speed of compiled code: of host arrays on the CPU, of shards where they lie.

The sums of a host array are taken by a program for XLA's CPU backend, which is there beside
accelerators. It works through blocks of two fixed sizes and is given positions as arguments, so
the number of programs does not grow with the shapes of a tree: two sizes, three widths of a word,
and two forms, one where positions ascend in steps of `GROUP` words and one for any positions. The
call keeps nothing of what it is given, so that may be a view of JAX's memory.

A shard on an accelerator is summed by its own device, by a program for its shape and dtype with
the place of the shard as arguments; small shards come to the host. No program is a collective, and
all may be called from any thread.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ckptmgr.core import boxes
from ckptmgr.core.boxes import Box, Shape
from ckptmgr.core.leafdigest import (
    HIGH_SALTS,
    MULTIPLIERS,
    ZERO,
    Runs,
    Sums,
    add,
    finish,
    high_keys,
    of_words,
    raw_words,
    words_per_element,
)
from ckptmgr.engine import leaves, shardings

LARGE, SMALL = 2**18, 2**15
"""Words of a block; the last one of an array is padded."""

GROUP = 128
"""Words with ascending positions in the form for long runs."""

NUMPY_WORDS = 2**13
"""Up to so many words, alone or left over, the form in numpy is the quicker one."""

ON_DEVICE_WORDS = 2**16
"""From so many words on a shard of an accelerator is summed there."""


def partial(values: np.ndarray, box: Box, shape: Shape) -> Sums:
    """The sums of one piece of a leaf; what `core.leafdigest.partial` gives, sooner."""
    if values.shape != box.shape:
        raise ValueError(f"values of shape {values.shape} are not those of the box {box}")
    words = raw_words(values)
    runs = Runs.of(box, shape, words_per_element(values.dtype))
    if _cpu() is None:
        return of_words(words, runs, 0, words.size)
    group = 1 if runs.counts and runs.length % GROUP else GROUP
    total = ZERO
    for start, stop, size in _blocks(words.size):
        block = words[start:stop]
        ends = runs.at(np.array([start, stop - 1], np.uint64))
        high = int(ends[0]) >> 32
        if block.size <= NUMPY_WORDS or high != int(ends[1]) >> 32:  # that once in 2**32 words
            total = add(total, of_words(block, runs, start, stop))
        else:
            total = add(total, _of_block(block, _low(runs, start, stop, group), high, size, group))
    return total


def of_array(array: jax.Array) -> str:
    """The leaf digest of an array, as it would be stored without a cast.

    Raises ValueError for an array that other processes have a part of.
    """
    if not array.is_fully_addressable:
        raise ValueError("other processes hold parts of the array; add the sums of all")
    dtype = leaves.stored_dtype(array.dtype.name)
    return finish(sums_of_array(array), dtype, array.shape)


def sums_of_array(array: jax.Array, only: Collection[Box] | None = None) -> Sums:
    """The sums of the distinct shards that this process has, or of those whose box is in `only`."""
    places: dict[Any, Any] = dict(
        array.sharding.addressable_devices_indices_map(array.shape)
    )  # in the order of addressable_data
    distinct: dict[Box, int] = {}
    for position, index in enumerate(places.values()):
        distinct.setdefault(boxes.from_index(index, array.shape), position)
    wanted = [(box, k) for box, k in distinct.items() if box.size and (only is None or box in only)]
    words = words_per_element(np.dtype(array.dtype))
    running, total = [], ZERO
    for box, position in wanted:
        shard = array.addressable_data(position)
        if not shardings.is_on_host(array) and box.size * words >= ON_DEVICE_WORDS:
            running.append(start_on_device(shard, box, array.shape))
        else:
            total = add(total, _of_host_shard(shard, box, array.shape))
    for sums in running:
        total = add(total, _as_sums(sums))
    return total


def _of_host_shard(shard: jax.Array, box: Box, shape: Shape) -> Sums:
    # JAX keeps the host copy of an array on the array; this one goes with the call
    own = jax.make_array_from_single_device_arrays(shard.shape, shard.sharding, [shard])
    return partial(np.asarray(own), box, shape)


def start_on_device(shard: jax.Array, box: Box, shape: Shape) -> jax.Array:
    """The sums of a shard that lies on one device, being taken there.

    Positions are told apart by their low halves alone where all have the same high half.
    """
    words = words_per_element(np.dtype(shard.dtype))
    steps = [words] * (len(shape) + 1)
    for d in reversed(range(len(shape))):
        steps[d] = steps[d + 1] * shape[d]
    steps = steps[1:]
    first = sum(a * step for a, step in zip(box.start, steps, strict=True))
    last = sum((b - 1) * step for b, step in zip(box.stop, steps, strict=True)) + words - 1
    wide = first >> 32 != last >> 32
    numbers = [first, *steps]
    low = np.array([n % 2**32 for n in numbers], np.uint32)
    high = np.array([n >> 32 for n in numbers], np.uint32)
    with _own_settings():
        return _sum_shard(shard, low, high, np.array(high_keys(first >> 32), np.uint32), wide=wide)


@contextlib.contextmanager
def _own_settings() -> Iterator[None]:
    """What a user forbids for the training is not meant for these programs."""
    with jax.transfer_guard("allow"), jax.disable_jit(False):
        yield


def _as_sums(sums: Any) -> Sums:
    w, x, y, z = (int(lane) for lane in np.asarray(sums))
    return w, x, y, z


# -- blocks of host memory ------------------------------------------------------------------------


def _blocks(total: int) -> Iterator[tuple[int, int, int]]:
    """(start, stop, size of the program) of blocks over so many words."""
    start = 0
    while start < total:
        size = LARGE if total - start > 4 * SMALL else SMALL
        yield start, min(start + size, total), size
        start += size


def _low(runs: Runs, start: int, stop: int, group: int) -> np.ndarray:
    """Low halves of the positions of every `group`th word."""
    if group == 1:
        return runs.positions(start, stop).astype(np.uint32)
    return runs.at(np.arange(start, stop, group, dtype=np.uint64)).astype(np.uint32)


def _of_block(words: np.ndarray, low: np.ndarray, high: int, size: int, group: int) -> Sums:
    program = _program(words.dtype.name, size, group)
    numbers = np.array([*high_keys(high), words.size], np.uint32)
    # The runtime lets go of an argument some time after the result is there. Copies may wait for
    # that; a view of JAX's memory would block its donation until then.
    words = _SCRATCH.copy("words", words, size)
    low = _SCRATCH.copy("low", low, size // group)
    with _own_settings():
        return _as_sums(program(words, low, numbers))


class _Scratch(threading.local):
    """Memory of a thread for the block that it is at, which is read no more when its sums are there."""

    def __init__(self) -> None:
        self._arrays: dict[tuple[str, str, int], np.ndarray] = {}

    def copy(self, use: str, values: np.ndarray, size: int) -> np.ndarray:
        """`values` at the begin of an array of `size`; what lies behind them is arbitrary."""
        key = (use, values.dtype.name, size)
        if key not in self._arrays:
            self._arrays[key] = np.zeros(size, values.dtype)
        out = self._arrays[key]
        out[: values.size] = values
        return out


_SCRATCH = _Scratch()
_WIDE_VECTORS: dict[str, str | bool] = {"xla_cpu_prefer_vector_width": "512"}
"""A fifth sooner where the processor has them, no difference elsewhere."""

_COMPILING = threading.Lock()
_PROGRAMS: dict[tuple[str, int, int], Any] = {}


def _program(dtype: str, size: int, group: int) -> Any:
    """Compiled once for the process, whatever the settings of the thread that asks first."""
    key = (dtype, size, group)
    found = _PROGRAMS.get(key)
    if found is None:
        with _COMPILING:
            found = _PROGRAMS.get(key)
            if found is None:
                found = _PROGRAMS[key] = _compile(*key)
    return found


def _compile(dtype: str, size: int, group: int) -> Any:
    place = shardings.single(_cpu(), None)
    arguments = [
        jax.ShapeDtypeStruct(shape, kind, sharding=place)
        for shape, kind in (((size,), dtype), ((size // group,), "uint32"), ((3,), "uint32"))
    ]
    lowered = jax.jit(functools.partial(_sum_block, group=group)).lower(*arguments)
    try:
        return lowered.compile(_WIDE_VECTORS)
    except Exception:  # an XLA without that option
        return lowered.compile()


@functools.cache
def _cpu() -> Any:
    """The device of the CPU backend, None where a process was told to have none."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return None


def _sum_block(words: jax.Array, low: jax.Array, numbers: jax.Array, *, group: int) -> jax.Array:
    """Four sums over the first `count` words; `numbers` are the two keys and the count."""
    k1, k2, count = numbers[0], numbers[1], numbers[2]
    index = lax.iota(jnp.uint32, words.size)
    if group > 1:
        shape = (words.size // group, group)
        low = low[:, None] + lax.broadcasted_iota(jnp.uint32, shape, 1)
        words, index = words.reshape(shape), index.reshape(shape)
    lanes = _mix(words.astype(jnp.uint32), low ^ k1, k2)
    return _sum([jnp.where(index < count, lane, jnp.uint32(0)) for lane in lanes])


# -- shards on a device ---------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames="wide")
def _sum_shard(
    shard: jax.Array, low: jax.Array, high: jax.Array, keys: jax.Array, *, wide: bool
) -> jax.Array:
    """Four sums over a shard.

    Args:
      shard: on one device.
      low, high: halves of the position of its first word, and of what each axis adds a step.
      keys: of the high half, where that is the same everywhere.
      wide: whether it is not.
    """
    words = _device_words(shard)
    steps = [*range(1, shard.ndim + 1)]
    if not wide:
        at = jnp.full(words.shape, low[0])
        for axis, step in enumerate(steps):
            at += lax.broadcasted_iota(jnp.uint32, words.shape, axis) * low[step]
        if words.ndim > shard.ndim:
            at += lax.broadcasted_iota(jnp.uint32, words.shape, shard.ndim)
        return _sum(_mix(words, at ^ keys[0], keys[1]))
    at, over = jnp.full(words.shape, low[0]), jnp.full(words.shape, high[0])
    for axis, step in enumerate(steps):
        index = lax.broadcasted_iota(jnp.uint32, words.shape, axis)
        at, over = _plus(at, over, *_times(index, low[step], high[step]))
    if words.ndim > shard.ndim:
        last = lax.broadcasted_iota(jnp.uint32, words.shape, shard.ndim)
        at, over = _plus(at, over, last, jnp.zeros_like(last))
    k1, k2 = (_lowbias32(over ^ jnp.uint32(salt)) for salt in HIGH_SALTS)
    return _sum(_mix(words, at ^ k1, k2))


def _device_words(array: jax.Array) -> jax.Array:
    """The words of an array; those of wider elements along a last axis of their own."""
    if array.dtype == jnp.bool_:
        return array.astype(jnp.uint32)
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        halves = [_device_words(half) for half in (lax.real(array), lax.imag(array))]
        if halves[0].ndim == array.ndim:
            return jnp.stack(halves, axis=-1)
        return jnp.concatenate(halves, axis=-1)
    bits = jax.dtypes.itemsize_bits(array.dtype)
    if bits > 32:
        return lax.bitcast_convert_type(array, jnp.uint32)
    return lax.bitcast_convert_type(array, f"uint{bits}").astype(jnp.uint32)


def _times(a: jax.Array, low: jax.Array, high: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Halves of a 32-bit number times a 64-bit one, modulo 2**64."""
    half, mask = jnp.uint32(16), jnp.uint32(0xFFFF)
    a0, a1, b0, b1 = a & mask, a >> half, low & mask, low >> half
    middle = a1 * b0 + ((a0 * b0) >> half)
    other = a0 * b1 + (middle & mask)
    return a * low, a1 * b1 + (middle >> half) + (other >> half) + a * high


def _plus(
    low: jax.Array, high: jax.Array, low2: jax.Array, high2: jax.Array
) -> tuple[jax.Array, jax.Array]:
    total = low + low2
    return total, high + high2 + (total < low2).astype(jnp.uint32)


# -- the mix --------------------------------------------------------------------------------------


def _mix(words: jax.Array, b: jax.Array, k2: jax.Array) -> list[jax.Array]:
    """What each word adds to the four sums; `b` are the low halves with the first key."""
    a = words ^ k2
    a += _round(b, 0)
    b ^= _round(a, 1)
    lanes = []
    for number in (2, 4):
        a += _round(b, number)
        b ^= _round(a, number + 1)
        lanes += [a, b]
    return lanes


def _round(half: jax.Array, number: int) -> jax.Array:
    out = (half ^ (half >> jnp.uint32(16))) * jnp.uint32(MULTIPLIERS[number])
    return out ^ (out >> jnp.uint32(15))


def _lowbias32(x: jax.Array) -> jax.Array:
    x = (x ^ (x >> jnp.uint32(16))) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> jnp.uint32(15))) * jnp.uint32(0x846CA68B)
    return x ^ (x >> jnp.uint32(16))


def _sum(lanes: Sequence[jax.Array]) -> jax.Array:
    """One reduction of all four, which XLA makes one loop of; four would each mix again."""
    zero = np.uint32(0)

    def plus(a: Sequence[jax.Array], b: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        return tuple(x + y for x, y in zip(a, b, strict=True))

    return jnp.stack(lax.reduce(tuple(lanes), (zero,) * 4, plus, tuple(range(lanes[0].ndim))))
