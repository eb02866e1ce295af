"""How a save becomes a step. Read this first.

`save()` has planned and ordered the copies; `finish_save` does the rest, on the save's own thread:

    open      all agree on what is saved; the intent and the directory     agree, catalog.begin
    write     arrays, a transaction per wave; trees' metadata; receipts    Writing.write_share
    transfer  the last value is on the host; only an event                 _OnHost
    audit     of a heartbeat: staged copies against the arrays             audit.Audit
    sync      databases merged; the step's metadata; everything synced     Writing.complete, sync
    readback  of a heartbeat: everything, from the device                  readback.read_back
    publish   the manifest, then one rename                                catalog.publish
    retain    what the policy drops goes, now that the new step is durable Retention.apply

In a job of several processes each does this with its own part. They meet in `open` and when all
have written (`write`); process 0 does the rest, and they hear when the step is complete (`complete`)
and in its place (`publish`). Of a heartbeat they meet once more when all have read their parts back.
In a job of one process the meetings cost nothing.

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any

from ckptmgr.core import manifest
from ckptmgr.core.info import StepInfo
from ckptmgr.core.manifest import Manifest
from ckptmgr.engine import agreeing
from ckptmgr.engine.agreeing import Claim
from ckptmgr.engine.audit import Audit
from ckptmgr.engine.board import BoardLost
from ckptmgr.engine.catalog import Attempt, Catalog
from ckptmgr.engine.meeting import Coordinator, InDoubt, telling
from ckptmgr.engine.readback import read_back
from ckptmgr.engine.retaining import Retention
from ckptmgr.engine.snapshot import Ordering
from ckptmgr.engine.steps import info_of
from ckptmgr.engine.worker import SaveHandle
from ckptmgr.engine.writing import Share, StateItem, TreeItem, Writing
from ckptmgr.errors import AuditFailed, CorruptCheckpoint, PeerFailed, StoreError
from ckptmgr.events import Emitter, Event
from ckptmgr.options import Options

logger = logging.getLogger("ckptmgr")

STOPPED_SECONDS = 30.0
"""How long process 0 waits, after a save has failed, until all have stopped writing."""


@dataclass(frozen=True, slots=True)
class SaveJob:
    """Everything about one save, captured by value.

    Attributes:
      name: of this save among the manager's, the same in every process.
      old: names of earlier ones that nobody speaks of any more when this one is open.
      ordering: the snapshot that is written.
      audit: of an audited heartbeat, the snapshot that it is compared with.
      called: monotonic time of the call of save().
      since_heartbeat: accepted saves since the last heartbeat, this one counted; 0 for one.
    """

    step: int
    name: str
    old: tuple[str, ...]
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

    @property
    def trees(self) -> list[TreeItem]:
        return [item for item in self.items if isinstance(item, TreeItem)]

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
    retention: Retention

    @property
    def deadline(self) -> float:
        """Bound of each wait for another process, in seconds."""
        return self.options.coordination.deadline_seconds

    @property
    def leads(self) -> bool:
        """Whether this is process 0, which decides and does what is done once."""
        return self.coordinator.rank == 0


def finish_save(
    job: SaveJob, tools: Tools, handle: SaveHandle, before: SaveHandle | None = None
) -> None:
    """Makes `job` a durable step, telling `handle` how far it is.

    Retention and the user's hook run in the order of the saves: after those of `before`.
    """
    with tools.emitter.span("save", job.step, job.nbytes, job.mode) as span:
        try:
            job.ordering.ask_for_pages()
            on_host = _OnHost(job, tools, handle)
            if before is not None and not before.settled:
                if job.ordering.arrive():
                    on_host()
                before.wait_settled()
            document = _commit(job, tools, on_host)
            handle.flush = tools.emitter.since(job.called)
            span.note(flush_latency=handle.flush)
        finally:
            job.close()
            tools.emitter.settled(handle)
    info = info_of(document)
    handle._mark_durable(info)
    if before is not None:
        before.join()
    if tools.leads:
        _after_commit(job, tools, info)


def _commit(job: SaveJob, tools: Tools, on_host: _OnHost) -> Manifest:
    with tools.emitter.span("open", job.step, mode=job.mode):
        attempt = _open(job, tools)
    try:
        world, rank = tools.coordinator.world, tools.coordinator.rank
        writing = Writing(attempt, tools.catalog.store, rank, world, job.items)
        shares = _write(job, tools, writing, on_host)
        return _publish(job, tools, writing, shares)
    except BaseException as exc:
        _give_up(job, tools, attempt, exc)
        if _may_go_on(exc):
            assert isinstance(exc, PeerFailed)
            raise InDoubt(exc.phase, exc.failures, exc.silent) from exc.__cause__
        raise


def _may_go_on(error: BaseException) -> bool:
    """Whether process 0, of which nothing is heard, may publish the step all the same: where it did
    not hear of the failure either, or is at it."""
    if not isinstance(error, PeerFailed) or isinstance(error, InDoubt) or not error.silent:
        return False
    return error.phase.endswith("/publish") or isinstance(error.__cause__, BoardLost)


def _open(job: SaveJob, tools: Tools) -> Attempt:
    """All agree on what is saved; process 0 makes its directory."""
    phase = f"{job.name}/open"
    begun: list[Attempt] = []

    def begin() -> dict[str, Any]:
        begun.append(tools.catalog.begin(job.step, job.overwrite))
        return {"id": begun[0].id, "tmp": begun[0].tmp}

    try:
        with telling(tools.coordinator, phase):
            found = agreeing.agree(
                tools.coordinator,
                phase,
                _claim(job) if tools.coordinator.world > 1 else Claim("", ""),
                {item.name: item.tree for item in job.trees},
                tools.deadline,
                begin,
            )
    except BaseException:
        for attempt in begun:
            tools.catalog.abandon(attempt)
        raise
    for name in job.old if tools.leads else ():
        tools.coordinator.forget(name)
    return Attempt(job.step, found["id"], found["tmp"])


def _claim(job: SaveJob) -> Claim:
    how = {"async": "in the background", "sync": "synchronously"}.get(job.kind, f"as {job.kind}")
    call = f"saves step {job.step} {how}" + (", overwriting" if job.overwrite else "")
    items = {item.name: "" for item in job.items}
    items |= {item.name: item.documents.text() for item in job.trees}
    return Claim(call, manifest.digest(json.dumps(items).encode()))


def _write(job: SaveJob, tools: Tools, writing: Writing, on_host: _OnHost) -> Sequence[Share]:
    """Writes what is this process's, and waits for the others; on process 0 what all wrote."""
    phase = f"{job.name}/write"
    shares: list[Share] = []

    def answer(payloads: Sequence[bytes]) -> bytes:
        shares.extend(map(Share.from_json, payloads))
        return json.dumps(agreeing.odd_values([share.own for share in shares])).encode()

    with telling(tools.coordinator, phase):
        mine = _write_share(job, tools, writing, on_host)
        odd = json.loads(tools.coordinator.exchange(phase, mine.to_json(), tools.deadline, answer))
        if odd:
            agreeing.compare_own(
                tools.coordinator,
                f"{phase}/values",
                odd,
                lambda: [[dotted, f"{i} {d}"] for dotted, _, i, d in writing.own_chunks()],
                tools.deadline,
            )
    return shares


