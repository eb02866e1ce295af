"""The values of one item on their way to, or on, the host: what a writer asks of a snapshot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np

from ckptmgr.engine import shardings
from ckptmgr.engine.leaves import Source
from ckptmgr.engine.memory import HostMemory
from ckptmgr.engine.recipe import Load, Member, Recipe


@dataclass(frozen=True, slots=True)
class Work:
    """One item to copy: how, and from what."""

    recipe: Recipe
    sources: Sequence[Source]


class Waves(Protocol):
    """Whoever orders the copies, see `ckptmgr.engine.snapshot.Ordering`."""

    def is_ready(self, wave: int) -> bool: ...

    def wait(self, wave: int) -> None: ...


class Staged:
    """The values of one item on their way to, or on, the host."""

    def __init__(self, ordering: Waves, work: Work, first: int, memory: HostMemory) -> None:
        self.mode = work.recipe.mode
        self.plan = work.recipe.plan
        self.waves = work.recipe.waves
        self.blocks = work.recipe.blocks
        self._recipe = work.recipe
        self._sources: list[Source] = list(work.sources)
        self._ordering = ordering
        self._first = first
        self._memory = memory
        self._values: dict[Load, Any] = {}
        self._flats: dict[Load, dict[int, np.ndarray]] = {}

    # -- for the writer -----------------------------------------------------------------------

    def is_ready(self, wave: int) -> bool:
        """Whether the copies of a wave are ordered."""
        return self._ordering.is_ready(self._first + wave)

    def wait(self, wave: int) -> None:
        """Waits until they are; call it with nothing left to free. Raises what went wrong."""
        self._ordering.wait(self._first + wave)

    def get(self, leaf: int, position: int) -> np.ndarray:
        """The values of one local shard of an ordered wave; waits for their transfer."""
        load, key = self._recipe.load_of(leaf, position)
        value = self._values[load]
        if load.members:
            if isinstance(value, dict):
                value = value[key]
            else:
                return self._from_flat(load, value, self._recipe.members[key], position)
        if isinstance(value, np.ndarray):
            return value
        shard = value.addressable_data(position if key[1] is None else 0)
        if load.how == "view" and not shardings.is_viewable(shard):
            # JAX keeps the host copy of an array on the array; this one goes with the copy
            shard = jax.make_array_from_single_device_arrays(shard.shape, shard.sharding, [shard])
        return np.asarray(shard)

    def run(self, leaf: int, position: int, count: int) -> np.ndarray | None:
        """As `get` of `count` shards that lie one behind the other, in one array; None where they
        were not gathered after all."""
        load, key = self._recipe.load_of(leaf, position)
        value = self._values[load]
        if not load.members or isinstance(value, dict):
            return None
        member = self._recipe.members[key]
        words = self._words(load, value, member, position, count)
        return words.view(member.dtype).reshape(count, *member.shape)

    def _from_flat(self, load: Load, value: Any, member: Member, position: int) -> np.ndarray:
        words = self._words(load, value, member, position)
        return words.view(member.dtype).reshape(member.shape)

    def _words(
        self, load: Load, value: Any, member: Member, position: int, count: int = 1
    ) -> np.ndarray:
        at = position if member.position is None else 0
        flats = self._flats.setdefault(load, {})
        if at not in flats:
            flats[at] = np.asarray(value.addressable_data(at))
        return flats[at][member.start : member.start + count * member.size]

    def copied(self, wave: int) -> None:
        """Lets go of what nobody needs after a wave, all of which was copied; the copies are held
        in its place until `free`."""
        for load in self._recipe.frees[wave]:
            if load.kind is None and load in self._values:
                self._values[load] = None
                self._flats.pop(load, None)

    def free(self, wave: int) -> None:
        """Gives back what nobody needs after a wave; its values must not be used any more."""
        for load in self._recipe.frees[wave]:
            self._drop(load)

    def _drop_all(self) -> None:
        for load in list(self._values):
            self._drop(load)

    def _drop(self, load: Load) -> None:
        if load not in self._values:
            return
        value = self._values.pop(load)
        self._flats.pop(load, None)
        if load.kind is not None and not isinstance(value, dict):
            self._memory.release(load.nbytes, [(load.kind, load.nbytes, value)])
        elif load.nbytes:
            self._memory.release(load.nbytes)

    # -- for the ordering ---------------------------------------------------------------------

    def source(self, leaf: int) -> Any:
        return self._sources[leaf]

    def piece(self, leaf: int, position: int | None) -> Any:
        """An array, or one of its local shards as an array."""
        source: Any = self._sources[leaf]
        return source if position is None else source.addressable_data(position)

    def _forget_sources(self) -> None:
        """The user's arrays are not needed any more; a view is a value of its own."""
        self._sources = []

    def _holds(self, load: Load) -> bool:
        return load in self._values

    def _set(self, load: Load, value: Any) -> None:
        self._values[load] = value

    def _set_member(self, load: Load, member: tuple[int, int | None], value: Any) -> None:
        self._values.setdefault(load, {})[member] = value
