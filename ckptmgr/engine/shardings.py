"""JAX shardings <-> the plain values that `core` plans with."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from ckptmgr.core import boxes
from ckptmgr.core.boxes import Box, Shape
from ckptmgr.core.plan import Shard


def describe(sharding: jax.sharding.Sharding) -> dict[str, Any]:
    """A sharding as JSON: what a restore on another mesh and Orbax's `_sharding` need."""
    if isinstance(sharding, NamedSharding):
        mesh = sharding.mesh
        return {
            "type": "named",
            "axes": [[name, size] for name, size in mesh.shape.items()],
            "axis_types": [f"AxisType.{kind.name}" for kind in mesh.axis_types],
            "spec": [_axes(part) for part in sharding.spec],
            "device_ids": [int(device.id) for device in mesh.devices.flat],
            "memory_kind": sharding.memory_kind,
        }
    devices: list[Any] = sorted(sharding.device_set, key=lambda device: device.id)
    if len(devices) == 1:
        device = devices[0]
        return {
            "type": "single",
            "device": f"{device.platform}:{device.id}",
            "memory_kind": sharding.memory_kind,
        }
    return {"type": "other", "text": str(sharding)}


def _axes(part: Any) -> list[str] | None:
    if part is None or part is PartitionSpec.UNCONSTRAINED:
        return None
    return list(part) if isinstance(part, tuple) else [str(part)]


@dataclass(frozen=True, slots=True)
class Places:
    """Where the shards of one (sharding, shape) lie.

    Attributes:
      shards: every distinct box with the processes that hold it.
      replicated: whether some box lies on more than one device of this process.
    """

    shards: tuple[Shard, ...]
    replicated: bool


