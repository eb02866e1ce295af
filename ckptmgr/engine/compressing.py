"""`Storage(compression="auto")`: the first save is stored plainly and measured, in the background.

When it is durable, each process writes a file of a few MiB to see what the disk does, all at about
the same time, as in a save. Process 0 then reads samples of the values back from the step, tries
the choices on them, and decides (`ckptmgr.core.compression`). Each later save asks process 0 for its
decision before it looks at the tree, so that all processes change over with the same save.
"""

from __future__ import annotations

import json
import logging
import os
import statistics
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import tensorstore as ts

from ckptmgr.core import compression, layout, manifest
from ckptmgr.core.compression import Choice, Trial
from ckptmgr.core.manifest import StoredLeaf, StoredTree
from ckptmgr.core.plan import Unit
from ckptmgr.engine import arrays, blocks, worker
from ckptmgr.engine.pipeline import SaveJob, Tools
from ckptmgr.engine.reader import Reader
from ckptmgr.engine.store import Store
from ckptmgr.events import Clock, Event

logger = logging.getLogger("ckptmgr")

PROBE_BYTES = (2**23, 2**24, 2**25)
"""Sizes of the files that are written to see what the disk does, smallest first."""

PROBE_SECONDS = 0.5
"""When this has passed no further file is begun."""

SAMPLE_SECONDS = 0.5
"""The same of chunks that are read for samples."""

TRIAL_SECONDS = 0.5
"""The same of samples that are compressed."""


class Compressing:
    """What compression the saves of one manager have.

    Attributes:
      name: of the next save, as a tree names it.
    """

    def __init__(self, tools: Tools) -> None:
        options = tools.options
        self._tools = tools
        self._asks = options.storage.compression == compression.AUTO
        self.name = None if self._asks else options.storage.compression
        beats = options.heartbeat.every_saves if options.heartbeat is not None else 0
        self._always_waited_for = options.snapshot.mode == "sync" or beats == 1
        self._measured = not self._asks
        self._found: Choice | None = None

    def phases(self, save: str) -> list[str]:
        """What others wait for when this process fails before it calls `settle`."""
        return [f"{save}/compression"] if self._asks else []

    def settle(self, save: str) -> str | None:
        """The compression of the save of this name, on every process the same."""
        for phase in self.phases(save):
            deadline = self._tools.deadline
            told = self._tools.coordinator.lead(phase, self._decision, deadline)
            self.name = json.loads(told)
        return self.name

    def _decision(self) -> bytes:
        return json.dumps(self._found and self._found.name).encode()

    def learn(self, job: SaveJob, flush: float) -> None:
        """Measures, once: on the thread of a save that is durable, `flush` seconds after its call.

        A save that the caller waits for is left alone where others are not waited for.
        """
        waited_for = job.kind != "async" and not self._always_waited_for
        if self._measured or waited_for or job.kind == "preemption" or worker.exiting():
            return
        if not any(item.tree.has_arrays for item in job.trees):
            return
        self._measured = True
        clock = self._tools.emitter.clock
        started, level = clock.monotonic(), logging.INFO
        try:
            found = self._measure(job, flush)
        except Exception as exc:  # the step is there; a disk may be full, or the step deleted again
            found, level = Choice(None, f"it could not be measured ({exc})"), logging.WARNING
        if self._tools.leads:
            self._found = found
            reason = f"compression: {found.name or 'none'}; {found.reason}"
            logger.log(level, "%s", reason)
            elapsed = self._tools.emitter.since(started)
            self._tools.emitter.emit(Event("compression", job.step, elapsed, detail=reason))

    def _measure(self, job: SaveJob, flush: float) -> Choice:
        store, clock = self._tools.catalog.store, self._tools.emitter.clock
        nbytes = written_bytes(job)
        disk = disk_rate(store, clock, nbytes)
        if not self._tools.leads:
            return Choice(None, "")
        if not disk or flush <= 0:
            return Choice(None, "process 0 wrote nothing")
        tree, samples = samples_of(job, store, clock)
        trials = try_all(tree, samples, clock)
        return compression.choose(flush, nbytes, disk, trials, cores(), small_leaves(job))


