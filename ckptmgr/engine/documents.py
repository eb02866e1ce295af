"""The metadata files that an item has once, made once for all trees of one structure."""

from __future__ import annotations

import json
from collections.abc import Mapping

from ckptmgr.core import layout, orbax_format
from ckptmgr.core.manifest import StoredTree
from ckptmgr.core.tree import Flat, unflatten

KEPT_BYTES = 32 * 2**20
"""Files of a tree that are larger than this in all are made anew for each save."""


class Documents:
    """Files that depend on nothing but a tree's structure, made in the background by the first
    save that needs them.

    Args:
      flat: a tree taken apart; its leaves are not needed.
      tree: how it is stored.
    """

    def __init__(self, flat: Flat, tree: StoredTree) -> None:
        self._flat = flat
        self._tree = tree
        self._text = ""
        self._files: dict[str, Mapping[str, bytes]] = {}

    def text(self) -> str:
        """The stored tree as JSON."""
        self._text = self._text or self._tree.to_json()
        return self._text

    def files(self, item: str) -> Mapping[str, bytes]:
        """All files by path below the step, for an item of this name."""
        if item not in self._files:
            made = self._make(item)
            if sum(map(len, made.values())) > KEPT_BYTES:
                return made
            self._files = {item: made}
        return self._files[item]

    def _make(self, item: str) -> dict[str, bytes]:
        tree = self._tree
        texts = {
            layout.tree_file(item): self.text(),
            layout.pytree_metadata(item): orbax_format.pytree_metadata(self._flat, tree),
            layout.sharding_file(item): orbax_format.shardings(tree),
            layout.array_metadatas(item, 0): orbax_format.array_metadatas(tree),
        }
        strings = orbax_format.strings(tree)
        if strings is not None:
            texts[layout.strings_file(item)] = strings
        if not tree.leaves:
            texts[layout.json_item_file(item)] = json.dumps(unflatten(tree.containers, int))
        texts[layout.item_commit(item)] = "Checkpoint commit was successful\n"
        return {path: text.encode() for path, text in texts.items()}