def _write_share(job: SaveJob, tools: Tools, writing: Writing, on_host: _OnHost) -> Share:
    sums = tools.options.integrity.leaf_digests or job.kind == "heartbeat"
    audit = Audit(job.audit) if job.audit is not None else None
    try:
        with tools.emitter.span("write", job.step, job.nbytes, job.mode):
            share = writing.write_share(sums, on_host)
            on_host.mark()
        if audit is not None:
            _compare(job, audit, writing, tools)
    finally:
        if audit is not None:
            audit.end()
    return share


def _publish(job: SaveJob, tools: Tools, writing: Writing, shares: Sequence[Share]) -> Manifest:
    """Process 0 completes the step and puts it in its place; all hear of it.

    Of a heartbeat all read their parts back first. When all hear that the step is complete nobody
    has given up; so a process 0 that comes to this too late publishes nothing.
    """
    coordinator = tools.coordinator
    started = tools.emitter.clock.monotonic()

    def complete() -> bytes:
        writing.complete(shares)
        writing.put_step_metadata(job.created, job.metrics, tools.emitter.clock.time())
        with tools.emitter.span("sync", job.step, mode=job.mode):
            writing.sync()
        if coordinator.world > 1 and tools.emitter.since(started) > tools.deadline:
            raise StoreError(
                f"merging and syncing took longer than deadline_seconds={tools.deadline:g}, and the "
                "other processes have given up"
            )
        return b""

    def publish() -> bytes:
        document = _manifest(job, writing, shares)
        with tools.emitter.span("publish", job.step, mode=job.mode):
            tools.catalog.publish(writing.attempt, document, job.overwrite)
        return replace(document, files={}).to_json().encode()

    coordinator.lead(f"{job.name}/complete", complete, tools.deadline)
    if job.kind == "heartbeat":
        phase = f"{job.name}/readback"
        with telling(coordinator, phase):
            _read_back(job, tools, writing)
            coordinator.exchange(phase, b"", tools.deadline)
    answer = coordinator.lead(f"{job.name}/publish", publish, tools.deadline)
    return Manifest.from_json(answer)


