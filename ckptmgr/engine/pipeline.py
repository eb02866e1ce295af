"""How a save becomes a step. Read this first.

`save()` has planned and ordered the copies; `finish_save` does the rest, on the save's own thread:

    open      the intent and the temporary directory                       catalog.begin
    write     arrays, one OCDBT transaction per wave; metadata; receipts    arrays.write, merge
    transfer  the last value is on the host; only an event                  _OnHost
    audit     of a heartbeat: staged copies against the arrays              audit.Audit
    sync      every file and directory, bottom up                           store.sync_tree
    readback  of a heartbeat: everything, from the device                   readback.read_back
    publish   the manifest, then one rename                                 catalog.publish
    retain    what the policy drops goes, now that the new step is durable  retention.decide

A synchronous save is the same with `.result()` behind it. Where two saves may be in flight the
second waits with its first write until the first is durable. A save that fails anywhere before the
rename leaves nothing but a directory that the next start removes, and is raised; what fails after
it (retention, the user's hook) is logged, for the step is there.
"""

from __future__ import annotations

import functools
import json
import logging
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

from ckptmgr.core import layout, manifest, orbax_format, retention, values
from ckptmgr.core.info import StepInfo
from ckptmgr.core.manifest import Manifest, Receipt, StoredTree
from ckptmgr.core.tree import Flat, unflatten
from ckptmgr.engine import arrays
from ckptmgr.engine.audit import Audit
from ckptmgr.engine.catalog import Attempt, Catalog
from ckptmgr.engine.coord import Coordinator
from ckptmgr.engine.readback import read_back
from ckptmgr.engine.snapshot import Ordering
from ckptmgr.engine.staged import Staged
from ckptmgr.engine.steps import info_of
from ckptmgr.engine.worker import SaveHandle
from ckptmgr.errors import AuditFailed, CorruptCheckpoint, StoreError
from ckptmgr.events import Emitter, Event
from ckptmgr.options import Options

logger = logging.getLogger("ckptmgr")


@dataclass(frozen=True, slots=True)
class TreeItem:
    """One pytree on its way to disk."""

    name: str
    flat: Flat
    staged: Staged

    @property
    def tree(self) -> StoredTree:
        return self.staged.plan.tree


@dataclass(frozen=True, slots=True)
class StateItem:
    """The state of one object with `get_state()`, encoded by `core.values` when save() was called."""

    name: str
    state: Any


@dataclass(frozen=True, slots=True)
class SaveJob:
    """Everything about one save, captured by value.

    Attributes:
      ordering: the snapshot that is written.
      audit: of an audited heartbeat, the snapshot that it is compared with.
      called: monotonic time of the call of save().
      since_heartbeat: accepted saves since the last heartbeat, this one counted; 0 for one.
    """

    step: int
    kind: str
    created: float
    overwrite: bool
    items: tuple[TreeItem | StateItem, ...]
    ordering: Ordering
    audit: Ordering | None
    metrics: Any
    extra: Any
    topology: Mapping[str, Any]
    nbytes: int
    mode: str
    called: float
    since_heartbeat: int

    @property
    def staging_bytes(self) -> int:
        """Host memory that its copies take."""
        return sum(ordering.nbytes for ordering in self.orderings)

    @property
    def orderings(self) -> tuple[Ordering, ...]:
        """Its snapshots, in the order in which the caller orders their copies."""
        return (self.ordering,) if self.audit is None else (self.ordering, self.audit)

    def close(self) -> None:
        """Gives back all host memory, and lets a caller go that waits for some."""
        for ordering in self.orderings:
            ordering.close()


@dataclass(frozen=True, slots=True)
class Tools:
    """What a save works with."""

    catalog: Catalog
    coordinator: Coordinator
    emitter: Emitter
    options: Options


