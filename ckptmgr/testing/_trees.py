"""Trees of every kind of leaf, each of whose values tell the number of the save they belong to.

Values are counted in bits: number n + 1 is number n with one added to every element's bits. So
every dtype meets NaNs of both kinds with payloads, denormals, and a negative zero at every number
below 40, and what a save holds can be told from what the one before it held.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401  registers bfloat16 and friends with numpy
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from ckptmgr.testing.outcome import Broken

Leaves = dict[str, Any]
KEY = "key"
"""The dtype of a kind that stands for typed PRNG keys."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One device leaf: `KEY` as dtype for typed PRNG keys, whose values are their key data."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    sharding: Sharding

    @property
    def plain_dtype(self) -> str:
        return "uint32" if self.dtype == KEY else self.dtype


@functools.lru_cache(maxsize=8)
def meshes(devices: tuple[Any, ...]) -> tuple[Mesh, Mesh, Mesh]:
    """All devices along "x", the same backwards, and as "a" by "b"."""
    every = np.array(devices)
    wide = 2 if len(devices) % 2 == 0 else 1
    return (
        Mesh(every, ("x",)),
        Mesh(every[::-1], ("x",)),
        Mesh(every.reshape(-1, wide), ("a", "b")),
    )


def placements(devices: Sequence[Any]) -> dict[str, tuple[tuple[int, int], Sharding]]:
    """Name -> a shape and one way to place it; host memory only where the backend has it."""
    line, back, grid = meshes(tuple(devices))
    n = len(devices)
    spec: Any = PartitionSpec
    found: dict[str, tuple[tuple[int, int], Sharding]] = {
        "sharded": ((2 * n, 8), NamedSharding(line, spec("x"))),
        "columns": ((8, 2 * n), NamedSharding(line, spec(None, "x"))),
        "backwards": ((2 * n, 8), NamedSharding(back, spec("x"))),
        "both_ways": ((2 * n, 8), NamedSharding(grid, spec("a", "b"))),
        "partly_replicated": ((2 * n, 8), NamedSharding(grid, spec("a"))),
        "replicated": ((8, 8), NamedSharding(line, spec())),
        "first_device": ((8, 8), SingleDeviceSharding(devices[0])),
        "last_device": ((8, 8), SingleDeviceSharding(devices[-1])),
    }
    if any(memory.kind == "pinned_host" for memory in devices[0].addressable_memories()):
        for name in ("sharded", "replicated", "last_device"):
            shape, sharding = found[name]
            found[f"{name}_in_pinned_host"] = shape, sharding.with_memory_kind("pinned_host")
    return found


DTYPES = (
    ["float32", "bfloat16", "float16", "float8_e4m3fn", "complex64"]
    + ["int8", "uint16", "int32", "int4", "bool", KEY]
)  # fmt: skip


def kinds(devices: Sequence[Any]) -> tuple[Kind, ...]:
    """Every placement, every dtype, 0-d, zero-size, and leaves large enough to take a while."""
    places = placements(devices)
    line, last = places["sharded"][1], places["last_device"][1]
    replicated = places["replicated"][1]
    n = len(devices)
    found = [Kind(name, shape, "float32", sharding) for name, (shape, sharding) in places.items()]
    found += [Kind(dtype, (2 * n, 8), dtype, line) for dtype in DTYPES]
    found += [Kind(f"{dtype}_on_last", (8, 4), dtype, last) for dtype in ("bfloat16", "bool", KEY)]
    found += [
        Kind("scalar", (), "float32", replicated),
        Kind("scalar_on_last", (), "int32", last),
        Kind("single_key", (), KEY, last),
        Kind("empty", (0, 8), "float32", replicated),
        Kind("empty_on_last", (8, 0), "bfloat16", last),
        Kind("large_sharded", (n * 128, 2048), "float32", line),
        Kind("large_replicated", (256, 2048), "float32", replicated),
        Kind("large_on_last", (512, 2048), "float32", last),
    ]
    return tuple(found)


def few(devices: Sequence[Any]) -> tuple[Kind, ...]:
    """The placements, and a dtype of each width."""
    wanted = {*placements(devices), "bfloat16", "int8", "bool", KEY, "scalar", "single_key"}
    return tuple(kind for kind in kinds(devices) if kind.name in wanted)


