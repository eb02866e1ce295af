"""Arrays in and out of zarr through TensorStore.

Both directions open strictly: chunks of zeros are stored, and a chunk that is not there is an
error, never zeros.
"""

from __future__ import annotations

import collections
import functools
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorstore as ts

from ckptmgr.core import boxes, layout, manifest
from ckptmgr.core.boxes import Box, Shape
from ckptmgr.core.manifest import Chunk, StoredLeaf, StoredTree
from ckptmgr.core.plan import Part, SavePlan, Unit
from ckptmgr.engine import leaves as leaf_values
from ckptmgr.engine.snapshot import Staged
from ckptmgr.errors import CorruptCheckpoint, Problem

WAVE_BYTES = 128 * 2**20
"""Array bytes per OCDBT transaction; one is committed while the next is filled."""

READ_AHEAD_BYTES = 128 * 2**20
"""Bytes asked for and not yet checked during a restore."""

_OCDBT_CONFIG = {"max_inline_value_bytes": 1024, "max_decoded_node_bytes": 100_000_000}
_DATA_FILE_BYTES = 2**31


def context(sync: bool = False) -> ts.Context:
    """One per save or restore.

    With `sync` each wave's file is synced as it is written, while the next wave is filled, which
    leaves the commit's own sync of everything little to do.
    """
    return ts.Context(
        {
            "file_io_sync": sync,
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
        metadata["compressor"] = {"id": "zstd", "level": 1} if tree.compression else None
        metadata["dimension_separator"] = "."
    else:
        metadata["chunk_grid"] = {
            "name": "regular",
            "configuration": {"chunk_shape": list(leaf.chunk)},
        }
        codecs: list[Any] = [{"name": "bytes", "configuration": {"endian": "little"}}]
        if tree.compression:
            codecs.append({"name": "zstd", "configuration": {"level": 1}})
        metadata["codecs"] = codecs
    return {
        "driver": tree.driver,
        "kvstore": {**kvstore, "path": layout.array_prefix(leaf.name)},
        "dtype": leaf.stored_dtype,
        "metadata": metadata,
        "store_data_equal_to_fill_value": True,
        "fill_missing_data_reads": False,
    }


@dataclass(frozen=True, slots=True)
class _Job:
    """A leaf's parts within one wave; `first` where the array is created in it."""

    leaf: int
    parts: tuple[Part, ...]
    first: bool


def _waves(plan: SavePlan, process: int) -> Iterator[list[_Job]]:
    """Cuts the plan into waves of about WAVE_BYTES; process 0 creates arrays without elements."""
    by_leaf: dict[int, list[Part]] = collections.defaultdict(list)
    for part in plan.parts:
        by_leaf[part.leaf].append(part)
    wave: list[_Job] = []
    held = 0
    for number, leaf in enumerate(plan.tree.leaves):
        if not leaf.has_array:
            continue
        parts = by_leaf.get(number, [])
        if not parts and not (process == 0 and leaf.nbytes == 0):
            continue
        size, first = manifest.itemsize(leaf.stored_dtype), True
        taken: list[Part] = []
        for part in parts:
            if held and held + part.box.size * size > WAVE_BYTES:
                if taken:
                    wave.append(_Job(number, tuple(taken), first))
                    first, taken = False, []
                yield wave
                wave, held = [], 0
            taken.append(part)
            held += part.box.size * size
        if taken or not parts:
            wave.append(_Job(number, tuple(taken), first))
    if wave:
        yield wave


class _Digester:
    """Digests parts on a thread of its own while TensorStore writes them."""

    def __init__(self, leaves: Sequence[StoredLeaf]) -> None:
        self._leaves = leaves
        self._queue: queue.SimpleQueue[tuple[Part, np.ndarray] | None] = queue.SimpleQueue()
        self._chunks: list[Chunk] = []
        self._error: BaseException | None = None
        self._taken = self._given = 0
        self._progress = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="ckptmgr-digest", daemon=True)
        self._thread.start()

    def give(self, part: Part, values: np.ndarray) -> None:
        self._given += 1
        self._queue.put((part, values))

    @property
    def given(self) -> int:
        """How many parts it was given so far."""
        return self._given

    def wait(self, count: int) -> None:
        """Waits until the first `count` parts are digested; raises what went wrong."""
        with self._progress:
            self._progress.wait_for(lambda: self._taken >= count or self._error is not None)
        if self._error is not None:
            raise self._error

    def finish(self) -> tuple[Chunk, ...]:
        """Every chunk, in the order the parts were given."""
        self.wait(self._given)
        return tuple(self._chunks)

    def end(self) -> None:
        """Ends the thread."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            part, values = item
            try:
                leaf = self._leaves[part.leaf]
                for box in boxes.tiles(part.box, leaf.chunk):
                    piece = values[box.within(part.box)]
                    index = manifest.chunk_index(leaf, box)
                    self._chunks.append(Chunk(part.leaf, index, piece.nbytes, digest(piece)))
            except BaseException as exc:
                self._error = exc
            del item, values
            with self._progress:
                self._taken += 1
                self._progress.notify_all()


@dataclass(frozen=True, slots=True)
class _Committing:
    """A wave under way to disk, and how many parts were digested when its buffers are free."""

    future: ts.Future[None]
    jobs: list[_Job]
    digested: int


def write(
    plan: SavePlan,
    staged: Staged,
    path: str,
    process: int,
    *,
    sync: bool = False,
    before_wave: Callable[[], None] = lambda: None,
) -> tuple[Chunk, ...]:
    """Writes this process's parts to the database in `path`; returns what it wrote.

    One transaction per wave. A buffer is handed to TensorStore without a copy, and released when
    its wave is committed and digested.
    """
    ctx = context(sync)
    kvstore = database(path)
    digester = _Digester(plan.tree.leaves)
    committing: _Committing | None = None
    try:
        for jobs in _waves(plan, process):
            before_wave()
            transaction = ts.Transaction()
            try:
                _fill(transaction, jobs, plan, staged, kvstore, ctx, digester)
                if committing:
                    _settle(committing, staged, digester)
            except BaseException:
                transaction.abort()
                raise
            committing = _Committing(transaction.commit_async(), jobs, digester.given)
        if committing:
            _settle(committing, staged, digester)
        return digester.finish()
    finally:
        digester.end()


def _settle(wave: _Committing, staged: Staged, digester: _Digester) -> None:
    wave.future.result()
    digester.wait(wave.digested)
    for job in wave.jobs:
        positions = [position for part in job.parts for position, _ in part.sources]
        staged.release(job.leaf, positions)


def _fill(
    transaction: ts.Transaction,
    jobs: Sequence[_Job],
    plan: SavePlan,
    staged: Staged,
    kvstore: Mapping[str, Any],
    ctx: ts.Context,
    digester: _Digester,
) -> None:
    opening = []
    for job in jobs:
        spec = array_spec(plan.tree, plan.tree.leaves[job.leaf], kvstore)
        how: Any = {"create": True} if job.first else {"open": True, "assume_metadata": True}
        opening.append(ts.open(spec, context=ctx, transaction=transaction, **how))
    writing = []
    for job, opened in zip(jobs, opening, strict=True):
        leaf = plan.tree.leaves[job.leaf]
        for part in job.parts:
            values = _assemble(leaf, part, staged)
            target = opened.result()[part.box.slices] if part.box.start else opened.result()
            writing.append(target.write(values, can_reference_source_data_indefinitely=True))
            digester.give(part, values)
        if not job.parts:
            opened.result()
    for future in writing:
        future.copy.result()


def _assemble(leaf: StoredLeaf, part: Part, staged: Staged) -> np.ndarray:
    """The values of a part in C order, as stored; its own shard where that is one."""
    if len(part.sources) == 1 and part.sources[0][1] == part.box:
        values = staged.get(part.leaf, part.sources[0][0])
        return np.ascontiguousarray(leaf_values.to_stored(values, leaf)).reshape(part.box.shape)
    out = np.empty(part.box.shape, leaf.stored_dtype)
    for position, there, here in _pieces(part.box, part.sources):
        out[there] = leaf_values.to_stored(staged.get(part.leaf, position), leaf)[here]
    return out


@functools.lru_cache(maxsize=4096)
def _pieces(
    box: Box, sources: tuple[tuple[int, Box], ...]
) -> tuple[tuple[int, tuple[slice, ...], tuple[slice, ...]], ...]:
    """(position of a source, where its piece goes in `box`, where the piece lies in it)."""
    met = ((position, source, boxes.intersect(source, box)) for position, source in sources)
    return tuple(
        (position, common.within(box), common.within(source))
        for position, source, common in met
        if common is not None
    )


def merge(item_path: str, containers: Iterable[str]) -> None:
    """Merges the processes' databases into the item's own; copies tree nodes, not data."""
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


Digests = Mapping[tuple[int, Shape], str]


class Reader:
    """Reads units of one item into arrays that the caller gives."""

    def __init__(
        self, step: int | None, tree: StoredTree, item_path: str, digests: Digests
    ) -> None:
        self._step = step
        self._tree = tree
        self._path = item_path
        self._digests = digests
        self._context = context()

    def _kvstore(self) -> dict[str, Any]:
        if self._tree.ocdbt:
            spec = database(self._path)
            del spec["config"]  # the writer's holds; Orbax has used several
            return spec
        return {"driver": "file", "path": self._path.rstrip("/") + "/"}

    def _open(self, leaf: StoredLeaf) -> ts.Future[ts.TensorStore]:
        kvstore = self._kvstore()
        spec: dict[str, Any] = {
            "driver": self._tree.driver,
            "kvstore": {
                **kvstore,
                "path": kvstore.get("path", "") + layout.array_prefix(leaf.name),
            },
            "fill_missing_data_reads": self._tree.sparse,
        }
        return ts.open(spec, context=self._context, open=True, read=True)

    def metadata(self, names: Sequence[str]) -> list[tuple[Shape, str, Shape] | str]:
        """(shape, dtype, chunk shape) of arrays by name, or the error text of one."""
        opening = [self._open(StoredLeaf((), "array", name=name)) for name in names]
        found: list[tuple[Shape, str, Shape] | str] = []
        for future in opening:
            try:
                array = future.result()
            except ValueError as exc:
                found.append(str(exc))
                continue
            chunk: Any = array.chunk_layout.read_chunk.shape or array.shape
            found.append((tuple(array.shape), array.dtype.name, tuple(map(int, chunk))))
        return found

    def read(
        self,
        units: Sequence[Unit],
        wanted: Mapping[int, Sequence[Box]],
        into: Mapping[int, Sequence[np.ndarray]],
    ) -> None:
        """Fills `into[leaf][i]`, the arrays for `wanted[leaf][i]`, from `units`.

        Raises CorruptCheckpoint for whatever cannot be read or has another digest.
        """
        opening = {unit.leaf: self._open(self._tree.leaves[unit.leaf]) for unit in units}
        pending: collections.deque[tuple[Unit, np.ndarray, bool, Any]] = collections.deque()
        ahead = 0
        for unit in units:
            leaf = self._tree.leaves[unit.leaf]
            array = self._checked(unit.leaf, opening[unit.leaf])
            values, direct = _place_for(unit, leaf, wanted[unit.leaf], into[unit.leaf])
            source = array[unit.box.slices] if unit.box.start else array
            future = _read_into(values, source)
            pending.append((unit, values, direct, future))
            ahead += values.nbytes
            while ahead > READ_AHEAD_BYTES and len(pending) > 1:
                ahead -= self._finish(*pending.popleft(), wanted, into)
        while pending:
            self._finish(*pending.popleft(), wanted, into)

    def _checked(self, number: int, opening: ts.Future[ts.TensorStore]) -> ts.TensorStore:
        leaf = self._tree.leaves[number]
        try:
            array = opening.result()
        except ValueError as exc:
            raise self._corrupt(leaf, f"its array cannot be opened ({exc})") from exc
        if tuple(array.shape) != leaf.stored_shape or array.dtype.name != leaf.stored_dtype:
            raise self._corrupt(
                leaf,
                f"the array has {array.dtype.name}{list(array.shape)}, the tree says "
                f"{leaf.stored_dtype}{list(leaf.stored_shape)}",
            )
        return array

    def _finish(
        self,
        unit: Unit,
        values: np.ndarray,
        direct: bool,
        future: Any,
        wanted: Mapping[int, Sequence[Box]],
        into: Mapping[int, Sequence[np.ndarray]],
    ) -> int:
        leaf = self._tree.leaves[unit.leaf]
        try:
            future.result()
        except ValueError as exc:
            raise self._corrupt(leaf, f"box {unit.box} cannot be read ({exc})") from exc
        for index in unit.chunks:
            known = self._digests.get((unit.leaf, index))
            if not known:
                continue
            if digest(values) != known:
                raise self._corrupt(leaf, f"box {unit.box} has other bytes than were saved")
        if not direct:
            logical = values.view(leaf.dtype) if leaf.dtype else values
            for i in unit.targets:
                common = boxes.intersect(unit.box, wanted[unit.leaf][i])
                if common is not None:
                    piece = logical[common.within(unit.box)]
                    into[unit.leaf][i][common.within(wanted[unit.leaf][i])] = piece
        return values.nbytes

    def _corrupt(self, leaf: StoredLeaf, message: str) -> CorruptCheckpoint:
        item = self._path.rstrip("/").rsplit("/", 1)[-1]
        place = item if self._tree.ocdbt else f"{item}/{leaf.name}"
        return CorruptCheckpoint(self._step, [Problem(place, message, leaf.dotted)])


def _place_for(
    unit: Unit, leaf: StoredLeaf, wanted: Sequence[Box], into: Sequence[np.ndarray]
) -> tuple[np.ndarray, bool]:
    """Where a unit is read to: straight into its one target, else an array of its own."""
    if len(unit.targets) == 1:
        box, target = wanted[unit.targets[0]], into[unit.targets[0]]
        same_type = target.dtype.name == (leaf.dtype or leaf.stored_dtype)
        if same_type and boxes.contains(box, unit.box):
            where: Any = (*unit.box.within(box), ...)  # the dots keep 0-d arrays arrays
            return target[where].view(leaf.stored_dtype), True
    return np.empty(unit.box.shape, leaf.stored_dtype), False


def _read_into(values: np.ndarray, source: ts.TensorStore) -> Any:
    target = ts.array(values)
    if source.rank:
        source = source[ts.d[:].translate_to[0]]
    return target.write(source)