class PlacesCache:
    """`Places` by sharding and shape; a tree has few of either."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, Shape], Places] = {}
        self._holders: dict[tuple[int, ...], tuple[int, ...]] = {}

    def __call__(self, array: jax.Array) -> Places:
        key = (array.sharding, array.shape)
        if key not in self._known:
            self._known[key] = self._places(array)
        return self._known[key]

    def _places(self, array: jax.Array) -> Places:
        sharding, shape = array.sharding, array.shape
        position: dict[Box, int] = {}
        local: dict[Any, Any] = dict(sharding.addressable_devices_indices_map(shape))
        for k, index in enumerate(local.values()):
            position.setdefault(boxes.from_index(index, shape), k)
        if is_own(array):
            shards = tuple(Shard(box, (0,), k, True) for box, k in position.items())
            return Places(shards, len(position) < len(local))
        holders: dict[Box, set[int]] = {}
        every: dict[Any, Any] = dict(sharding.devices_indices_map(shape))
        for device, index in every.items():
            holders.setdefault(boxes.from_index(index, shape), set()).add(device.process_index)
        shards = tuple(
            Shard(box, self._one(tuple(sorted(found))), position.get(box, -1))
            for box, found in holders.items()
        )
        return Places(shards, len(position) < len(local))

    def _one(self, holders: tuple[int, ...]) -> tuple[int, ...]:
        """One object for equal sets of holders, which are compared often."""
        return self._holders.setdefault(holders, holders)


def is_own(array: jax.Array) -> bool:
    """Whether each process of the job has such an array of its own, on its own devices.

    JAX gives no sign whether those are the same: the save compares them.
    """
    return jax.process_count() > 1 and array.is_fully_addressable


@dataclass(frozen=True, slots=True)
class Wish:
    """The boxes that this process's devices need of one array.

    Attributes:
      boxes: distinct boxes.
      devices: for each addressable device in the sharding's order: (device, number of its box).
      elements: how many elements all of them hold, every copy counted.
      distinct: how many elements the boxes have.
    """

    boxes: tuple[Box, ...]
    devices: tuple[tuple[Any, int], ...]
    elements: int
    distinct: int


@functools.lru_cache(maxsize=4096)
def wish(sharding: jax.sharding.Sharding, shape: Shape) -> Wish:
    """Raises ValueError where the sharding cannot hold an array of `shape`."""
    if isinstance(sharding, NamedSharding) and len(sharding.spec) > len(shape):
        raise ValueError(f"{sharding.spec} has more dimensions than shape {shape}")
    sharding.shard_shape(shape)
    numbers: dict[Box, int] = {}
    devices = []
    local: dict[Any, Any] = dict(sharding.addressable_devices_indices_map(shape))
    for device, index in local.items():
        box = boxes.from_index(index, shape)
        devices.append((device, numbers.setdefault(box, len(numbers))))
    found = tuple(numbers)
    every = sum(found[number].size for _, number in devices)
    return Wish(found, tuple(devices), every, sum(box.size for box in found))


def spread(sharding: Any, shape: Shape) -> NamedSharding | str:
    """The same mesh with every box cut among the devices that would hold copies of it.

    Where that is not possible, why. The same on every process.
    """
    if not isinstance(sharding, NamedSharding):
        return "its sharding has no mesh"
    mesh = sharding.mesh
    spec = [_axes(part) or [] for part in sharding.spec]
    spec += [[] for _ in range(len(shape) - len(spec))]
    used = {axis for axes in spec for axis in axes}
    if all(axis in used or size == 1 for axis, size in mesh.shape.items()):
        return "no two devices hold the same of it"
    for axis, size in mesh.shape.items():
        if axis in used or size == 1:
            continue
        parts = [math.prod(mesh.shape[name] for name in axes) * size for axes in spec]
        d = next((d for d, n in enumerate(parts) if shape[d] % n == 0), None)
        if d is None:
            return f"no dimension of it is divided by mesh axis {axis!r} of size {size}"
        spec[d].append(axis)
    cut = PartitionSpec(*(tuple(axes) if axes else None for axes in spec))
    return NamedSharding(mesh, cut, memory_kind=sharding.memory_kind)


def needs_of_first(sharding: jax.sharding.Sharding, shape: Shape) -> set[Box]:
    """The boxes that the first process of a sharding needs: the same answer on every process."""
    every: dict[Any, Any] = dict(sharding.devices_indices_map(shape))
    first = min(device.process_index for device in every)
    return {
        boxes.from_index(index, shape)
        for device, index in every.items()
        if device.process_index == first
    }


def on_mesh(
    saved: dict[str, Any] | None, shape: Shape, mesh: Mesh
) -> tuple[NamedSharding, list[str]]:
    """The saved partition spec applied to `mesh`, and what had to be replicated and why."""
    if saved is None or saved["type"] != "named":
        return NamedSharding(mesh, PartitionSpec()), []
    spec: list[Any] = []
    notes: list[str] = []
    for d, axes in enumerate(saved["spec"][: len(shape)]):
        kept: list[str] = []
        for axis in axes or ():
            size = mesh.shape.get(axis)
            if size is None:
                notes.append(f"mesh axis {axis!r} is not in the new mesh, replicated")
            elif shape[d] % (math.prod(mesh.shape[name] for name in kept) * size):
                notes.append(
                    f"mesh axis {axis!r} of size {size} does not divide {shape[d]}, replicated"
                )
            else:
                kept.append(axis)
        spec.append(tuple(kept) if len(kept) > 1 else kept[0] if kept else None)
    while spec and spec[-1] is None:
        spec.pop()
    return NamedSharding(mesh, PartitionSpec(*spec)), notes


def pinned_host(sharding: jax.sharding.Sharding) -> jax.sharding.Sharding | None:
    """The same sharding in host memory that the device can copy to, or None without such."""
    device = next(iter(sharding.device_set))
    return sharding.with_memory_kind("pinned_host") if has_pinned_host(device) else None


_PINNED: dict[tuple[str, str], bool] = {}


def has_pinned_host(device: Any) -> bool:
    """Whether the backend of `device` offers the memory kind "pinned_host"."""
    key = (device.platform, device.device_kind)
    if key not in _PINNED:
        _PINNED[key] = any(m.kind == "pinned_host" for m in device.addressable_memories())
    return _PINNED[key]


def is_on_host(array: jax.Array) -> bool:
    """Whether the host reads the array's memory as it is."""
    device: Any = next(iter(array.sharding.device_set))
    return device.platform == "cpu" or array.sharding.memory_kind in _HOST_KINDS


def is_viewable(array: jax.Array) -> bool:
    """Whether numpy shows the array's memory without a copy of it."""
    return is_on_host(array) and not array.dtype.name.endswith(("int2", "int4", "float4_e2m1fn"))


_HOST_KINDS = ("pinned_host", "unpinned_host")


def single(device: Any, memory_kind: str | None) -> SingleDeviceSharding:
    return SingleDeviceSharding(device, memory_kind=memory_kind)


def topology(trees_shardings: Sequence[Sequence[dict[str, Any]]]) -> dict[str, Any]:
    """What the manifest says about where a step was made."""
    meshes: list[Any] = []
    for shardings in trees_shardings:
        for entry in shardings:
            if entry["type"] == "named" and entry["axes"] not in meshes:
                meshes.append(entry["axes"])
    devices = jax.devices()
    return {
        "processes": jax.process_count(),
        "devices": len(devices),
        "device_kind": devices[0].device_kind,
        "platform": devices[0].platform,
        "meshes": [{"axes": axes} for axes in meshes],
    }