def _manifest(job: SaveJob, writing: Writing, shares: Sequence[Share]) -> Manifest:
    stored_bytes, stored_files = writing.stored(shares)
    return Manifest(
        step=job.step,
        kind=job.kind,
        created=job.created,
        attempt=writing.attempt.id,
        nbytes=job.nbytes,
        items={item.name: "tree" if isinstance(item, TreeItem) else "state" for item in job.items},
        metrics=job.metrics,
        extra=job.extra,
        topology=job.topology,
        files=writing.files,
        since_heartbeat=job.since_heartbeat,
        stored_bytes=stored_bytes,
        stored_files=stored_files,
    )


def _give_up(job: SaveJob, tools: Tools, attempt: Attempt, error: BaseException) -> None:
    """Removes the directory of a save that failed, when nobody writes there any more.

    Where a process is silent it may write yet: the directory is left to the next start.
    """
    silent = error.silent if isinstance(error, PeerFailed) else ()
    try:
        if not silent:
            deadline = min(tools.deadline, STOPPED_SECONDS)
            tools.coordinator.exchange(f"{job.name}/stopped", b"", deadline)
    except PeerFailed as exc:
        silent = exc.silent or (0,)
    if not tools.leads:
        return
    if silent:
        tools.catalog.leave(attempt)
    else:
        tools.catalog.abandon(attempt)


def _compare(job: SaveJob, audit: Audit, writing: Writing, tools: Tools) -> None:
    """Raises AuditFailed where staged copies differ from the arrays; marks what they made."""
    with tools.emitter.span("audit", job.step, job.nbytes, job.mode):
        leaves = []
        for number, item in enumerate(job.trees):
            prefix = "" if len(job.items) == 1 else f"{item.name}: "
            wrote = writing.wrote[item.name]
            for leaf in audit.differing(number, (*wrote.chunks, *wrote.compared)):
                leaves.append(prefix + item.tree.leaves[leaf].dotted)
        if leaves:
            reason = f"the heartbeat of step {job.step} found torn copies of {leaves[0]!r}"
            try:
                suspects = tools.catalog.mark_suspects(reason)
            except StoreError as exc:
                raise AuditFailed(job.step, leaves, ()) from exc
            raise AuditFailed(job.step, leaves, suspects)


def _read_back(job: SaveJob, tools: Tools, writing: Writing) -> None:
    """What this process wrote again from the storage device, and on process 0 what the step has
    once. Raises CorruptCheckpoint with all problems."""
    with tools.emitter.span("readback", job.step, job.nbytes, job.mode) as span:
        found = read_back(
            tools.catalog.store.path(writing.attempt.tmp),
            {
                item.name: (
                    item.tree,
                    {(c.leaf, c.index): c.digest for c in writing.wrote[item.name].chunks},
                )
                for item in job.trees
            },
            writing.files,
            complete=writing.world == 1,
            below=writing.own_paths(),
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


def _after_commit(job: SaveJob, tools: Tools, info: StepInfo) -> None:
    try:
        with tools.emitter.span("retain", job.step, mode=job.mode) as span:
            decision = tools.retention.apply(job.step, tools.emitter.in_flight)
            if decision.given_up:
                span.note(detail=f"the budget gave up {sorted(decision.given_up)}")
    except Exception:
        logger.exception("step %d is saved, but what the policy drops could not go", job.step)
    if tools.options.on_committed is not None:
        try:
            tools.options.on_committed(info)
        except BaseException:
            logger.exception("step %d is saved, but on_committed raised", job.step)


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