@dataclass(slots=True)
class _Written:
    """Files of the step under way, by path below the step: metadata -> (bytes, digest), data ->
    bytes."""

    attempt: Attempt
    tools: Tools
    files: dict[str, tuple[int, str]] = field(default_factory=dict)
    data: dict[str, int] = field(default_factory=dict)
    dirs: set[str] = field(default_factory=set)

    def put(self, path: str, text: str | bytes) -> None:
        data = text.encode() if isinstance(text, str) else text
        parent = path.rpartition("/")[0]
        if parent and parent not in self.dirs:
            self.tools.catalog.store.make_dir(f"{self.attempt.tmp}/{parent}")
            self.dirs.add(parent)
        self.tools.catalog.store.write_file(f"{self.attempt.tmp}/{path}", data)
        self.note(path, data)

    def note(self, path: str, data: bytes) -> None:
        self.files[path] = (len(data), manifest.digest(data))


def finish_save(
    job: SaveJob, tools: Tools, handle: SaveHandle, before: SaveHandle | None = None
) -> None:
    """Makes `job` a durable step, telling `handle` how far it is.

    Retention and the user's hook run in the order of the saves: after those of `before`.
    """
    with tools.emitter.span("save", job.step, job.nbytes, job.mode) as span:
        try:
            on_host = _OnHost(job, tools, handle)
            if before is not None and not before.settled:
                if job.ordering.arrive():
                    on_host()
                before.wait_settled()
            document = _commit(job, tools, on_host)
            span.note(flush_latency=tools.emitter.since(job.called))
        finally:
            job.close()
            tools.emitter.settled(handle)
    info = info_of(document)
    handle._mark_durable(info)
    if before is not None:
        before.join()
    _after_commit(job, tools, info)


def _commit(job: SaveJob, tools: Tools, on_host: _OnHost) -> Manifest:
    with tools.emitter.span("open", job.step, mode=job.mode):
        attempt = tools.catalog.begin(job.step, job.overwrite)
    try:
        document = _write_step(job, tools, attempt, on_host)
        with tools.emitter.span("publish", job.step, mode=job.mode):
            tools.catalog.publish(attempt, document, job.overwrite)
    except BaseException:
        tools.catalog.abandon(attempt)
        raise
    return document


def _write_step(job: SaveJob, tools: Tools, attempt: Attempt, on_host: _OnHost) -> Manifest:
    written = _Written(attempt, tools)
    audit = Audit(job.audit) if job.audit is not None else None
    try:
        with tools.emitter.span("write", job.step, job.nbytes, job.mode):
            wrote = _write_items(job, tools, written, on_host)
        if audit is not None:
            _compare(job, audit, wrote, tools)
    finally:
        if audit is not None:
            audit.end()
    with tools.emitter.span("sync", job.step, mode=job.mode):
        _check_complete(tools.catalog.store.sync_tree(attempt.tmp), written)
    if job.kind == "heartbeat":
        _read_back(job, tools, attempt, written, wrote)
    return Manifest(
        step=job.step,
        kind=job.kind,
        created=job.created,
        attempt=attempt.id,
        nbytes=job.nbytes,
        items={item.name: "tree" if isinstance(item, TreeItem) else "state" for item in job.items},
        metrics=job.metrics,
        extra=job.extra,
        topology=job.topology,
        files=written.files,
        since_heartbeat=job.since_heartbeat,
    )


Wrote = Mapping[str, arrays.Written]
"""What of the arrays of each item."""


def _write_items(job: SaveJob, tools: Tools, written: _Written, on_host: _OnHost) -> Wrote:
    """Arrays of all items first, so that their values leave the host soon, then metadata."""
    trees = [item for item in job.items if isinstance(item, TreeItem)]
    with_arrays = [item.name for item in trees if item.tree.has_arrays]
    sums = tools.options.integrity.leaf_digests or job.kind == "heartbeat"
    wrote: dict[str, arrays.Written] = {}
    for tree in trees:
        last = with_arrays[-1:] == [tree.name]
        tell = on_host if last else lambda: None
        wrote[tree.name] = _write_arrays(tree, tools, written.attempt, tell, sums)
    on_host.mark()
    for item in job.items:
        if isinstance(item, TreeItem):
            _write_tree_metadata(item, written, wrote[item.name], tools)
        else:
            _write_state(item, written, tools.coordinator.rank)
    _write_step_metadata(job, written, tools)
    return wrote


