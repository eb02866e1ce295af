"""What goes into a step's directory: what each process writes, and what process 0 adds.

Each process writes its arrays into a database of its own, its receipts and the states of its
iterators, and tells process 0 the sizes and digests of these files in a `Share`; no receipt travels.
Process 0 writes everything that the step has once, a tree's metadata while its last arrays are on
their way to disk, and merges the databases, of which only tree nodes are copied.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckptmgr.core import layout, manifest, orbax_format, values
from ckptmgr.core.manifest import StoredTree
from ckptmgr.core.receipts import Receipt, chunks_to_json
from ckptmgr.engine import arrays
from ckptmgr.engine.arrays import Written
from ckptmgr.engine.catalog import Attempt
from ckptmgr.engine.documents import Documents
from ckptmgr.engine.staged import Staged
from ckptmgr.engine.store import Store
from ckptmgr.errors import StoreError

SHARED_SECONDS = 10.0
"""How long a process waits to see the directory that process 0 has made."""


@dataclass(frozen=True, slots=True)
class TreeItem:
    """One pytree on its way to disk."""

    name: str
    staged: Staged
    documents: Documents

    @property
    def tree(self) -> StoredTree:
        return self.staged.plan.tree


@dataclass(frozen=True, slots=True)
class StateItem:
    """The state of one object with `get_state()`, encoded by `core.values` when save() was called."""

    name: str
    state: Any


Files = dict[str, tuple[int, str]]
"""Metadata files, by path below the step -> bytes and digest."""


@dataclass(frozen=True, slots=True)
class Share:
    """What one process wrote of a step.

    Attributes:
      files: its metadata files.
      keys: item -> chunks in its database; an item without is one where it has no database.
      own: digest of what it has for itself and process 0 writes for all; "" where nothing.
      data: bytes and number of its files of arrays.
    """

    files: Files
    keys: Mapping[str, int]
    own: str
    data: tuple[int, int]

    def to_json(self) -> bytes:
        return json.dumps([self.files, self.keys, self.own, self.data]).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Share:
        files, keys, own, (nbytes, count) = json.loads(text)
        known = {path: (size, digest) for path, (size, digest) in files.items()}
        return cls(known, keys, own, (nbytes, count))


@dataclass(slots=True)
class Writing:
    """The files of one attempt that this process writes.

    Attributes:
      attempt: what is written, and where.
      store: below which it lies.
      rank, world: this process, and how many there are.
      items: what there is to write.
      files: metadata files that were written here.
      data: files of arrays that were written here, path below the step -> bytes.
      wrote: item -> what of its arrays was written here.
    """

    attempt: Attempt
    store: Store
    rank: int
    world: int
    items: Sequence[TreeItem | StateItem]
    files: Files = field(default_factory=dict)
    data: dict[str, int] = field(default_factory=dict)
    wrote: dict[str, Written] = field(default_factory=dict)
    _dirs: set[str] = field(default_factory=set)
    _chunks: dict[str, str] = field(default_factory=dict)  # of an item, as its receipt has them

    @property
    def trees(self) -> list[TreeItem]:
        return [item for item in self.items if isinstance(item, TreeItem)]

    def put(self, path: str, text: str | bytes) -> None:
        data = text.encode() if isinstance(text, str) else text
        parent = path.rpartition("/")[0]
        if parent and parent not in self._dirs:
            self.store.make_dir(f"{self.attempt.tmp}/{parent}")
            self._dirs.add(parent)
        self.store.write_file(f"{self.attempt.tmp}/{path}", data)
        self._note(path, data)

    def _note(self, path: str, data: bytes) -> None:
        self.files[path] = (len(data), manifest.digest(data))

    # -- every process ----------------------------------------------------------------------

    def write_share(self, leaf_digests: bool, on_host: Callable[[], None]) -> Share:
        """Writes what is this process's. Arrays of all items first, so that their values leave
        the host soon; `on_host` is called when the last has arrived."""
        if self.rank != 0 and not self.store.appears(self.attempt.tmp, SHARED_SECONDS):
            raise StoreError(
                f"process {self.rank} does not see {self.store.path(self.attempt.tmp)}, which "
                "process 0 has made: all processes of a job must be given one directory that they "
                "share, on a network or parallel file system"
            )
        keys = {}
        with_arrays = [item.name for item in self.trees if item.tree.has_arrays]
        for tree in self.trees:
            last = with_arrays[-1:] == [tree.name]
            tell = on_host if last else lambda: None
            self.wrote[tree.name] = self._write_arrays(tree, tell, leaf_digests)
            if arrays.writes_any(tree.staged.waves):
                keys[tree.name] = len(self.wrote[tree.name].chunks)
        for tree in self.trees:
            self._write_receipt(tree)
        for item in self.items:
            if isinstance(item, StateItem):
                text = values.dumps(item.state)
                self.put(layout.state_file(item.name, self.rank), text)
        if self.world > 1:
            self._sync_share()
        data = sum(self.data.values()), len(self.data)
        return Share(dict(self.files), keys, self._own_digest(), data)

    def _write_arrays(
        self, item: TreeItem, on_host: Callable[[], None], leaf_digests: bool
    ) -> Written:
        where = f"{self.attempt.tmp}/{item.name}"
        self.store.make_dir(where)
        if not item.staged.waves:
            self._meanwhile(item, Written())
            return Written()
        mine = f"{where}/{layout.container(self.rank)}"
        if arrays.writes_any(item.staged.waves):
            self.store.make_dir(mine)
        begun: set[str] = set()
        return arrays.write(
            item.staged,
            self.store.path(mine),
            leaf_digests=leaf_digests,
            # the store's say: where a faulty one fails the writing of arrays
            before_wave=lambda: self.store.arrays(mine),
            after_wave=lambda: self.store.begin_sync(f"{mine}/{layout.OCDBT_DATA}", begun),
            on_host=on_host,
            meanwhile=functools.partial(self._meanwhile, item),
        )

    def _meanwhile(self, item: TreeItem, wrote: Written) -> None:
        """What needs no array, while the last of them is on its way to disk."""
        self._chunks[item.name] = chunks_to_json(wrote.chunks)
        if self.rank == 0:
            self.put_documents(item)

    def put_documents(self, item: TreeItem) -> None:
        """The metadata files that a tree has once, which process 0 writes."""
        for path, data in item.documents.files(item.name).items():
            self.put(path, data)

    def _write_receipt(self, item: TreeItem) -> None:
        name, wrote = item.name, self.wrote[item.name]
        container = layout.container(self.rank)
        sizes = self.store.sizes(f"{self.attempt.tmp}/{name}/{container}")
        if arrays.writes_any(item.staged.waves) and layout.OCDBT_MANIFEST not in sizes:
            raise StoreError(
                f"{self.store.path(self.attempt.tmp)}/{name}/{container}/ vanished while it was "
                "written"
            )
        files = {f"{container}/{file}": size for file, size in sizes.items()}
        self.data |= {f"{name}/{file}": size for file, size in files.items()}
        receipt = Receipt(self.rank, wrote.chunks, files, wrote.sums)
        text = receipt.to_json(self._chunks.pop(name))
        self.put(layout.receipt_file(name, self.rank), text)

    def _sync_share(self) -> None:
        """Makes durable what no other process syncs, and its directories."""
        tmp = self.attempt.tmp
        sizes: dict[str, int] = {}
        for tree in self.trees:
            below = f"{tree.name}/{layout.container(self.rank)}"
            if arrays.writes_any(tree.staged.waves):
                found = self.store.sync_tree(f"{tmp}/{below}")
                sizes |= {f"{below}/{file}": size for file, size in found.items()}
        for path in self.files:
            self.store.sync_path(f"{tmp}/{path}")
        for parent in self._dirs:
            self.store.sync_path(f"{tmp}/{parent}")
        self._check(sizes, self.data)

    def _own_digest(self) -> str:
        """Of the host values that each process has for itself; see `Shard.own`."""
        own = [entry[1:] for entry in self.own_chunks()]
        return manifest.digest(json.dumps(own).encode()) if own else ""

    def own_chunks(self) -> list[tuple[str, int, list[int], str]]:
        """(leaf's dotted name, its number, chunk index, digest) of those values."""
        found = []
        for item in self.trees:
            own, wrote = item.staged.plan.own, self.wrote[item.name]
            if self.world > 1 and own:
                for chunk in (*wrote.chunks, *wrote.compared):
                    if chunk.leaf in own:
                        dotted = item.tree.leaves[chunk.leaf].dotted
                        found.append((dotted, chunk.leaf, list(chunk.index), chunk.digest))
        return sorted(found, key=lambda entry: entry[1:3])

    # -- process 0 --------------------------------------------------------------------------

    def complete(self, shares: Sequence[Share]) -> None:
        """Merges the databases and writes what a step has once, but for `item.documents`."""
        for item in self.items:
            if isinstance(item, TreeItem):
                self._merge(item, shares)
            else:
                self.put(layout.json_item_file(item.name), values.dumps(item.state))
        for share in shares[1:]:
            self.files |= share.files

    def _merge(self, item: TreeItem, shares: Sequence[Share]) -> None:
        name, tree = item.name, item.tree
        if not tree.has_arrays:
            return
        containers = [layout.container(r) for r, share in enumerate(shares) if name in share.keys]
        chunks = sum(share.keys.get(name, 0) for share in shares)
        count = sum(leaf.has_array for leaf in tree.leaves)
        where = f"{self.attempt.tmp}/{name}"
        arrays.merge(self.store.arrays(where), containers, count + chunks)
        for path in self.store.sizes(where, layout.is_by_process):
            full = f"{name}/{path}"
            self._note(full, self.store.read_file(f"{self.attempt.tmp}/{full}"))

    def put_step_metadata(self, created: float, metrics: Any, now: float) -> None:
        """Orbax's files about the step: when save() was called, encoded metrics, the time now."""
        kinds = {
            # Orbax's tree handlers refuse a tree without leaves
            item.name: "tree" if isinstance(item, TreeItem) and item.tree.leaves else "state"
            for item in self.items
        }
        plain = {
            name: value
            for name, value in (values.decode(metrics) or {}).items()
            if isinstance(name, str) and isinstance(value, (bool, int, float, str))
        }  # what Orbax's JSON can hold; all of them are in the manifest
        if plain:
            self.put(layout.metrics_file(), json.dumps(plain))
        text = orbax_format.checkpoint_metadata(kinds, plain, created, now)
        self.put(layout.CHECKPOINT_METADATA, text)
        done = f"Checkpoint commit was successful to {self.attempt.step}\n"
        self.put(layout.COMMIT_SUCCESS, done)

    def sync(self) -> None:
        """Syncs everything that is not synced yet; raises StoreError where a file is not there, or
        not whole: somebody may have removed it meanwhile."""
        tmp = self.attempt.tmp
        sizes = self.store.sync_tree(tmp, lambda path: layout.is_of_another(path, self.rank))
        whole = {path: size for path, (size, _) in self.files.items()}
        self._check(sizes, whole | self.data)

    def stored(self, shares: Sequence[Share]) -> tuple[int, int]:
        """Bytes and number of all files of the step but its manifest, when it is complete."""
        metadata = sum(size for size, _ in self.files.values()), len(self.files)
        found = [metadata, *(share.data for share in shares)]
        return sum(nbytes for nbytes, _ in found), sum(count for _, count in found)

    def own_paths(self) -> tuple[str, ...]:
        """Below the step, everything that holds what this process wrote and the way to it."""
        if self.world == 1:
            return ("",)
        merged = (layout.OCDBT_MANIFEST, layout.OCDBT_DATA, layout.container(self.rank))
        trees = [f"{tree.name}/{part}" for tree in self.trees for part in merged]
        return (*trees, *self.files)

    def _check(self, sizes: Mapping[str, int], expected: Mapping[str, int]) -> None:
        for path, size in expected.items():
            if sizes.get(path) != size:
                found = f"has {sizes[path]} bytes" if path in sizes else "is missing"
                where = self.store.path(f"{self.attempt.tmp}/{path}")
                raise StoreError(f"{where} {found}, {size} bytes were written")