def small(devices: Sequence[Any], count: int, turn: int = 0) -> tuple[Kind, ...]:
    """Many small leaves; another `turn` gives the same names with other dtypes and places."""
    places = list(placements(devices).values())[:8]
    found = []
    for i in range(count):
        group, place = divmod(i, len(places))
        shape, sharding = places[(place + turn) % len(places)]
        if place == 0 and group % 3 == 2:
            shape = (shape[0], 2 * shape[1])
        dtype = DTYPES[(place + 3 * (group % 3) + turn) % len(DTYPES)]
        found.append(Kind(f"leaf{i}", shape, dtype, sharding))
    return tuple(found)


# -- values -------------------------------------------------------------------------------------


def values(kind: Kind, number: int) -> np.ndarray:
    """What the leaf holds at `number`; key data for keys."""
    shape = (*kind.shape, 2) if kind.dtype == KEY else kind.shape
    return counted(shape, kind.plain_dtype, number)


def counted(shape: tuple[int, ...], dtype: str, number: int) -> np.ndarray:
    """An array of any dtype whose bits are a fixed pattern with `number` added to each element."""
    kind = np.dtype(dtype)
    if kind == np.bool_:
        return np.equal((np.arange(math.prod(shape)) + number) % 2, 0).reshape(shape)
    if dtype == "int4":
        return ((np.arange(math.prod(shape)) * 5 + number) % 16 - 8).astype(kind).reshape(shape)
    if dtype == "complex64":
        return counted((*shape, 2), "float32", number).view(kind).reshape(shape)
    unsigned = np.dtype(f"uint{8 * kind.itemsize}")
    bits: np.ndarray = _pattern(math.prod(shape), dtype) + unsigned.type(number)
    return bits.view(kind).reshape(shape)


