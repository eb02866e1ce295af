"""Arrays into zarr through TensorStore, and the specs that reading shares.

Both directions open strictly: chunks of zeros are stored, and a chunk that is not there is an
error, never zeros.
"""

from __future__ import annotations

import functools
import operator
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorstore as ts

from ckptmgr.core import boxes, compression, layout, manifest
from ckptmgr.core.boxes import Shape
from ckptmgr.core.leafdigest import ZERO, Sums, add
from ckptmgr.core.manifest import StoredLeaf, StoredTree
from ckptmgr.core.plan import Part, Wave
from ckptmgr.core.receipts import Chunk
from ckptmgr.engine import leafdigest
from ckptmgr.engine.blocks import Block, assemble, values_of
from ckptmgr.engine.staged import Staged
from ckptmgr.errors import StoreError

LOAN_SECONDS = 1.0
"""How long to wait for a buffer that TensorStore, committed, still refers to."""

_OCDBT_CONFIG = {
    "max_inline_value_bytes": layout.INLINE_BYTES,
    "max_decoded_node_bytes": 100_000_000,
    "compression": None,  # of the tree of keys, so that `core.ocdbt` can read it
}
_DATA_FILE_BYTES = 2**31


def context() -> ts.Context:
    """One per save or restore."""
    return ts.Context(
        {
            "file_io_sync": False,  # the store syncs everything at the end
            "file_io_locking": {"mode": "none"},  # each file has one writer, in its own attempt
            "cache_pool#ocdbt": {"total_bytes_limit": 100_000_000},
        }
    )


def database(path: str) -> dict[str, Any]:
    """Spec of the OCDBT database in the directory `path`."""
    return {
        "driver": "ocdbt",
        "base": {"driver": "file", "path": path.rstrip("/") + "/"},
        "config": _OCDBT_CONFIG,
        "target_data_file_size": _DATA_FILE_BYTES,
        "cache_pool": "cache_pool#ocdbt",
    }


def digest(values: np.ndarray) -> str:
    """xxh3-128 of the elements in C order; of a run of memory without a copy."""
    return manifest.digest(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)


def array_spec(tree: StoredTree, leaf: StoredLeaf, kvstore: Mapping[str, Any]) -> dict[str, Any]:
    """Spec of one leaf's array in `kvstore`, strict in both directions."""
    metadata: dict[str, Any] = {"shape": list(leaf.stored_shape)}
    if tree.driver == "zarr":
        metadata["chunks"] = list(leaf.chunk)
        metadata["compressor"] = compression.compressor(tree.compression, leaf)
        metadata["dimension_separator"] = "."
    else:
        metadata["chunk_grid"] = {
            "name": "regular",
            "configuration": {"chunk_shape": list(leaf.chunk)},
        }
        plain = {"name": "bytes", "configuration": {"endian": "little"}}
        metadata["codecs"] = [plain, *compression.codecs(tree.compression, leaf)]
    return {
        "driver": tree.driver,
        "kvstore": {**kvstore, "path": layout.array_prefix(leaf.name)},
        "dtype": leaf.stored_dtype,
        "metadata": metadata,
        "store_data_equal_to_fill_value": True,
        "fill_missing_data_reads": False,
    }


@dataclass(frozen=True, slots=True)
class Written:
    """What this process wrote of an item.

    Attributes:
      chunks: what it wrote.
      compared: what it only digested: its own copies of what process 0 writes.
      sums: what its part of a leaf adds to the leaf's digest, where asked for.
    """

    chunks: tuple[Chunk, ...] = ()
    compared: tuple[Chunk, ...] = ()
    sums: Mapping[int, Sums] = field(default_factory=dict)


class _Digests:
    """Of what is written, in the order in which it is given.

    Taken on the save's own thread while TensorStore commits the waves before: xxh3 does 10 GB/s on
    one core. A thread of its own, behind the copies in the queue for a core, held their memory.
    """

    def __init__(self, leaves: Sequence[StoredLeaf], leaf_digests: bool) -> None:
        self._leaves = leaves
        self._sums: dict[int, Sums] | None = {} if leaf_digests else None
        self._chunks: dict[bool, list[Chunk]] = {True: [], False: []}  # by whether written

    @property
    def sums(self) -> bool:
        """Whether parts are needed for digests of leaves."""
        return self._sums is not None

    def take(self, part: Part, values: np.ndarray) -> None:
        leaf = self._leaves[part.leaf]
        self._chunks[part.write] += chunks_of(leaf, part, values)
        if self._sums is not None and part.write:
            sums = leafdigest.partial(values, part.box, leaf.stored_shape)
            self._sums[part.leaf] = add(self._sums.get(part.leaf, ZERO), sums)

    def note(self, chunk: Chunk) -> None:
        """Takes a chunk that was written and digested."""
        self._chunks[True].append(chunk)

    def all(self) -> Written:
        """Every chunk, by leaf and index, and the sums of leaves."""
        chunks = sorted(self._chunks[True], key=operator.attrgetter("index"))
        chunks.sort(key=operator.attrgetter("leaf"))  # one key of both is a new object for each
        return Written(tuple(chunks), tuple(self._chunks[False]), self._sums or {})


