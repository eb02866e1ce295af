"""The states that are saved: their leaves, their mesh, and values that can be computed again.

Every value is a pure function of (seed, leaf, position). So each save has different values, and a
restored state is checked against values computed anew: nothing has to be kept from before the save.

Importing this module does not import jax; the parent process only reads names and sizes.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import ml_dtypes  # noqa: F401  numpy knows bfloat16 by it
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
    """A state (a flat dict of leaves) on a mesh. `kind` is what the targets are set for.

    `restored_on` is the mesh of a restore, with the same axes, where that is another one.
    """

    name: str
    kind: str
    mesh: Mapping[str, int]
    leaves: Mapping[str, Leaf]
    restored_on: Mapping[str, int] | None = None

    @property
    def devices(self) -> int:
        meshes = (self.mesh, self._mesh_restored)
        return max(math.prod(mesh.values()) for mesh in meshes)

    @property
    def _mesh_restored(self) -> Mapping[str, int]:
        return self.restored_on or self.mesh

    @property
    def nbytes(self) -> int:
        return sum(leaf.nbytes for leaf in self.leaves.values())

    def describe(self) -> str:
        on = f"{show_bytes(self.nbytes)} in {len(self.leaves)} leaves on {_devices(self.mesh)}"
        return on if self.restored_on is None else f"{on}, restored on {_devices(self.restored_on)}"

    def like(self) -> dict:
        """The target of a restore: shapes, dtypes and shardings."""
        import jax

        return {
            name: jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=_sharding_on(self._mesh_restored, leaf)
            )
            for name, leaf in self.leaves.items()
        }

    def state(self, seed: int) -> dict:
        """Fresh arrays made by a jitted computation, so that they own their device memory."""
        import jax

        return jax.block_until_ready(
            {
                name: _make(leaf, seed, i, self.mesh)
                for i, (name, leaf) in enumerate(self.leaves.items())
            }
        )

    def leaf(self, name: str, seed: int):
        """One leaf of the state of this seed."""
        return _make(self.leaves[name], seed, list(self.leaves).index(name), self.mesh)

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
            expected = _make(leaf, seed, i, self._mesh_restored)
            if hasattr(got, "sharding") and got.sharding != expected.sharding:
                raise AssertionError(f"{self.name}: leaf {name} came back on {got.sharding}")
            if not np.array_equal(_bits(got), _bits(expected)):
                raise AssertionError(f"{self.name}: leaf {name} came back with other values")


def _devices(mesh: Mapping[str, int]) -> str:
    sizes = [str(size) for size in mesh.values()]
    count = math.prod(mesh.values())
    if count == 1:
        return "1 device"
    return f"{count} devices" if len(sizes) == 1 else f"{' x '.join(sizes)} devices"


def _make(leaf: Leaf, seed: int, index: int, mesh: Mapping[str, int]):
    make = _generator(leaf.shape, leaf.dtype, _sharding_on(mesh, leaf))
    return make(np.uint32(seed), np.uint32(index))


def _sharding_on(mesh: Mapping[str, int], leaf: Leaf):
    return _sharding(tuple(mesh.items()), leaf.spec)


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


def trainstate(smoke: bool) -> Workload:
    """A transformer as it is trained: bf16 parameters, their f32 masters and Adam's m and v.

    Kernels and tables are split over both axes of a 4 x 2 mesh, norms are on every device.
    """
    layers, width, vocabulary = (2, 32, 256) if smoke else (12, 384, 16384)
    both: tuple[str | None, ...] = ("x", "y")
    shapes = {"embedding": (vocabulary, width), "positions": (32 if smoke else 1024, width)}
    for i in range(layers):
        shapes |= {f"layer_{i:02d}_{name}": (width, width) for name in ("q", "k", "v", "o")}
        shapes[f"layer_{i:02d}_up"] = (width, 4 * width)
        shapes[f"layer_{i:02d}_down"] = (4 * width, width)
        shapes |= {f"layer_{i:02d}_norm_{j}": (width,) for j in (1, 2)}
    shapes["norm"] = (width,)
    leaves = {
        f"{part}_{name}": Leaf(shape, dtype, both if len(shape) == 2 else ())
        for part, dtype in (
            ("param", "bfloat16"),
            ("master", "float32"),
            ("m", "float32"),
            ("v", "float32"),
        )
        for name, shape in shapes.items()
    }
    return Workload("trainstate", "trainstate", {"x": 4, "y": 2}, leaves)


def moe(smoke: bool) -> Workload:
    """A mixture of 8 experts: leaves of very different sizes, log-uniform from 4 KiB to `largest`.

    Experts are split over one axis of the mesh, columns over the other; every other leaf is bf16.
    """
    count, largest = (60, 2**16) if smoke else (600, 2**24)
    experts, columns, least = 8, 128, 2**12
    leaves = {}
    for i in range(count):
        dtype = "bfloat16" if i % 2 else "float32"
        place = i * 37 % count  # small and large ones mixed; 37 has no factor in common with count
        size = least * (largest / least) ** (place / (count - 1))
        rows = _round_down(round(size) // (experts * columns * np.dtype(dtype).itemsize))
        leaves[f"leaf_{i:03d}"] = Leaf((experts, rows, columns), dtype, ("x", None, "y"))
    return Workload("moe", "moe", {"x": 4, "y": 2}, leaves)


def _round_down(number: int) -> int:
    """To three significant bits: a tenth of the shapes, each of which takes time to compile."""
    zeros = max(0, number.bit_length() - 3)
    return number >> zeros << zeros


def reshard(state: Workload, x: int, y: int) -> Workload:
    """The state restored on another mesh than it is saved from."""
    name = "reshard_1" if x == y == 1 else f"reshard_{x}x{y}"
    return replace(state, name=name, kind="reshard", restored_on={"x": x, "y": y})


def catalogue(smoke: bool, rows: int = 4096) -> dict[str, Workload]:
    """All workloads by name; 4096 rows make the dense ones 1 GiB. The smoke sizes prove that the
    benchmark runs, and nothing else."""
    rows, count = (64, 100) if smoke else (rows, 3000)
    built = [
        dense("dense1", 1, 16, rows),
        dense("dense8", 8, 16, rows),
        small("small1", 1, count),
        small("small8", 8, count),
        trained := trainstate(smoke),
        moe(smoke),
        *(reshard(trained, x, y) for x, y in ((2, 4), (8, 1), (1, 1))),
    ]
    return {workload.name: workload for workload in built}