def _compare(job: SaveJob, audit: Audit, wrote: Wrote, tools: Tools) -> None:
    """Raises AuditFailed where staged copies differ from the arrays; marks what they made."""
    with tools.emitter.span("audit", job.step, job.nbytes, job.mode):
        trees = [item for item in job.items if isinstance(item, TreeItem)]
        leaves = []
        for number, item in enumerate(trees):
            prefix = "" if len(job.items) == 1 else f"{item.name}: "
            for leaf in audit.differing(number, wrote[item.name].chunks):
                leaves.append(prefix + item.tree.leaves[leaf].dotted)
        if leaves:
            reason = f"the heartbeat of step {job.step} found torn copies of {leaves[0]!r}"
            try:
                suspects = tools.catalog.mark_suspects(reason)
            except StoreError as exc:
                raise AuditFailed(job.step, leaves, ()) from exc
            raise AuditFailed(job.step, leaves, suspects)


def _read_back(
    job: SaveJob, tools: Tools, attempt: Attempt, written: _Written, wrote: Wrote
) -> None:
    """Everything again from the storage device. Raises CorruptCheckpoint with all problems."""
    trees = {item.name: item.tree for item in job.items if isinstance(item, TreeItem)}
    with tools.emitter.span("readback", job.step, job.nbytes, job.mode) as span:
        found = read_back(
            tools.catalog.store.path(attempt.tmp),
            {
                name: (tree, {(c.leaf, c.index): c.digest for c in wrote[name].chunks})
                for name, tree in trees.items()
            },
            written.files,
        )
        span.note(detail=found.source)
        if found.problems:
            raise CorruptCheckpoint(job.step, found.problems)


class _OnHost:
    """Tells, once, that every value is on the host: what the device has to do with a save ends."""

    def __init__(self, job: SaveJob, tools: Tools, handle: SaveHandle) -> None:
        self._job = job
        self._emitter = tools.emitter
        self._told = False
        self.mark = handle._mark_staged

    def __call__(self) -> None:
        if self._told:
            return
        self._told = True
        self.mark()
        job, since = self._job, self._emitter.since
        latency, seconds = since(job.called), since(job.ordering.started)
        self._emitter.emit(
            Event(
                "transfer",
                job.step,
                seconds,
                job.nbytes,
                mode=job.mode,
                snapshot_latency=latency,
            )
        )


def _check_complete(sizes: Mapping[str, int], written: _Written) -> None:
    """What is about to be published must be there: somebody may have removed it meanwhile."""
    expected = {path: size for path, (size, _) in written.files.items()} | written.data
    for path, size in expected.items():
        if sizes.get(path) != size:
            found = f"has {sizes[path]} bytes" if path in sizes else "is missing"
            where = written.tools.catalog.store.path(f"{written.attempt.tmp}/{path}")
            raise StoreError(f"{where} {found}, {size} bytes were written")


def _write_arrays(
    item: TreeItem,
    tools: Tools,
    attempt: Attempt,
    on_host: Callable[[], None],
    leaf_digests: bool,
) -> arrays.Written:
    """This process's arrays into its own database, then all databases into one."""
    store, rank = tools.catalog.store, tools.coordinator.rank
    where = f"{attempt.tmp}/{item.name}"
    store.make_dir(where)
    if not item.tree.has_arrays:
        return arrays.Written((), {})
    mine = f"{where}/{layout.container(rank)}"
    store.make_dir(mine)
    wrote = arrays.write(
        item.staged,
        store.path(mine),
        sync=store.durable,
        leaf_digests=leaf_digests,
        before_wave=lambda: _touch(tools, mine),
        on_host=on_host,
    )
    names = [layout.container(process) for process in range(tools.coordinator.world)]
    array_count = sum(leaf.has_array for leaf in item.tree.leaves)
    arrays.merge(store.arrays(where), names, array_count + len(wrote.chunks))
    return wrote


def _touch(tools: Tools, where: str) -> None:
    """The store's say before each wave: where a faulty store fails the writing of arrays."""
    tools.catalog.store.arrays(where)