def chunks_of(leaf: StoredLeaf, part: Part, values: np.ndarray) -> Iterator[Chunk]:
    """The chunks of a part with the digests of their values."""
    for box in boxes.tiles(part.box, leaf.chunk):
        piece = values[box.within(part.box)]
        index = manifest.chunk_index(leaf, box)
        yield Chunk(part.leaf, index, piece.nbytes, digest(piece))


class _Loans:
    """The buffers of a wave that TensorStore refers to.

    It lets go of the last of them a moment after it says that a wave is committed; a view that is
    still alive then would keep JAX from donating what it shows.
    """

    def __init__(self) -> None:
        self._out: dict[int, weakref.ref[np.ndarray]] = {}
        self._changed = threading.Condition()

    def lend(self, values: np.ndarray) -> None:
        number = id(values)  # unique while it is out
        with self._changed:
            self._out[number] = weakref.ref(values, lambda _: self._back(number))

    def wait(self) -> None:
        """Waits until all are back; one that somebody else keeps is given up."""
        with self._changed:
            self._changed.wait_for(lambda: not self._out, LOAN_SECONDS)

    def _back(self, number: int) -> None:
        with self._changed:
            self._out.pop(number, None)
            self._changed.notify_all()


@dataclass(frozen=True, slots=True)
class _Committing:
    """A wave under way to disk."""

    number: int
    future: ts.Future[None]
    loans: _Loans


def write(
    staged: Staged,
    path: str,
    *,
    leaf_digests: bool = False,
    before_wave: Callable[[], object] = lambda: None,
    after_wave: Callable[[], object] = lambda: None,
    on_host: Callable[[], None] = lambda: None,
    meanwhile: Callable[[Written], object] = lambda wrote: None,
) -> Written:
    """Writes this process's parts to the database in `path`; returns what it wrote.

    One transaction per wave. A buffer is handed to TensorStore without a copy, and freed when
    its wave is committed. `after_wave` is called when the file of a wave is written,
    `on_host` when the last value has arrived, `meanwhile` while the last wave is being committed.
    """
    digests = _Digests(staged.plan.tree.leaves, leaf_digests)
    waves = _Waves(staged, path, digests, after_wave)
    try:
        for number in range(len(staged.waves)):
            before_wave()
            waves.wait_for(number)
            waves.write(number)
        on_host()
        wrote = digests.all()
        meanwhile(wrote)
        waves.settle()
        return wrote
    finally:
        waves.end()


