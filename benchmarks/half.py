"""The part of `memory.py --restore` about a state of half the memory, which cannot be there twice.

A child saves it without a snapshot, drops it, and restores it within `Restore(host_bytes=...)`. The
peak of the restore is what the kernel saw, over what the process held just before.
"""

import ctypes
import gc
import time
from pathlib import Path
from typing import Any

import report
from command import progress
from measure import reset_peak, status
from report import RESTORED_AT_MOST, Check
from systems import Ckptmgr
from workloads import Workload, dense

NAME, SYSTEM = "half", "sync"
DEVICES = 8
HOST_BYTES = 256 * 2**20
SLACK = 64 * 2**20
"""Of threads, stacks, and what the libraries keep of a restore's metadata."""
SMOKE_LEAVES, SMOKE_ROWS = 4, 64


def workload(nbytes: int, smoke: bool) -> Workload:
    """Leaves of 64 MiB, about `nbytes` of them; in smoke tests of 1 MiB and few."""
    if smoke:
        return dense(NAME, DEVICES, SMOKE_LEAVES, SMOKE_ROWS)
    leaf = dense(NAME, DEVICES, 1, 4096).nbytes
    return dense(NAME, DEVICES, max(1, nbytes // leaf), 4096)


def measure(task: dict[str, Any]) -> dict[str, Any]:
    """One save and one restore, all values compared. Bytes, seconds."""
    import jax

    import ckptmgr

    chosen = workload(task["half"], task["smoke"])
    options = ckptmgr.Options(
        snapshot=ckptmgr.Snapshot(mode=SYSTEM),
        restore=ckptmgr.Restore(host_bytes=HOST_BYTES),
        heartbeat=None,
    )
    root = Path(task["directory"], "root")
    root.mkdir()
    system = Ckptmgr(root, options)
    like = chosen.like()
    first = dict(list(like.items())[:1])
    state = {name: chosen.leaf(name, seed=0) for name in first}
    system.save(0, state)  # what a first save and a first restore set up is there from now on
    state = jax.block_until_ready(system.restore(0, first))
    del state
    system.delete(0)

    before = held()
    reset_peak()
    started = time.monotonic()
    parts = one_by_one(chosen)
    state = {name: part.leaf(name, seed) for seed, (name, part) in enumerate(parts.items())}
    system.save(1, state)
    saved = time.monotonic() - started
    save_peak = status("VmHWM")
    del state

    base = held()
    reset_peak()
    started = time.monotonic()
    restored = jax.block_until_ready(system.restore(1, like))
    seconds = time.monotonic() - started
    peak = status("VmHWM")
    for seed, (name, part) in enumerate(parts.items()):
        part.verify({name: restored.pop(name)}, seed)  # makes a copy, which its array keeps
    system.close()
    progress(f"{NAME} {report.show_bytes(chosen.nbytes)}: saved, restored, all values right")
    return {
        "system": task["system"],
        "nbytes": chosen.nbytes,
        "before": before,
        "save_peak": save_peak,
        "base": base,
        "peak": peak,
        "host_bytes": HOST_BYTES,
        "seconds_save": saved,
        "seconds_restore": seconds,
    }


def one_by_one(whole: Workload) -> dict[str, Workload]:
    """A workload for each leaf, so that each can be checked and dropped: there is no room for all
    of them twice."""
    return {
        name: Workload(name, whole.kind, whole.mesh, {name: leaf})
        for name, leaf in whole.leaves.items()
    }


def held() -> int:
    """Resident memory without what is only free: else a restore would take that, and seem to take
    nothing."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    return status("VmRSS")


def table(records: list[dict[str, Any]]) -> str:
    head = ["", "before", "save, peak over before", "dropped", "restore, peak over that"]
    lines = [[*head, "of the bytes restored", "over them"]]
    for record in records:
        grown = record["peak"] - record["base"]
        over = grown - record["nbytes"]
        sizes = (
            record["before"],
            record["save_peak"] - record["before"],
            record["base"],
            grown,
        )
        shown = [report.show_bytes(size) for size in sizes]
        ratio = f"{grown / record['nbytes']:.3f}"
        lines.append([record["system"], *shown, ratio, f"{over / 2**20:.0f} MiB"])
    return report.columns(lines)


def checks_of(records: list[dict[str, Any]]) -> list[Check]:
    found = []
    for record in records:
        grown, name = record["peak"] - record["base"], record["system"]
        ratio = grown / record["nbytes"]
        title = "peak of the restore, of the bytes restored"
        found.append(Check(title, name, ratio, RESTORED_AT_MOST))
        allowed = record["host_bytes"] + SLACK
        title = f"over the bytes restored, of host_bytes and {report.show_bytes(SLACK)}"
        found.append(Check(title, name, (grown - record["nbytes"]) / allowed, 1.0))
    return found
