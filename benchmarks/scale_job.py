"""A made-up job of any size for `scale.py`: its state, its plan, and what its processes wrote."""

import contextlib
import json
import math
import os
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ckptmgr.core import chunking, layout, manifest, plan, share, tree
from ckptmgr.core.boxes import Box, whole
from ckptmgr.core.manifest import StoredLeaf, StoredTree
from ckptmgr.core.plan import Shard
from ckptmgr.core.receipts import Chunk, Receipt
from ckptmgr.engine import arrays
from ckptmgr.engine.writing import Share

GROUP, DEVICES = 16, 8
"""Processes that hold one copy of the state, and devices of each."""

ROWS, COLUMNS = 32, 8192  # of a shard, float32: 1 MiB
SMALL = 4096  # elements of a leaf that every device holds
CHUNK_BYTES = 16 * 2**20  # as `Storage` has it
VALUE = os.urandom(1040)  # of a chunk; up to 1,024 bytes would lie in the tree's nodes
DIGEST = "0123456789abcdef" * 2
ZARRAY = (
    b'{"chunks":[32,8192],"compressor":null,"dimension_separator":".","dtype":"<f4",'
    b'"fill_value":null,"filters":null,"order":"C","shape":[4096,8192],"zarr_format":2}'
)


@dataclass(frozen=True)
class Job:
    """A job and its state.

    `groups`: a leaf is cut over the devices of 16 processes, and every 16 hold all of it. `all`: it
    is cut over the devices of all processes, and nobody holds what another does. Small leaves lie
    on every device.
    """

    layout: str
    processes: int
    leaves: int
    small: int

    @property
    def sharers(self) -> int:
        """Processes that hold a copy together."""
        return min(self.processes, GROUP) if self.layout == "groups" else self.processes

    @property
    def pieces(self) -> int:
        """Shards of a leaf."""
        return self.sharers * DEVICES

    @property
    def chunks(self) -> int:
        return self.leaves * self.pieces + self.small

    @cached_property
    def holders(self) -> list[tuple[int, ...]]:
        return [tuple(range(i, self.processes, self.sharers)) for i in range(self.sharers)]

    @cached_property
    def boxes(self) -> list[Box]:
        starts = range(0, self.pieces * ROWS, ROWS)
        return [Box((start, 0), (start + ROWS, COLUMNS)) for start in starts]

    @cached_property
    def flat(self) -> tree.Flat:
        layers = [f"layer_{i:04d}" for i in range(math.ceil(self.leaves / 8))]
        state: dict[str, dict[str, int]] = {layer: {} for layer in layers}
        for i in range(self.leaves):
            state[layers[i // 8]][f"w{i % 8}"] = 0
        for i in range(self.small):
            state[layers[i % len(layers)]][f"z{i // len(layers)}"] = 0
        return tree.flatten({"params": state})

    @cached_property
    def tree(self) -> StoredTree:
        mesh = {
            "type": "named",
            "axes": [["data", self.processes // self.sharers], ["fsdp", self.pieces]],
            "axis_types": ["AxisType.Auto"] * 2,
            "device_ids": list(range(self.processes * DEVICES)),
            "memory_kind": "device",
        }
        kinds = {
            "w": ((self.pieces * ROWS, COLUMNS), self._chunk(), 0),
            "z": ((SMALL,), (SMALL,), 1),
        }
        leaves = []
        for path in self.flat.paths:
            shape, chunk, number = kinds[path[-1][0]]
            name, f32 = ".".join(path), "float32"
            leaf = StoredLeaf(path, "array", shape, f32, name, f32, shape, chunk, sharding=number)
            leaves.append(leaf)
        table = ({**mesh, "spec": [["fsdp"]]}, {**mesh, "spec": []})
        return StoredTree(tuple(leaves), self.flat.containers, table)

    def _chunk(self) -> tuple[int, ...]:
        """As the survey of the leaves works it out: here a shard is one chunk."""
        replicas = self.processes // self.sharers
        shape = (self.pieces * ROWS, COLUMNS)
        shared = self.leaves * math.prod(shape) * 4
        aim = chunking.shared_chunk_bytes(CHUNK_BYTES, shared, replicas)
        owners = [self.holders[i // DEVICES] for i in range(self.pieces)]
        chunk = chunking.chunk_shape(
            shape, 4, self.boxes, owners, aim if replicas > 1 else CHUNK_BYTES
        )
        assert chunk == (ROWS, COLUMNS), chunk
        return chunk

    def shards(self, process: int) -> list[list[Shard]]:
        """As `PlacesCache` would give them to a process."""
        mine = process % self.sharers
        cut = [
            Shard(box, self.holders[i // DEVICES], i % DEVICES if i // DEVICES == mine else -1)
            for i, box in enumerate(self.boxes)
        ]
        every = [Shard(whole((SMALL,)), tuple(range(self.processes)), 0)]
        return [cut if leaf.sharding == 0 else every for leaf in self.tree.leaves]


@dataclass
class Planned:
    """What the plan of one process, which knows what all do, says of the job.

    Attributes:
      seconds: CPU time of the plan.
      nbytes: what each process writes.
      chunks: how many each writes.
    """

    seconds: float
    nbytes: Counter[int]
    chunks: Counter[int]
    _runs: list[int]
    _shards: list[list[Shard]]

    def owners(self) -> Iterator[int]:
        """Who writes each chunk: leaf by leaf, and in a leaf shard by shard."""
        shared = iter(self._runs)
        for found in self._shards:
            for shard in found:
                yield shard.holders[0] if len(shard.holders) == 1 else next(shared)


def planned(job: Job, repetitions: int = 3) -> Planned:
    """Plans for process 0, and looks on while that shares the work out among all."""
    shards, seen, seconds = job.shards(0), [], []

    def onlooker(pieces: Any, loads: Any) -> Any:
        seen[:] = [pieces, loads, share.share(pieces, loads)]
        return seen[-1]

    with changed(plan, "share", onlooker):
        for _ in range(repetitions):
            start = time.process_time()
            plan.plan_save(job.tree, shards, 0)
            seconds.append(time.process_time() - start)
    pieces, loads, runs = seen
    nbytes, chunks = Counter(loads), Counter()
    for piece, (run,) in zip(pieces, runs, strict=True):  # a shard is one chunk: one run
        nbytes[run.process] += piece.nbytes
        chunks[run.process] += 1
    times = Counter(map(id, shards))
    for found in {id(found): found for found in shards}.values():
        for shard in found:
            if len(shard.holders) == 1:
                chunks[shard.holders[0]] += times[id(found)]
    return Planned(
        sorted(seconds)[len(seconds) // 2], nbytes, chunks, [r.process for (r,) in runs], shards
    )


@contextlib.contextmanager
def changed(module: Any, name: str, value: Any) -> Iterator[None]:
    real = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, real)


# -- what the processes wrote -------------------------------------------------------------------


def share_of(process: int, receipt: str, keys: int) -> bytes:
    """What a process tells process 0."""
    name, data = layout.receipt_file("default", process), receipt.encode()
    files = {name: (len(data), manifest.digest(data))}
    return Share(files, {"default": keys}, "", (keys * 2**20, 2)).to_json()


def make(job: Job, tmp: str, out: str) -> None:
    """The databases and receipts of all, with small values; what they tell goes to `out`."""
    written = _chunks_by_process(job)
    item = Path(tmp, "default")
    Path(item, "ckptmgr").mkdir(parents=True)
    _make_databases(job, item, written)
    payloads = []
    for process in range(job.processes):
        container = layout.container(process)
        found = (path for path in (item / container).rglob("*") if path.is_file())
        files = {str(path.relative_to(item)): path.stat().st_size for path in found}
        chunks = tuple(written.get(process, ()))
        receipt = Receipt(process, chunks, files).to_json()
        Path(tmp, layout.receipt_file("default", process)).write_text(receipt)
        payloads.append(share_of(process, receipt, len(chunks)).decode())
    Path(out).write_text(json.dumps(payloads))


def _chunks_by_process(job: Job) -> dict[int, list[Chunk]]:
    found: dict[int, list[Chunk]] = {}
    owners = planned(job, 1).owners()
    for number, leaf in enumerate(job.tree.leaves):
        cut = leaf.sharding == 0
        nbytes = ROWS * COLUMNS * 4 if cut else SMALL * 4
        for i in range(job.pieces if cut else 1):
            chunk = Chunk(number, (i, 0) if cut else (0,), nbytes, DIGEST)
            found.setdefault(next(owners), []).append(chunk)
    return found


def _make_databases(job: Job, item: Path, written: dict[int, list[Chunk]]) -> None:
    import tensorstore as ts

    context, pending = arrays.context(), deque()
    for process in range(job.processes):
        path = item / layout.container(process)
        path.mkdir()
        database = ts.KvStore.open(arrays.database(str(path)), context=context).result()
        transaction = ts.Transaction()
        into = database.with_transaction(transaction)
        for chunk in written.get(process, ()):
            name = job.tree.leaves[chunk.leaf].name
            into.write(layout.chunk_key("zarr", name, chunk.index), VALUE)
            into.write(layout.array_prefix(name) + ".zarray", ZARRAY)
        pending.append(transaction.commit_async())
        if len(pending) > 16:
            pending.popleft().result()
    for future in pending:
        future.result()
