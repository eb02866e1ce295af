"""What a step holds, without reading array data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptmgr.core.info import StepInfo
from ckptmgr.core.manifest import StoredLeaf
from ckptmgr.reading import open_path


@dataclass(frozen=True, slots=True)
class Description:
    """What a step holds.

    Attributes:
      info: about the step.
      path: its directory.
      leaves: item -> its leaves; items that keep a state of their own have none.
      shardings: item -> table that `StoredLeaf.sharding` points into.
      unreadable: item -> why nothing of it can be read (only of Orbax's).
      leaf_digests: item -> dotted leaf -> digest of its values whatever their mesh and chunks, where
        it was recorded: of heartbeats, and with `Integrity(leaf_digests=True)`.
    """

    info: StepInfo
    path: str
    leaves: Mapping[str, tuple[StoredLeaf, ...]]
    shardings: Mapping[str, tuple[Mapping[str, Any], ...]]
    unreadable: Mapping[str, str]
    leaf_digests: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


def describe(path: Any, step: int | None = None) -> Description:
    """The leaves of a step, ours or Orbax's; needs no accelerator and reads no array data."""
    opened = open_path(path, step)
    trees = {name: item.tree for name, item in opened.items.items()}
    return Description(
        opened.info,
        opened.path,
        {name: tree.leaves if tree else () for name, tree in trees.items()},
        {name: tree.shardings if tree else () for name, tree in trees.items()},
        {name: item.unreadable for name, item in opened.items.items() if item.unreadable},
        {
            name: {item.tree.leaves[i].dotted: text for i, text in digests.items()}
            for name, item in opened.items.items()
            if item.tree is not None and (digests := item.leaf_digests)
        },
    )