def cores() -> int:
    """That compress at a time: half of those there are, since training has work for them, too."""
    return max(1, len(os.sched_getaffinity(0)) // 2)


def written_bytes(job: SaveJob) -> int:
    """Bytes of the values that this process wrote."""
    return sum(
        part.box.size * manifest.itemsize(item.tree.leaves[part.leaf].stored_dtype)
        for item in job.trees
        for wave in item.staged.waves
        for task in wave
        for part in task.parts
        if part.write
    )


def small_leaves(job: SaveJob) -> int:
    """How many leaves this process wrote without opening their arrays, as it cannot compressed."""
    return sum(
        any(blocks.is_plain(part, item.tree) for part in task.parts)
        for item in job.trees
        for wave in item.staged.waves
        for task in wave
    )


def disk_rate(store: Store, clock: Clock, most: int) -> float:
    """Bytes a second that files of up to `most` bytes take to be written, and synced where steps
    are; 0.0 where `most` is. The best of a few, of random bytes; they are removed again."""
    content = np.random.default_rng().bytes(min(most, PROBE_BYTES[-1]))
    best = 0.0
    begun = clock.monotonic()
    for size in sorted({min(size, most) for size in PROBE_BYTES} - {0}):
        if best and clock.monotonic() - begun > PROBE_SECONDS:
            break
        path = layout.probe_name(uuid.uuid4().hex[:16])
        store.make_dir(layout.trash_dir())
        try:
            started = clock.monotonic()
            store.write_file(path, content[:size])
            store.sync_path(path)
            best = max(best, size / max(clock.monotonic() - started, 1e-9))
        finally:
            store.remove_file(path)
    return best


def samples_of(job: SaveJob, store: Store, clock: Clock) -> tuple[StoredTree, list[np.ndarray]]:
    """Pieces of the values of a step, as stored, that stand for equal numbers of its bytes; and a
    tree of it.

    They are read from the step: its values are not held any longer, and their arrays may be donated.
    """
    leaves = [(item, leaf) for item in job.trees for leaf in range(len(item.tree.leaves))]
    readers: dict[str, Reader] = {}
    found: list[np.ndarray] = []
    started = clock.monotonic()
    for place in compression.places([item.tree.leaves[leaf] for item, leaf in leaves]):
        if found and clock.monotonic() - started > SAMPLE_SECONDS:
            break
        item, leaf = leaves[place.leaf]
        if item.name not in readers:
            path = store.path(f"{layout.step_name(job.step)}/{item.name}")
            readers[item.name] = Reader(job.step, item.tree, path, {}, compare=False)
        reader, unit = readers[item.name], Unit(leaf, place.box, ())
        values = np.empty(place.box.shape, item.tree.leaves[leaf].stored_dtype)
        reader.settle(reader.ask(unit, reader.begin([unit])[0], values))
        found += _pieces(values.reshape(-1), place.parts)
    return next(item.tree for item in job.trees if item.tree.has_arrays), found


def _pieces(values: np.ndarray, parts: Sequence[float]) -> Iterator[np.ndarray]:
    size = min(values.size, max(1, compression.SAMPLE_BYTES // values.itemsize))
    for part in parts:
        start = int(part * (values.size - size))
        yield values[start : start + size].copy()


def try_all(tree: StoredTree, samples: Sequence[np.ndarray], clock: Clock) -> list[Trial]:
    """How one core compresses samples that stand for equal numbers of bytes; of `tree` only the
    driver counts."""
    kinds: dict[str | None, StoredTree] = {
        name: replace(tree, compression=name) for name in (None, *compression.CODECS)
    }
    for kind in kinds.values():
        _store_one(samples[0], kind, clock)  # what only the first takes
    openings: dict[str, list[float]] = {name: [] for name in compression.CODECS}
    ratios: dict[str, list[float]] = {name: [] for name in compression.CODECS}
    costs: dict[str, list[float]] = {name: [] for name in compression.CODECS}
    started = clock.monotonic()
    for number, sample in enumerate(samples):
        if number and clock.monotonic() - started > TRIAL_SECONDS:
            break
        _, without, _ = _store_one(sample, kinds[None], clock)
        for name in compression.CODECS:
            opening, took, size = _store_one(sample, kinds[name], clock)
            openings[name].append(opening)
            ratios[name].append(size / sample.nbytes)
            costs[name].append(max(took - without, took / 10, 1e-9) / sample.nbytes)
    mean, median = statistics.mean, statistics.median
    return [
        Trial(name, mean(ratios[name]), 1 / mean(costs[name]), median(openings[name]))
        for name in compression.CODECS
    ]


def _store_one(values: np.ndarray, tree: StoredTree, clock: Clock) -> tuple[float, float, int]:
    """Seconds to open an array in memory, and for one thread to store it as one chunk; and the
    chunk's bytes."""
    shape, memory = values.shape, {"driver": "memory"}
    leaf = StoredLeaf((), "numpy", shape, values.dtype.name, "x", values.dtype.name, shape, shape)
    context = ts.Context({"data_copy_concurrency": {"limit": 1}})
    spec = arrays.array_spec(tree, leaf, memory)
    started = clock.monotonic()
    array = ts.open(spec, context=context, create=True).result()
    opened = clock.monotonic()
    array.write(values).result()
    written = clock.monotonic()
    stored = ts.KvStore.open(memory, context=context).result()
    key = layout.chunk_key(tree.driver, leaf.name, (0,))
    return opened - started, written - opened, len(stored.read(key).result().value)
