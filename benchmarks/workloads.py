"""The states that are saved: their leaves, their mesh, and values that can be computed again.

Every value is a pure function of (seed, leaf, position). So each save has different values, and a
restored state is checked against values computed anew: nothing has to be kept from before the save.

Importing this module does not import jax; the parent process only reads names and sizes.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from report import show_bytes

FIRST_AXIS_OVER_X = ("x",)


@dataclass(frozen=True)
class Leaf:
    """Shape and dtype of one array, and the mesh axis that each dimension is split over."""

    shape: tuple[int, ...]
    dtype: str = "float32"
    spec: tuple[str | None, ...] = FIRST_AXIS_OVER_X

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Workload:
    """A state (a flat dict of leaves) on a mesh. `kind` is what the targets are set for."""

    name: str
    kind: str
    mesh: Mapping[str, int]
    leaves: Mapping[str, Leaf]

    @property
    def devices(self) -> int:
        return math.prod(self.mesh.values())

    @property
    def nbytes(self) -> int:
        return sum(leaf.nbytes for leaf in self.leaves.values())

    def describe(self) -> str:
        devices = "1 device" if self.devices == 1 else f"{self.devices} devices"
        return f"{show_bytes(self.nbytes)} in {len(self.leaves)} leaves on {devices}"

    def like(self) -> dict:
        """The target of a restore: shapes, dtypes and shardings."""
        import jax

        return {
            name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=self._sharding(leaf))
            for name, leaf in self.leaves.items()
        }

    def state(self, seed: int) -> dict:
        """Fresh arrays made by a jitted computation, so that they own their device memory."""
        import jax

        return jax.block_until_ready(
            {name: self._make(leaf, seed, i) for i, (name, leaf) in enumerate(self.leaves.items())}
        )

    def leaf(self, name: str, seed: int):
        """One leaf of the state of this seed."""
        return self._make(self.leaves[name], seed, list(self.leaves).index(name))

    def verify(self, restored: Mapping, seed: int) -> None:
        """Raise unless `restored` is, bit for bit and on its mesh, the state of this seed."""
        if set(restored) != set(self.leaves):
            raise AssertionError(f"{self.name}: the restored tree has other leaves")
        for i, (name, leaf) in enumerate(self.leaves.items()):
            got = restored[name]
            if (got.shape, got.dtype) != (leaf.shape, leaf.dtype):
                raise AssertionError(
                    f"{self.name}: leaf {name} came back as {got.dtype}{got.shape}"
                )
            expected = self._make(leaf, seed, i)
            if hasattr(got, "sharding") and got.sharding != expected.sharding:
                raise AssertionError(f"{self.name}: leaf {name} came back on {got.sharding}")
            if not np.array_equal(_bits(got), _bits(expected)):
                raise AssertionError(f"{self.name}: leaf {name} came back with other values")

    def _sharding(self, leaf: Leaf):
        return _sharding(tuple(self.mesh.items()), leaf.spec)

    def _make(self, leaf: Leaf, seed: int, index: int):
        make = _generator(leaf.shape, leaf.dtype, self._sharding(leaf))
        return make(np.uint32(seed), np.uint32(index))


@functools.cache
def _sharding(mesh: tuple[tuple[str, int], ...], spec: tuple[str | None, ...]):
    import jax

    axes, sizes = zip(*mesh, strict=True)
    devices = np.array(jax.devices()[: math.prod(sizes)]).reshape(sizes)
    return jax.NamedSharding(jax.sharding.Mesh(devices, axes), jax.P(*spec))


@functools.cache
def _generator(shape: tuple[int, ...], dtype: str, sharding):
    """Compiled once per kind of leaf: a hash of the position, as floats in [-0.5, 0.5)."""
    import jax
    import jax.numpy as jnp

    def scramble(x):  # the 32-bit finalizer of MurmurHash3
        x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
        x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
        return x ^ (x >> 16)

    def values(seed, index):
        position = jnp.zeros(shape, jnp.uint32)
        for axis, size in enumerate(shape):
            position = position * jnp.uint32(size) + jax.lax.broadcasted_iota("uint32", shape, axis)
        mixed = scramble(position ^ scramble(index ^ scramble(seed)))
        one_to_two = jax.lax.bitcast_convert_type((mixed >> 9) | jnp.uint32(0x3F800000), "float32")
        return (one_to_two - 1.5).astype(dtype)

    return jax.jit(values, out_shardings=sharding)


def _bits(array) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def dense(name: str, devices: int, leaves: int, rows: int) -> Workload:
    """Large leaves of rows x 4096 floats, 16 KiB a row."""
    return Workload(
        name,
        "dense",
        {"x": devices},
        {f"layer_{i:02d}": Leaf((rows, 4096)) for i in range(leaves)},
    )


def small(name: str, devices: int, leaves: int) -> Workload:
    """Many leaves of 16 KiB."""
    return Workload(
        name, "small", {"x": devices}, {f"leaf_{i:04d}": Leaf((64, 64)) for i in range(leaves)}
    )


def catalogue(smoke: bool, rows: int = 4096) -> dict[str, Workload]:
    """All workloads by name; 4096 rows make the dense ones 1 GiB. The smoke sizes prove that the
    benchmark runs, and nothing else."""
    rows, count = (64, 100) if smoke else (rows, 3000)
    built = [
        dense("dense1", 1, 16, rows),
        dense("dense8", 8, 16, rows),
        small("small1", 1, count),
        small("small8", 8, count),
    ]
    return {workload.name: workload for workload in built}