def _write_tree_metadata(
    item: TreeItem, written: _Written, wrote: arrays.Written, tools: Tools
) -> None:
    name, tree, rank = item.name, item.tree, tools.coordinator.rank
    sizes = tools.catalog.store.sizes(f"{written.attempt.tmp}/{name}")
    mine = layout.container(rank) + "/"
    if tree.has_arrays and f"{mine}{layout.OCDBT_MANIFEST}" not in sizes:
        raise StoreError(
            f"{tools.catalog.store.path(written.attempt.tmp)}/{name}/{mine} vanished while it was written"
        )
    files = {f: n for f, n in sizes.items() if f.startswith(mine)}
    receipt = Receipt(rank, wrote.chunks, files, wrote.sums)
    written.data |= {f"{name}/{file}": size for file, size in receipt.files.items()}
    for path in sizes:
        if not path.startswith(layout.containers_prefix()):
            full = f"{name}/{path}"
            written.note(full, tools.catalog.store.read_file(f"{written.attempt.tmp}/{full}"))
    written.put(layout.receipt_file(name, rank), receipt.to_json())
    written.put(layout.tree_file(name), tree.to_json())
    written.put(layout.pytree_metadata(name), orbax_format.pytree_metadata(item.flat, tree))
    written.put(layout.sharding_file(name), orbax_format.shardings(tree))
    written.put(layout.array_metadatas(name, rank), orbax_format.array_metadatas(tree))
    strings = orbax_format.strings(tree)
    if strings is not None:
        written.put(layout.strings_file(name), strings)
    if not tree.leaves:
        written.put(layout.json_item_file(name), json.dumps(unflatten(tree.containers, int)))
    written.put(layout.item_commit(name), "Checkpoint commit was successful\n")


def _write_state(item: StateItem, written: _Written, rank: int) -> None:
    text = values.dumps(item.state)
    written.put(layout.json_item_file(item.name), text)
    written.put(layout.state_file(item.name, rank), text)


def _write_step_metadata(job: SaveJob, written: _Written, tools: Tools) -> None:
    kinds = {
        # Orbax's tree handlers refuse a tree without leaves
        item.name: "tree" if isinstance(item, TreeItem) and item.tree.leaves else "state"
        for item in job.items
    }
    metrics = {
        name: value
        for name, value in (values.decode(job.metrics) or {}).items()
        if isinstance(name, str) and isinstance(value, (bool, int, float, str))
    }  # what Orbax's JSON can hold; all of them are in the manifest
    if metrics:
        written.put(layout.metrics_file(), json.dumps(metrics))
    now = tools.emitter.clock.time()
    text = orbax_format.checkpoint_metadata(kinds, metrics, job.created, now)
    written.put(layout.CHECKPOINT_METADATA, text)
    written.put(layout.COMMIT_SUCCESS, f"Checkpoint commit was successful to {job.step}\n")


def _after_commit(job: SaveJob, tools: Tools, info: StepInfo) -> None:
    try:
        with tools.emitter.span("retain", job.step, mode=job.mode):
            retain(tools, job.step)
    except Exception:
        logger.exception("step %d is saved, but what the policy drops could not go", job.step)
    if tools.options.on_committed is not None:
        try:
            tools.options.on_committed(info)
        except BaseException:
            logger.exception("step %d is saved, but on_committed raised", job.step)


def retain(tools: Tools, just_saved: int) -> tuple[int, ...]:
    """Deletes what the retention policy drops; returns those steps."""
    if isinstance(tools.options.retention, retention.KeepAll):
        return ()
    infos = [
        info_of(entry.manifest)
        for entry in tools.catalog.committed()
        # what Orbax wrote is not ours to delete, and what is suspect is the user's to judge
        if entry.manifest is not None and not entry.suspect
    ]
    now = tools.emitter.clock.time()
    decision = retention.decide(infos, tools.options.retention, now, just_saved)
    store = tools.catalog.store
    for step in decision.drop:
        if not any(store.is_dir(layout.step_name(kept)) for kept in decision.keep):
            break  # somebody rolled back meanwhile; what is left is all there is
        tools.catalog.forget(step)
    return decision.drop


@functools.cache
def versions() -> dict[str, str]:
    """Versions of what wrote a step, for its manifest."""
    found = {"python": platform.python_version()}
    for name in ("ckptmgr", "jax", "jaxlib", "tensorstore", "numpy"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
