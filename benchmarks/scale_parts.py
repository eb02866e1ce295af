"""What `scale.py` measures, each part in a child process: the library's own code on made-up jobs."""

import contextlib
import functools
import gc
import json
import multiprocessing
import os
import shutil
import statistics
import sys
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import scale_job
from ckptmgr.core import layout, orbax_format, plan
from ckptmgr.core.manifest import Manifest
from ckptmgr.core.receipts import Chunk, Receipt
from ckptmgr.engine import arrays
from ckptmgr.engine.board import JaxBoard, LocalBoard
from ckptmgr.engine.catalog import Catalog
from ckptmgr.engine.coord import Together
from ckptmgr.engine.documents import Documents
from ckptmgr.engine.steps import checked_files, open_step
from ckptmgr.engine.store import Store
from ckptmgr.engine.writing import Share, TreeItem, Writing
from ckptmgr.events import Clock as EventClock
from command import child, progress
from measure import Clock, reset_peak, status
from scale_job import DIGEST, Job, changed

STEP = 1
TURNS = 3  # of what can be repeated


class Watch:
    """Seconds and CPU seconds of the blocks that it watched, and how far memory rose in one of
    them, in bytes."""

    def __init__(self) -> None:
        self.seconds, self.cpu, self.memory = 0.0, 0.0, 0

    def __enter__(self) -> "Watch":
        gc.collect()
        reset_peak()
        self._before = status("VmRSS")
        self._clock = Clock().__enter__()
        return self

    def __exit__(self, *_: Any) -> None:
        self._clock.__exit__()
        self.seconds += self._clock.wall
        self.cpu += self._clock.cpu
        self.memory = max(self.memory, status("VmHWM") - self._before)

    def over(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, watched."""

        @functools.wraps(call)
        def wrapper(*args: Any) -> Any:
            with self:
                return call(*args)

        return wrapper


def median(call: Callable[[], float]) -> float:
    return statistics.median(call() for _ in range(TURNS))


# -- what needs no other process and no file ----------------------------------------------------


def pure(task: dict[str, Any]) -> dict[str, Any]:
    """CPU seconds and bytes."""
    job = Job(**task["job"])
    found = scale_job.planned(job, TURNS if job.processes < 10_000 else 1)
    process, most = found.chunks.most_common(1)[0]
    container = layout.container(process)
    files = {f"{container}/{layout.OCDBT_MANIFEST}": 148, f"{container}/d/{DIGEST}": most * 2**20}
    leaves = sorted(i % job.leaves for i in range(most))
    chunks = tuple(Chunk(leaf, (i, 0), 2**20, DIGEST) for i, leaf in enumerate(leaves))
    receipt = Receipt(process, chunks, files).to_json()
    payload = scale_job.share_of(process, receipt, most)
    payloads = [payload] * job.processes
    even = found.nbytes.total() / job.processes
    progress(f"{job.layout} {job.processes}: plan {found.seconds:.2f} s")
    return {
        "chunks": job.chunks,
        "chunks_each": most,
        "plan": found.seconds,
        "least": min(found.nbytes[p] for p in range(job.processes)) / even,
        "most": max(found.nbytes.values()) / even,
        "receipt": len(receipt),
        "receipt_parse": cpu(lambda: Receipt.from_json(receipt)),
        "share": len(payload),
        "shares_parse": cpu(lambda: [Share.from_json(payload) for payload in payloads]),
        "shares_held": held(lambda: [Share.from_json(payload) for payload in payloads])
        + len(payloads) * sys.getsizeof(payload),
    }


def cpu(call: Callable[[], Any]) -> float:
    def once() -> float:
        start = time.process_time()
        call()
        return time.process_time() - start

    return median(once)


def held(call: Callable[[], Any]) -> int:
    """Bytes of what a call returns."""
    tracemalloc.start()
    found = call()
    nbytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return nbytes if found else 0


# -- what process 0 does to complete a step -----------------------------------------------------


def commit(task: dict[str, Any]) -> dict[str, Any]:
    """Process 0's part of a save, and then opening the step as each process does to restore."""
    job = Job(**task["job"])
    store = Store(str(Path(task["directory"], "root")))
    store.make_dir("")
    catalog = Catalog(store, EventClock(), lambda: "a" * 16)
    attempt = catalog.begin(STEP)
    out = str(Path(task["directory"], "shares"))
    args = (job, store.path(attempt.tmp), out)
    maker = multiprocessing.get_context("spawn").Process(target=scale_job.make, args=args)
    maker.start()
    maker.join()
    if maker.exitcode != 0:
        raise RuntimeError("the databases could not be made")
    os.sync()
    shares = [Share.from_json(payload) for payload in json.loads(Path(out).read_text())]
    merging = Watch()
    seconds = median(lambda: merge(job, store.path(f"{attempt.tmp}/default"), merging))
    merge_cpu = merging.cpu / TURNS

    staged = SimpleNamespace(plan=plan.SavePlan(job.tree, (), 0), waves=())
    item = TreeItem("default", staged, Documents(job.flat, job.tree))
    writing = Writing(attempt, store, 0, job.processes, [item], files=dict(shares[0].files))
    found = complete(writing, catalog, shares)
    progress(f"{job.layout} {job.processes}: merge {seconds:.2f} s, the rest {found['rest']:.2f} s")
    return {
        "merge": seconds,
        "merge_cpu": merge_cpu,
        "merge_memory": merging.memory,
        **found,
        **reopen(store, writing),
    }


def merge(job: Job, item: str, watch: Watch) -> float:
    """One merge, of which nothing is left; its seconds."""
    containers = [layout.container(process) for process in range(job.processes)]
    before = watch.seconds
    with watch:
        arrays.merge(item, containers, job.chunks + len(job.tree.leaves))
    shutil.rmtree(f"{item}/d")
    Path(item, layout.OCDBT_MANIFEST).unlink()
    return watch.seconds - before


def complete(writing: Writing, catalog: Catalog, shares: list[Share]) -> dict[str, Any]:
    """From all shares to a step in its place: everything but the merge, and `_sharding` apart."""
    merging, sharding, whole = Watch(), Watch(), Watch()
    name = layout.sharding_file("default")
    real = Writing.put

    def put(self: Writing, path: str, text: str | bytes) -> None:
        (sharding.over(real) if path == name else real)(self, path, text)

    with (
        changed(arrays, "merge", merging.over(arrays.merge)),
        changed(orbax_format, "shardings", sharding.over(orbax_format.shardings)),
        changed(Writing, "put", put),
        whole,
    ):
        for item in writing.trees:
            writing.put_documents(item)
        writing.complete(shares)
        writing.put_step_metadata(0.0, {}, 0.0)
        with sharding:
            writing.store.sync_path(f"{writing.attempt.tmp}/{name}")
        writing.sync()
        catalog.publish(writing.attempt, document(writing), False)
    return {
        "rest": whole.seconds - merging.seconds - sharding.seconds,
        "rest_cpu": whole.cpu - merging.cpu - sharding.cpu,
        "sharding": sharding.seconds,
        "sharding_cpu": sharding.cpu,
        "sharding_bytes": writing.files[name][0],
    }


def document(writing: Writing) -> Manifest:
    items = {"default": "tree"}
    return Manifest(STEP, "sync", 0.0, writing.attempt.id, 0, items, {}, None, {}, writing.files)


def reopen(store: Store, writing: Writing) -> dict[str, Any]:
    """Looking at a step, and opening it; CPU seconds."""
    listing, reading, opening = Watch(), Watch(), Watch()
    with listing:
        sizes = store.sizes(str(STEP))
    step, name = store.path(str(STEP)), layout.sharding_file("default")
    with reading:
        checked_files(Store(step), {name: writing.files[name]})
    with opening:
        open_step(step, STEP, document(writing))
    whole = {path for path in sizes if "process_" not in path}  # nobody's but process 0's
    return {
        "listing": listing.cpu,
        "files": len(sizes),
        "bytes_by_0": sum(sizes[path] for path in whole),
        "manifest": sizes[layout.MANIFEST],
        "sharding_read": reading.cpu,
        "open": opening.cpu - reading.cpu,
        "open_memory": opening.memory,
    }


# -- messages, and where shards lie -------------------------------------------------------------


def messages(task: dict[str, Any]) -> list[dict[str, Any]]:
    """What one save costs on a real service, for each of the sizes."""
    import jax

    where = f"localhost:{task['port']}"
    jax.distributed.initialize(where, 1, 0, coordinator_bind_address=where)
    each = messages_of_one()
    found = []
    for number, (processes, payload) in enumerate(task["sizes"]):
        first = Together(Counting(JaxBoard()), 0, processes, f"job{number}")
        calls, by_first, message = meet(first, b"x" * payload)
        found.append(
            {
                "messages_each": each,
                "messages_all": calls + each * (processes - 1),
                "messages_by_0": by_first,
                "message": message,
            }
        )
        progress(f"messages of {processes} processes: {message * 1e3:.2f} ms each")
    return found


def save_phases(me: Together, payload: bytes) -> None:
    """The meetings of one save, as `pipeline` has them."""
    me.exchange("save.1/open", b"x" * 100, 60)
    me.exchange("save.1/write", payload, 60)
    me.lead("save.1/complete", lambda: b"", 60)
    me.lead("save.1/publish", lambda: b"x" * 500, 60)


def messages_of_one() -> float:
    """Calls of the board in one save, of a process that does not lead, in a job of eight."""
    board = LocalBoard()
    boards = [Counting(board) for _ in range(8)]
    members = [Together(mine, rank, 8, "job") for rank, mine in enumerate(boards)]
    threads = [threading.Thread(target=save_phases, args=(me, b"")) for me in members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return statistics.mean(board.calls for board in boards[1:])


def meet(first: Together, payload: bytes) -> tuple[int, float, float]:
    """Process 0's own meetings, after one client has put what all others say and before it reads
    their answers. Returns its calls, its seconds, and the seconds of one call of the others."""
    board = first._board
    seconds, calls = {"0": 0.0, "others": 0.0}, Counter()
    others = range(1, first.world)

    @contextlib.contextmanager
    def timed(whose: str) -> Iterator[None]:
        before, start = board.calls, time.perf_counter()
        yield
        seconds[whose] += time.perf_counter() - start
        calls[whose] += board.calls - before

    for phase, text in (("save.1/open", b"x" * 100), ("save.1/write", payload)):
        with timed("others"):
            for rank in others:
                board.put(first._payload_key(phase, rank), text)
        with timed("0"):
            first.exchange(phase, text, 60)
        with timed("others"):
            for _ in others:
                board.get(first._answer_key(phase), 60)
    with timed("0"):
        first.lead("save.1/complete", lambda: b"", 60)
        first.lead("save.1/publish", lambda: b"x" * 500, 60)
    first.forget("save.1")
    return calls["0"], seconds["0"], seconds["others"] / calls["others"]


class Counting:
    """A board that counts its calls."""

    def __init__(self, board: Any) -> None:
        self._board = board
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        self.calls += 1
        return getattr(self._board, name)


def places(task: dict[str, Any]) -> list[dict[str, Any]]:
    """`PlacesCache` on virtual devices: seconds for one new sharding and shape."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from ckptmgr.engine.shardings import PlacesCache

    found = []
    for count in task["sizes"]:
        mesh = Mesh(np.array(jax.devices()[:count]).reshape(-1, min(128, count)), ("data", "fsdp"))
        seconds = []
        for turn in range(7):
            sharding = NamedSharding(mesh, PartitionSpec("fsdp"))
            array: Any = jax.ShapeDtypeStruct((128 * (turn + 1), 8), "float32", sharding=sharding)
            start = time.process_time()
            PlacesCache()(array)
            seconds.append(time.process_time() - start)
        found.append({"devices": count, "places": statistics.median(seconds)})
    return found


PARTS = {"pure": pure, "commit": commit, "messages": messages, "places": places}

if __name__ == "__main__":
    sys.exit(child(lambda task: PARTS[task["part"]](task)))