@functools.lru_cache(maxsize=64)
def _pattern(size: int, dtype: str) -> np.ndarray:
    """A third NaNs with payloads, a third that passes through -0.0, a third of everything."""
    width = 8 * np.dtype(dtype).itemsize
    at = np.arange(size, dtype=np.uint64)
    bits = (at * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(64 - width)
    sign = np.uint64(1 << (width - 1))
    if jnp.issubdtype(np.dtype(dtype), jnp.floating):
        infinity = np.array(np.inf).astype(dtype).view(f"uint{width}").astype(np.uint64)
        bits[0::3] = infinity + np.uint64(1) + sign * (at[0::3] % np.uint64(2))
        bits[1::3] = sign - at[1::3] // np.uint64(3) % np.uint64(40)
    return bits.astype(f"uint{width}")


def build(kinds_: Iterable[Kind], number: int) -> Leaves:
    """The leaves on their devices, in memory of their own."""
    listed = list(kinds_)
    hosts = [values(kind, number) for kind in listed]
    arrays = jax.device_put(hosts, [kind.sharding for kind in listed], may_alias=False)
    return {
        kind.name: jax.random.wrap_key_data(array) if kind.dtype == KEY else array
        for kind, array in zip(listed, arrays, strict=True)
    }


def _next(array: Any) -> Any:
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(jax.random.key_data(array) + 1)
    if array.dtype == jnp.bool_:
        return ~array
    if array.dtype == jnp.int4:
        return ((array.astype(jnp.int32) + 9) % 16 - 8).astype(jnp.int4)
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        return jax.lax.complex(_next(array.real), _next(array.imag))
    unsigned = jnp.dtype(f"uint{8 * array.dtype.itemsize}")
    bits = jax.lax.bitcast_convert_type(array, unsigned)
    return jax.lax.bitcast_convert_type(bits + 1, array.dtype)


_donating = jax.jit(_next, donate_argnums=0)


# -- what a training loop does to its leaves ----------------------------------------------------


def donate(leaves: Leaves, kinds_: Iterable[Kind], number: int) -> Leaves:
    """The leaves of `number`, made from those before by donating them.

    What lies in host memory is deleted and made anew where a jit cannot take it. Raises Broken
    where a leaf was not given up.
    """
    out: Leaves = {}
    for kind in kinds_:
        old = leaves[kind.name]
        device: Any = next(iter(kind.sharding.device_set))
        if kind.sharding.memory_kind == "pinned_host" and device.platform != "cpu":
            old.delete()
            out |= build([kind], number)
        else:
            out[kind.name] = _donating(old)
        if not old.is_deleted():
            raise Broken(f"leaf {kind.name!r}: donation was refused, so something holds a view")
    return out


def delete(leaves: Leaves, kinds_: Iterable[Kind], number: int) -> Leaves:
    """The leaves of `number`; those before are deleted. Raises Broken where one still lives."""
    for kind in kinds_:
        leaves[kind.name].delete()
        if not leaves[kind.name].is_deleted():
            raise Broken(f"leaf {kind.name!r}: it is still there after delete()")
    return build(kinds_, number)


# -- host leaves --------------------------------------------------------------------------------


class Host:
    """Host leaves: arrays to change in place, views of such, 0-d, Fortran order, plain values."""

    def __init__(self, number: int) -> None:
        self._bases: dict[str, np.ndarray] = {
            "plain": np.empty((16, 8), np.float32),
            "strided": np.empty((32, 16), np.float64),
            "transposed": np.empty((8, 16), "bfloat16"),
            "fortran": np.empty((8, 16), np.int32, order="F"),
            "read_only": np.empty((16,), np.uint8),
            "zero_d": np.empty((), np.int64),
            "empty": np.empty((0, 3), np.float32),
            "flags": np.empty((33,), np.bool_),
            "large": np.empty((512, 512), np.float32),
        }
        views = {"strided": self._bases["strided"][3:27:2, ::-3]}
        views["transposed"] = self._bases["transposed"].T
        views["read_only"] = self._bases["read_only"].view()
        views["read_only"].flags.writeable = False
        self._bytes = bytearray(8)
        self.leaves: Leaves = {**self._bases, **views, "bytes": self._bytes}
        self.set(number)

    def set(self, number: int) -> None:
        """Overwrites every leaf in place; what cannot be is replaced."""
        for base in self._bases.values():
            base[...] = counted(base.shape, base.dtype.name, number)
        self._bytes[:] = counted((8,), "uint8", number).tobytes()
        plain = {
            "count": number,
            "huge": 2**70 + number,
            "real": number + 0.5,
            "text": f"n{number}",
        }
        numpys = {"half": np.float16(number), "wide": np.int64(number)}
        self.leaves |= {**plain, **numpys, "odd": number % 2 == 1}


def aligned(size: int) -> np.ndarray:
    """float32 memory that a backend may take over as it lies."""
    raw = np.empty(4 * size + 128, np.uint8)
    start = -raw.ctypes.data % 128
    return raw[start : start + 4 * size].view(np.float32)


# -- comparing ----------------------------------------------------------------------------------


def differences(
    found: Mapping[str, Any], wanted: Mapping[str, Any], other: Callable[[str, int], Any]
) -> list[str]:
    """What differs, bit for bit, by leaf. `other(name, n)` is what the leaf holds at number n."""
    if sorted(found) != sorted(wanted):
        return [f"expected the leaves {sorted(wanted)}, found {sorted(found)}"]
    return [
        text for name in wanted if (text := _difference(name, found[name], wanted[name], other))
    ]


def _difference(name: str, found: Any, wanted: Any, other: Callable[[str, int], Any]) -> str:
    right, got = _as_numpy(wanted), _as_numpy(found)
    if (got.dtype, got.shape) != (right.dtype, right.shape):
        return f"leaf {name!r}: expected {right.dtype}{right.shape}, found {got.dtype}{got.shape}"
    if got.tobytes() == right.tobytes():
        return ""
    width = right.dtype.itemsize
    unlike = np.flatnonzero(np.any(_bytes(got) != _bytes(right), axis=1))
    where = tuple(int(i) for i in np.unravel_index(unlike[0], right.shape))
    told = [_bytes(a)[unlike[0], ::-1].tobytes().hex() for a in (right, got)]
    whose = [n for n in range(64) if _as_numpy(other(name, n)).tobytes() == got.tobytes()]
    return (
        f"leaf {name!r}: {len(unlike)} of {right.size} elements differ, the first at {where}: "
        f"expected 0x{told[0]}, found 0x{told[1]} ({width} bytes)"
        + (f"; these are the values of number {whose[0]}" if whose else "")
    )


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.frombuffer(array.tobytes(), np.uint8).reshape(array.size, array.dtype.itemsize)


def _as_numpy(value: Any) -> np.ndarray:
    if isinstance(value, (bytes, bytearray)):
        return np.frombuffer(bytes(value), np.uint8)
    if isinstance(value, (bool, int, float, str)) and not isinstance(value, np.generic):
        return np.frombuffer(repr(value).encode(), np.uint8)
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return np.array(jax.random.key_data(value))
    return np.array(value, order="C")
