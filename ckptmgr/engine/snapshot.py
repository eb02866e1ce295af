"""Device to host: what `save()` does before it returns.

Contract, the same in every mode. When `order` has returned,

1. donating, deleting, mutating or overwriting any leaf does not change what is saved;
2. no view of a device buffer is held (such a view makes JAX refuse donation without a word);
3. host arrays of the user have been copied.

How each mode keeps it:

- `copy_on_write`: the copies to host memory are *ordered* here, in one batched `device_put` on the
  caller's thread; the runtime performs each before any later donated use of its buffer. Waiting
  for them and writing them is the background thread's work.
- `sync`: nothing is copied; the caller waits until everything is written, so the values are read
  where they lie.

Not guaranteed: anything about a thread other than the caller's that changes leaves during the call.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from ckptmgr.core.plan import SavePlan
from ckptmgr.engine import shardings
from ckptmgr.engine.leaves import Source
from ckptmgr.errors import SnapshotLost

logger = logging.getLogger("ckptmgr")


class Staged:
    """Values on their way to, or on, the host; holds them until `release`."""

    def __init__(self, held: dict[tuple[int, int], Any], whole: dict[int, Any]) -> None:
        self._held = held
        self._whole = whole

    def get(self, leaf: int, position: int) -> np.ndarray:
        """The values of one local shard; waits for its transfer."""
        if leaf in self._whole:
            value = self._whole[leaf]
            if isinstance(value, np.ndarray):
                return value
            return np.asarray(value.addressable_data(position))
        return np.asarray(self._held[leaf, position])

    def release(self, leaf: int, positions: Sequence[int]) -> None:
        """Drops what will not be asked for again."""
        self._whole.pop(leaf, None)
        for position in positions:
            self._held.pop((leaf, position), None)


def order(
    mode: str,
    step: int,
    plan: SavePlan,
    sources: Sequence[Source],
    places: shardings.PlacesCache,
) -> Staged:
    """Captures the values that `plan` writes, as of this call."""
    whole: dict[int, Any] = {}
    held: dict[tuple[int, int], Any] = {}
    wanted: list[jax.Array] = []
    targets: list[Any] = []
    slots: list[tuple[int, int | None]] = []
    for number in dict.fromkeys(part.leaf for part in plan.parts):
        source = sources[number]
        if isinstance(source, np.ndarray):
            whole[number] = np.array(source, order="C", copy=True)
            continue
        if source is None:
            continue
        if mode == "sync":
            whole[number] = source
            continue
        pinned = shardings.pinned_host(source.sharding)
        if pinned is None:
            _copy_at_once(number, source, places(source), held)
        elif _goes_whole(source, places(source)):
            wanted.append(source)
            targets.append(pinned)
            slots.append((number, None))
        else:
            for position in places(source).positions:
                shard = source.addressable_data(position)
                (device,) = shard.devices()
                wanted.append(shard)
                targets.append(shardings.single(device, "pinned_host"))
                slots.append((number, position))
    try:
        # may_alias=False: a leaf that lives in host memory already must be copied all the same.
        copies = jax.device_put(wanted, targets, may_alias=False) if wanted else []
    except RuntimeError as exc:
        lost = next((n for (n, _), a in zip(slots, wanted, strict=True) if a.is_deleted()), None)
        if lost is None:
            raise
        raise SnapshotLost(plan.tree.leaves[lost].dotted, step) from exc
    for (number, slot), copy in zip(slots, copies, strict=True):
        if slot is None:
            whole[number] = copy
        else:
            held[number, slot] = copy
    return Staged(held, whole)


def _goes_whole(array: jax.Array, place: shardings.Places) -> bool:
    """One transfer for all shards: only where every shard is ours and lies on one device.

    A transfer of an array of several processes would compile a program that all must call.
    """
    return array.is_fully_addressable and not place.replicated


def _copy_at_once(
    number: int, array: jax.Array, place: shardings.Places, held: dict[tuple[int, int], Any]
) -> None:
    if not _warned:
        _warned.append(True)
        logger.warning("this backend has no pinned_host memory: save() copies before it returns")
    for position in place.positions:
        held[number, position] = np.array(array.addressable_data(position), copy=True)


_warned: list[bool] = []