class _Waves:
    """The waves of one database, to disk in order: one is filled while the last is committed.

    A wave is an atomic transaction, committed alone, and leaves one data file. Where TensorStore
    commits two at a time, or values as they come, it leaves up to three.
    """

    def __init__(
        self, staged: Staged, path: str, digests: _Digests, after_wave: Callable[[], object]
    ) -> None:
        self._committing: _Committing | None = None
        self._staged = staged
        self._tree = staged.plan.tree
        self._kvstore = database(path)
        self._context = context()
        self._digests = digests
        self._after_wave = after_wave

    def wait_for(self, number: int) -> None:
        """Waits until the copies of a wave are ordered."""
        while not self._staged.is_ready(number):
            if self._committing is None:
                self._staged.wait(number)
            self.settle()  # its memory may be what the copies wait for

    def write(self, number: int) -> None:
        """Fills the transaction of a wave and begins to commit it."""
        transaction = ts.Transaction(atomic=True)
        loans = _Loans()
        whole, rest = self._staged.blocks[number]
        try:
            if whole:
                self._fill_blocks(transaction, whole)
            self._fill(transaction, rest, loans)
            if not rest:
                self._staged.copied(number)
            self.settle()
        except BaseException:
            transaction.abort()
            raise
        self._committing = _Committing(number, transaction.commit_async(), loans)

    def settle(self) -> None:
        """Waits until the wave under way, if there is one, is committed, and frees its memory."""
        if self._committing is None:
            return
        wave = self._committing
        wave.future.result()
        self._committing = None
        self._after_wave()
        wave.loans.wait()
        self._staged.free(wave.number)

    def end(self) -> None:
        """Of a save that failed: nobody may write when its directory is removed."""
        if self._committing is not None:
            self._committing.future.exception()

    def _fill(self, transaction: ts.Transaction, wave: Wave, loans: _Loans) -> None:
        opening: list[Any] = []
        for job in wave:
            if not job.writes:
                opening.append(None)
                continue
            spec = array_spec(self._tree, self._tree.leaves[job.leaf], self._kvstore)
            how: Any = {"create": True} if job.first else {"open": True, "assume_metadata": True}
            opening.append(ts.open(spec, context=self._context, transaction=transaction, **how))
        writing = []
        for job, opened in zip(wave, opening, strict=True):
            leaf = self._tree.leaves[job.leaf]
            for part in job.parts:
                values = assemble(leaf, part, self._staged)
                if opened is None:
                    self._digests.take(part, values)
                    continue
                array = opened.result()
                target = array[part.box.slices] if part.box.start else array
                loans.lend(values)
                writing.append(target.write(values, can_reference_source_data_indefinitely=True))
                self._digests.take(part, values)
            if not job.parts:
                opened.result()
        for future in writing:
            future.copy.result()

    def _fill_blocks(self, transaction: ts.Transaction, blocks: Sequence[Block]) -> None:
        database = ts.KvStore.open(self._kvstore, context=self._context).result()
        into = database.with_transaction(transaction)
        for block in blocks:
            self._fill_block(into, block)

    def _fill_block(self, into: ts.KvStore, block: Block) -> None:
        """Much is the same for all parts of a block; a tree may have many thousands of them.

        In a transaction setting a key waits for nothing, and spares the future that a write gives.
        """
        leaves, driver, digests = self._tree.leaves, self._tree.driver, self._digests
        one = leaves[block.parts[0].leaf]
        metadata = _metadata(driver, one.stored_shape, one.chunk, one.stored_dtype)
        chunks = [
            (index, where, layout.chunk_suffix(driver, index)) for index, where in block.chunks
        ]
        values = values_of(block, self._tree, self._staged)
        for part, creates, found in zip(block.parts, block.creates, values, strict=True):
            number = part.leaf
            name = leaves[number].name
            if creates:
                into[layout.metadata_key(driver, name)] = metadata
            prefix = layout.array_prefix(name)
            for index, where, suffix in chunks:
                data = found[where].tobytes()
                into[prefix + suffix] = data
                if not digests.sums:
                    digests.note(Chunk(number, index, len(data), manifest.digest(data)))
            if digests.sums:
                digests.take(part, found)


@functools.lru_cache(maxsize=4096)
def _metadata(driver: str, shape: Shape, chunk: Shape, dtype: str) -> bytes:
    """What TensorStore stores as the metadata of an array without compression."""
    leaf = StoredLeaf((), "array", shape, dtype, "a", dtype, shape, chunk)
    tree = StoredTree((leaf,), 0, driver=driver)
    made = ts.open(array_spec(tree, leaf, {"driver": "memory"}), create=True).result().kvstore
    assert made is not None
    return made[layout.metadata_key(driver, layout.ROOT_ARRAY)]


def writes_any(waves: Sequence[Wave]) -> bool:
    """Whether anything is written, so that there is a database afterwards."""
    return any(job.writes for wave in waves for job in wave)


def merge(item_path: str, containers: Iterable[str], keys: int) -> None:
    """Merges the processes' databases into the item's own; copies tree nodes, not data.

    Raises StoreError unless the result counts exactly `keys` keys: one per array and per chunk.
    """
    ctx = context()
    parent = ts.KvStore.open(database(item_path), context=ctx).result()
    transaction = ts.Transaction(atomic=True)
    try:
        into = parent.with_transaction(transaction)
        for name in containers:
            child = ts.KvStore.open(database(f"{item_path}/{name}"), context=ctx).result()
            child.experimental_copy_range_to(into).result()
    except BaseException:
        transaction.abort()
        raise
    transaction.commit_async().result()
    try:
        found = root_of(database(item_path), ctx)["statistics"]["num_keys"]
    except (ValueError, LookupError) as exc:
        raise StoreError(f"{item_path}: its merged database cannot be read ({exc})") from exc
    if found != keys:
        raise StoreError(f"{item_path}: {keys} keys were written and {found} are there")


def root_of(database: Mapping[str, Any], context: ts.Context) -> Mapping[str, Any]:
    """What a database's manifest tells of its newest root node: place, and number of keys.

    Raises ValueError or LookupError where there is no such thing.
    """
    base = ts.KvStore.open(database["base"], context=context).result()
    # of a node `dump` would tell all entries, and never free what it tells (0.1.86)
    return ts.ocdbt.dump(base, context=context).result()["versions"][-1]["root"]
