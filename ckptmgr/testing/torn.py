"""A stager whose asynchronous copies are torn: what the audit of a heartbeat must find.

options = ckptmgr.Options(heartbeat=ckptmgr.Heartbeat(every_saves=10))
manager = ckptmgr.CheckpointManager(
    root, options, stager=TornStager(options.snapshot, "params.dense.kernel")
)
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from ckptmgr.engine.recipe import Load
from ckptmgr.engine.snapshot import Ordering, Stager
from ckptmgr.engine.staged import Staged
from ckptmgr.options import Snapshot


class TornStager(Stager):
    """Turns over one byte of a leaf in host memory, after its copy has arrived there.

    Needs a backend that gives the address of its host memory, such as CPU or GPU.

    Args:
      options: as of the manager.
      leaf: dotted name of the leaf.
      at: byte in the last local shard, counted from its start.

    Attributes:
      torn: how many copies were altered.
      armed: set to False to leave copies alone.
    """

    def __init__(self, options: Snapshot, leaf: str, at: int = 0) -> None:
        super().__init__(options)
        self.torn = 0
        self.armed = True

        class Torn(Ordering):
            def _copy(
                ordering, batch: Sequence[tuple[Staged, Load]], buffers: Sequence[Any]
            ) -> None:
                super()._copy(batch, buffers)
                for staged, load in batch:
                    if self.armed and staged.mode in ("copy_on_write", "double_buffer"):
                        self.torn += _tear(staged, load, leaf, at)

        self.ordering = Torn


def _tear(staged: Staged, load: Load, leaf: str, at: int) -> bool:
    """Alters the leaf's bytes if the load holds them."""
    names = [stored.dotted for stored in staged.plan.tree.leaves]
    value: Any = staged._values[load]
    if not load.members:
        if load.leaf < 0 or names[load.leaf] != leaf:
            return False
        _turn_over(value, at)
        return True
    for member in load.members:
        if names[member.leaf] != leaf:
            continue
        if isinstance(value, dict):
            _turn_over(value[member.leaf, member.position], at)
        else:
            _turn_over(value, member.start * member.dtype.itemsize + at)
        return True
    return False


def _turn_over(value: Any, at: int) -> None:
    if isinstance(value, np.ndarray):
        value.reshape(-1).view(np.uint8)[at] ^= 0xFF
        return
    last = jax.block_until_ready(value).addressable_shards[-1].data
    byte = (ctypes.c_uint8 * 1).from_address(last.unsafe_buffer_pointer() + at)
    byte[0] ^= 0xFF
