"""What a snapshot copies, in which wave, and how: worked out once per structure of a tree.

A `Load` is one piece of host memory: an array with all its local shards, one shard, or many small
ones gathered. Loads belong to the wave of writes that needs them first and are given back after
the wave that needs them last. Nothing here copies or looks at values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from ckptmgr.core import plan as plans
from ckptmgr.core.boxes import Shape
from ckptmgr.core.plan import SavePlan, Wave
from ckptmgr.engine import blocks, shardings
from ckptmgr.engine.blocks import Block
from ckptmgr.engine.leaves import Source
from ckptmgr.engine.memory import Kind
from ckptmgr.engine.programs import Copy, Gather

GATHER_BYTES = 64 * 2**10
"""Pieces up to this size, per device, may be gathered: on an accelerator they are put together in
its own memory."""

HOST_GATHER_BYTES = 2**20
"""The same where they are put together on the host, which costs nothing besides."""

GATHER_FROM, HOST_GATHER_FROM = 256, 64
"""Gathered only where a wave saves so many single transfers; a few are quick. Each wave's programs
are compiled once."""

HOST_GATHER_MEAN = 256 * 2**10
"""On the host only pieces of at most this size on average: a few large ones are as quick one by one,
and put together they leave the C library with twice the freed memory."""

GATHER_ARRAYS = 250
"""Arrays in one program; its compilation takes as long as all of them."""

How = Literal["view", "host", "now", "put", "gather"]


@dataclass(frozen=True, slots=True)
class Member:
    """Where the local pieces of one array lie in a gathered load.

    Attributes:
      leaf: number of the leaf.
      position: which of its local shards; None for all of them.
      start, size: words.
      shape, dtype: of one piece.
    """

    leaf: int
    position: int | None
    start: int
    size: int
    shape: Shape
    dtype: Any


@dataclass(frozen=True, slots=True, eq=False)
class Load:
    """One piece of host memory.

    Attributes:
      how: "view": read where it lies, nothing is copied. "host": copied from the user's numpy
        array. "now": copied before the call returns, on backends without pinned_host. "put": a
        transfer to `out`. "gather": the transfer of a program.
      leaf, position: of what is not gathered; position None for every local shard.
      nbytes: bytes of host memory it takes.
      kind: of buffers that it could use and leave behind; None where they are not kept.
      copy: of "put", how a program would write over a kept buffer.
      gather: of "gather", the program; transfers do where it is not compiled.
      members: of "gather"; a piece on the n-th device of an array lies on the n-th of `out`.
      out: of "put", and of what a gather leaves on its device: where in host memory it goes.
    """

    how: How
    leaf: int = -1
    position: int | None = None
    nbytes: int = 0
    kind: Kind | None = None
    copy: Copy | None = None
    gather: Gather | None = None
    members: tuple[Member, ...] = ()
    out: Sharding | None = None


@dataclass(frozen=True, slots=True)
class Recipe:
    """How the values of one item reach the host.

    Attributes:
      mode: as `make` was told.
      plan: what is written.
      waves: the plan, cut into waves.
      loads: for each wave what has to be loaded for it.
      frees: for each wave what nobody needs after it.
      where: (leaf, local shard, or None for all) -> its load.
      members: the same of what is gathered -> its place there.
      nbytes: host memory that all loads take.
      blocks: of each wave what is written by keys, and the rest.
    """

    mode: str
    plan: SavePlan
    waves: tuple[Wave, ...]
    loads: tuple[tuple[Load, ...], ...]
    frees: tuple[tuple[Load, ...], ...]
    where: Mapping[tuple[int, int | None], Load]
    members: Mapping[tuple[int, int | None], Member]
    nbytes: int
    blocks: tuple[tuple[tuple[Block, ...], Wave], ...] = ()

    def load_of(self, leaf: int, position: int) -> tuple[Load, tuple[int, int | None]]:
        """The load that has a local shard, and what the shard is called there."""
        load = self.where.get((leaf, position))
        if load is not None:
            return load, (leaf, position)
        return self.where[leaf, None], (leaf, None)

    def follows(self, leaf: int, position: int, other: int) -> bool:
        """Whether this shard of `other` lies right behind that of `leaf`, and is alike."""
        (load, key), (then, behind) = self.load_of(leaf, position), self.load_of(other, position)
        if load is not then or not load.members:
            return False
        a, b = self.members[key], self.members[behind]
        return b.start == a.start + a.size and (a.size, a.shape, a.dtype, a.position is None) == (
            b.size,
            b.shape,
            b.dtype,
            b.position is None,
        )

    @property
    def kinds(self) -> set[Kind]:
        """Kinds of buffers that its loads leave behind."""
        return {load.kind for wave in self.loads for load in wave if load.kind is not None}


@dataclass(slots=True)
class _Cook:
    mode: str
    plan: SavePlan
    sources: Sequence[Source]
    places: shardings.PlacesCache
    whole_bytes: int | None  # larger arrays go shard by shard
    where: dict[tuple[int, int | None], Load] = field(default_factory=dict)
    whole: dict[int, bool] = field(default_factory=dict)
    hosts: dict[Sharding, Sharding | None] = field(default_factory=dict)

    def id_of(self, leaf: int, position: int) -> tuple[int, int | None]:
        """What the local shard is loaded with: its whole array or itself."""
        if leaf not in self.whole:
            source = self.sources[leaf]
            self.whole[leaf] = not isinstance(source, jax.Array) or self._goes_whole(source)
        return leaf, None if self.whole[leaf] else position

    def host(self, sharding: Sharding) -> Sharding | None:
        """The same sharding in pinned_host memory."""
        if sharding not in self.hosts:
            self.hosts[sharding] = shardings.pinned_host(sharding)
        return self.hosts[sharding]

    def _goes_whole(self, array: jax.Array) -> bool:
        """One transfer for all shards: only where every shard is ours and lies on one device.

        A transfer of an array of several processes would compile a program that all must call.
        """
        fits = self.whole_bytes is None or array.nbytes <= self.whole_bytes
        if is_viewed(self.mode, array):
            return fits or shardings.is_on_host(array)
        return (
            fits
            and array.is_fully_addressable
            and not self.places(array).replicated
            and self.host(array.sharding) is not None
        )

    def load(self, leaf: int, position: int | None) -> Load:
        source = self.sources[leaf]
        assert source is not None
        if isinstance(source, np.ndarray):
            buffer = ("numpy", source.shape, source.dtype) if self._keeps else None
            return Load("host", leaf, None, source.nbytes, kind=buffer)
        if is_viewed(self.mode, source) and shardings.is_on_host(source):
            return Load("view", leaf)
        shape, sharding = _piece(source, position)
        nbytes = math.prod(shape) * source.dtype.itemsize
        if is_viewed(self.mode, source):
            return Load("view", leaf, position, nbytes)
        out = self.host(sharding)
        if out is None:
            return Load("now", leaf, position, nbytes)
        copy = None
        if self._keeps_of(source) and nbytes and _is_plain(source.dtype) and _on_device(source):
            copy = Copy(shape, source.dtype.name, sharding, out)
        return Load("put", leaf, position, nbytes, kind=copy, copy=copy, out=out)

    @property
    def _keeps(self) -> bool:
        return self.mode == "double_buffer"

    def _keeps_of(self, array: jax.Array) -> bool:
        """Whether buffers for the array are ours to keep, see `programs`."""
        return self._keeps and shardings.is_on_host(array)

    def is_small(self, leaf: int, position: int | None) -> bool:
        source = self.sources[leaf]
        if not isinstance(source, jax.Array) or is_viewed(self.mode, source):
            return False
        _, sharding = _piece(source, position)
        nbytes = _bytes_on_each(source, position)
        return (
            0 < nbytes <= (HOST_GATHER_BYTES if shardings.is_on_host(source) else GATHER_BYTES)
            and _is_plain(source.dtype)
            and source.dtype.itemsize <= 4
            and isinstance(sharding, (NamedSharding, SingleDeviceSharding))
            and self.host(sharding) is not None
            and _on_device(source)
        )

    def gathers(self, ids: Sequence[tuple[int, int | None]]) -> list[Load]:
        """Loads for the small pieces of a wave, grouped by mesh or device and by width."""
        groups: dict[Any, list[tuple[int, int | None]]] = {}
        transfers, nbytes, least = 0, 0, HOST_GATHER_FROM
        for leaf, position in ids:
            source = self.sources[leaf]
            assert isinstance(source, jax.Array)
            _, sharding = _piece(source, position)
            place: Any = next(iter(sharding.device_set))
            if isinstance(sharding, NamedSharding):
                place = sharding.mesh
            groups.setdefault((place, source.dtype.itemsize), []).append((leaf, position))
            devices = len(sharding.device_set)
            transfers += devices
            nbytes += devices * _bytes_on_each(source, position)
            if not shardings.is_on_host(source):
                least = GATHER_FROM
        if transfers < least or nbytes > transfers * HOST_GATHER_MEAN:
            return [self.load(*one) for one in ids]
        found = []
        for (_, width), members in groups.items():
            for first in range(0, len(members), GATHER_ARRAYS):
                found.append(self._gather(members[first : first + GATHER_ARRAYS], width))
        return found

    def _gather(self, ids: Sequence[tuple[int, int | None]], width: int) -> Load:
        members = []
        inputs = []
        start = 0
        for leaf, position in ids:
            source = self.sources[leaf]
            assert isinstance(source, jax.Array)
            shape, sharding = _piece(source, position)
            local = sharding.shard_shape(shape)
            size = math.prod(local)
            members.append(Member(leaf, position, start, size, local, source.dtype))
            inputs.append((shape, source.dtype.name, sharding))
            start += size
        last = self.sources[ids[-1][0]]  # all lie on the same devices
        assert isinstance(last, jax.Array)
        flat = _flat(sharding)
        out = self.host(flat) if shardings.is_on_host(last) else flat
        assert out is not None
        devices = len(sharding.device_set)
        keeps = self._keeps_of(last)
        program = Gather(tuple(inputs), width, start * devices, out, keeps)
        return Load(
            "gather",
            nbytes=start * width * devices,
            kind=program if keeps else None,
            gather=program,
            members=tuple(members),
            out=self.host(flat),
        )


def make(
    mode: str,
    plan: SavePlan,
    sources: Sequence[Source],
    places: shardings.PlacesCache,
    process: int,
    wave_bytes: int,
    whole_bytes: int | None,
) -> Recipe:
    """The recipe for a tree like this one.

    Args:
      mode: as in `Snapshot`, or "direct": no copy of anything that a device holds.
      whole_bytes: arrays larger than this go shard by shard; None: none do.
    """
    cook = _Cook(mode, plan, sources, places, whole_bytes)
    # small leaves beside each other: a wave with many of them gathers them by few programs
    waves = plans.waves(plan, process, wave_bytes, lambda part: blocks.is_plain(part, plan.tree))
    loads: list[tuple[Load, ...]] = []
    last: dict[int, tuple[int, Load]] = {}
    for number, wave in enumerate(waves):
        needed = dict.fromkeys(
            cook.id_of(part.leaf, position)
            for write in wave
            for part in write.parts
            for position, _ in part.sources
        )
        new = [one for one in needed if one not in cook.where]
        small = {one: None for one in new if cook.is_small(*one)}
        found = [cook.load(*one) for one in new if one not in small]
        cook.where |= {(load.leaf, load.position): load for load in found}
        gathered = cook.gathers(list(small))
        for load in gathered:
            cook.where |= {(m.leaf, m.position): load for m in load.members} or {
                (load.leaf, load.position): load
            }
        loads.append((*gathered, *found))
        last |= {id(cook.where[key]): (number, cook.where[key]) for key in needed}
    frees: list[list[Load]] = [[] for _ in waves]
    for number, load in last.values():
        frees[number].append(load)
    nbytes = sum(load.nbytes for wave in loads for load in wave)
    members = {(m.leaf, m.position): m for wave in loads for load in wave for m in load.members}
    freed = tuple(map(tuple, frees))
    made = Recipe(mode, plan, waves, tuple(loads), freed, cook.where, members, nbytes)
    return replace(made, blocks=tuple(blocks.cut(wave, plan.tree, made) for wave in waves))


def is_viewed(mode: str, array: jax.Array) -> bool:
    """Whether values are read where they lie, or through a plain read of the device."""
    return mode == "direct" or (mode == "sync" and shardings.is_on_host(array))


def _piece(array: jax.Array, position: int | None) -> tuple[Shape, Sharding]:
    """Shape and sharding of an array, or of one of its local shards as an array of its own."""
    if position is None:
        return array.shape, array.sharding
    device = list(array.sharding.addressable_devices_indices_map(array.shape))[position]
    kind = array.sharding.memory_kind
    return array.sharding.shard_shape(array.shape), shardings.single(device, kind)


def _bytes_on_each(array: jax.Array, position: int | None) -> int:
    """What each device holds of an array, or of one of its local shards."""
    shape, sharding = _piece(array, position)
    return math.prod(sharding.shard_shape(shape)) * array.dtype.itemsize


def _flat(sharding: Sharding) -> Sharding:
    """Of a flat array that has a piece on each device of `sharding`, in the same order."""
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, PartitionSpec(tuple(sharding.mesh.axis_names)))
    return sharding


def _on_device(array: jax.Array) -> bool:
    """Whether it lies in the memory that the device computes on."""
    kind = array.sharding.memory_kind
    device: Any = next(iter(array.sharding.device_set))
    return kind is None or kind == device.default_memory().kind


def _is_plain(dtype: Any) -> bool:
    """Whether elements are whole bytes and words of the same width can carry them."""
    if dtype == np.bool_:
        return True
    return dtype.itemsize in (1, 2, 4, 8) and dtype.kind != "c" and not _is_sub_byte(dtype)


def _is_sub_byte(dtype: Any) -> bool:
    return any(dtype.name.endswith(bits) for bits in ("int2", "int4", "float4_e2m1fn"))
