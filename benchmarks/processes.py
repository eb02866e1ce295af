"""Saves of several processes on this machine: `python benchmarks/processes.py`.

Each process is a process of a JAX job; all share the disk and the cores. ckptmgr and stock Orbax
take turns in one job. A time is that of the slowest process, from a barrier before the call. Calls
of JAX's coordination service are counted in each process by a client that passes them on; the
bytes that a process writes are those of its own database.
"""

import argparse
import json
import socket
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import command
import report
from command import name_of, progress
from measure import Clock, settle
from report import Check
from systems import SYSTEMS, System, each_open
from workloads import Leaf, Workload

WORKLOADS = ("dense", "small", "replicated")
DEFAULT_SYSTEMS = ("ckptmgr", "orbax")
DEVICES = 4  # of each process
UNEVEN_AT_MOST = 1.10  # bytes of the process that writes most, of the mean

ROWS: report.Rows = (
    ("in_save", "in save()", report.seconds),
    ("durable", "to durable", report.seconds),
    ("restore", "restore", report.seconds),
    ("cpu_save", "CPU of all, save", report.seconds),
    ("uneven", "most bytes / mean", report.factor),
    ("barriers", "barriers", report.count),
    ("waits", "waits for a note", report.count),
    ("notes", "notes", report.count),
)
RATIO_MEASURES = ("in_save", "durable", "restore", "cpu_save")


def catalogue(smoke: bool, processes: int) -> dict[str, Workload]:
    """States on a mesh of processes x devices. `replicated` has a copy in every process."""
    mesh = {"data": processes, "x": DEVICES}
    rows, count = (64, 60) if smoke else (4096, 3000)
    both: Any = ("data", "x")
    return {
        "dense": Workload(
            "dense",
            "dense",
            mesh,
            {f"l{i:02d}": Leaf((rows, 4096), spec=(both,)) for i in range(16)},
        ),
        "small": Workload(
            "small",
            "small",
            mesh,
            {f"l{i:04d}": Leaf((64, 64), spec=(both,)) for i in range(count)},
        ),
        "replicated": Workload(
            "replicated",
            "dense",
            mesh,
            {f"l{i:02d}": Leaf((rows // 4, 4096), spec=("x",)) for i in range(32)},
        ),
    }


def main() -> int:
    args = parse_args()
    directory = command.directory_of(args)
    known = catalogue(args.smoke, args.processes)
    needed = 3 * max(known[name].nbytes for name in args.workloads)
    modules = {SYSTEMS[name_of(label)].needs for label in args.systems}
    if problem := command.why_not(directory, needed, modules):
        print(problem, file=sys.stderr)
        return command.FAILED
    facts = command.begin(args, directory)
    settings = {name: getattr(args, name) for name in ("smoke", "processes", "systems", "reps")}
    results = []
    for name in args.workloads:
        records = run_job({**settings, "workload": name}, directory)
        if records is None:
            print(f"{name}: a measuring process failed, see above.", file=sys.stderr)
            return command.FAILED
        results.append(show(known[name], args, records))
    return command.finish(args, facts, settings, results)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    command.add_arguments(parser, WORKLOADS, DEFAULT_SYSTEMS)
    parser.add_argument("--processes", type=int, default=2, help="of the job. default: 2")
    command.add_reps(parser, 5, "one warm-up")
    args = command.repeated(parser)
    if args.processes < 1:
        parser.error("--processes must be at least 1")
    return args


def run_job(task: dict[str, Any], directory: Path) -> list[dict[str, Any]] | None:
    """One record per system and repetition, or None when a process failed."""
    with tempfile.TemporaryDirectory(prefix="ckptmgr-bench-", dir=directory) as scratch:
        with socket.socket() as found:
            found.bind(("localhost", 0))
            port = found.getsockname()[1]
        children, results = [], []
        for rank in range(task["processes"]):
            results.append(Path(scratch, f"result-{rank}.json"))
            mine = {"rank": rank, "port": port, "directory": scratch, "result": str(results[-1])}
            text = json.dumps({**task, **mine})
            env = command.child_environment(DEVICES)
            children.append(
                subprocess.Popen([sys.executable, __file__, command.CHILD, text], env=env)
            )
        failed = [child.wait() for child in children]
        if any(failed):
            return None
        return together([json.loads(result.read_text()) for result in results])


def together(found: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The records of all processes as one: the slowest, the sum, or the most of process 0."""
    records = []
    for same in zip(*found, strict=True):
        every = [record["measures"] for record in same]
        written = [measures["bytes"] for measures in every]
        one = {name: max(m[name] for m in every) for name in ("in_save", "durable", "restore")}
        for name in ("barriers", "waits", "notes"):
            one[name] = max(m[name] for m in every)
        one["cpu_save"] = sum(m["cpu_save"] for m in every)
        one["uneven"] = max(written) / statistics.mean(written)
        records.append({**same[0], "measures": one, "bytes": written})
    return records


# -- the child ----------------------------------------------------------------------------------


def measure(task: dict[str, Any]) -> list[dict[str, Any]]:
    """The records of one process; repetition 0 is a warm-up."""
    import jax

    address = f"localhost:{task['port']}"
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        address, task["processes"], task["rank"], coordinator_bind_address=address
    )
    jax.devices()  # JAX makes its collectives with its own client
    calls = counted()
    workload = catalogue(task["smoke"], task["processes"])[task["workload"]]
    records: list[dict[str, Any]] = []
    made = each_open(task, lambda name, root: SYSTEMS[name](root))
    with made as systems:
        for rep in range(task["reps"] + 1):
            for label, system in systems.items():
                seed = len(records)
                measures = one_turn(system, workload, rep, seed, calls, not task["smoke"])
                records.append(
                    {"system": label, "rep": rep, "warmup": rep == 0, "measures": measures}
                )
                if task["rank"] == 0:
                    progress(f"{workload.name} {rep}/{task['reps']} {label:<8} {measures}")
    return records


def one_turn(
    system: System, workload: Workload, step: int, seed: int, calls: Counter[str], flush: bool
) -> dict[str, float]:
    import jax

    state, like = workload.state(seed), workload.like()
    barrier(f"save {seed}", flush)
    calls.clear()
    with Clock() as save:
        system.save(step, state)
        in_save = save.lap()
        system.wait()
    made = dict(calls)
    written = sum(
        path.stat().st_size
        for path in system.root.glob(f"{step}/*/ocdbt.process_{jax.process_index()}/**/*")
        if path.is_file()
    )
    for leaf in state.values():
        leaf.delete()
    barrier(f"restore {seed}", flush)
    with Clock() as restore:
        restored = jax.block_until_ready(system.restore(step, like))
    check(workload, restored, seed)
    barrier(f"delete {seed}", False)
    system.delete(step)
    return {
        "in_save": in_save,
        "durable": save.wall,
        "restore": restore.wall,
        "cpu_save": save.cpu,
        "bytes": written,
        "barriers": made.get("wait_at_barrier", 0),
        "waits": sum(n for name, n in made.items() if name.startswith("blocking_key_value_get")),
        "notes": sum(n for name, n in made.items() if name.startswith("key_value_set")),
    }


def barrier(name: str, flush: bool) -> None:
    from jax.experimental import multihost_utils

    settle(flush)
    multihost_utils.sync_global_devices(name)


def check(workload: Workload, restored: dict, seed: int) -> None:
    """Raise unless what this process holds of every leaf is that of the seed, bit for bit."""
    import numpy as np

    for name in workload.leaves:
        expected = workload.leaf(name, seed)
        pairs = zip(expected.addressable_shards, restored[name].addressable_shards, strict=True)
        for want, got in pairs:
            there, here = np.asarray(got.data), np.asarray(want.data)
            if want.device != got.device or there.tobytes() != here.tobytes():
                raise AssertionError(f"{workload.name}: leaf {name} came back with other values")


def counted() -> Counter[str]:
    """Puts a client in the place of JAX's own that counts what is called and passes it on."""
    from jax._src import distributed

    calls: Counter[str] = Counter()
    real = distributed.global_state.client

    class Counting:
        def __getattr__(self, name: str) -> Any:
            calls[name] += 1
            return getattr(real, name)

    distributed.global_state.client = Counting()
    return calls


# -- the tables ---------------------------------------------------------------------------------


def show(workload: Workload, args: argparse.Namespace, records: list[dict]) -> dict[str, Any]:
    """Print the tables of one workload; return what goes into the JSON file."""
    pairs = list(_pairs(args.systems))
    ratios = report.compare(records, pairs, RATIO_MEASURES, ())
    checks = [
        Check("most bytes of a process, of the mean", label, worst, UNEVEN_AT_MOST)
        for label in args.systems
        if name_of(label) == "ckptmgr"
        for worst in [max(report.values(records, label, "uneven"))]
    ]
    print(
        f"\n{workload.name}: {workload.describe()} of {args.processes} processes."
        f"\n\nMedian of {args.reps} (smallest .. largest)\n\n"
        f"{report.table(args.systems, records, ROWS)}"
    )
    if ratios:
        print(f"\nRatio of the medians (rep by rep)\n\n{report.ratio_table(ratios, ROWS)}")
    print(f"\n{report.check_table(checks)}", flush=True)
    return {
        "workload": workload.name,
        "ratios": [asdict(item) for item in ratios],
        "checks": [{**asdict(item), "verdict": item.verdict} for item in checks],
        "missed": report.missed(checks),
        "records": records,
    }


def _pairs(labels: list[str]) -> Iterator[tuple[str, str]]:
    for label in labels:
        if name_of(label) == "ckptmgr":
            yield from ((label, other) for other in labels if name_of(other) == "orbax")


if __name__ == "__main__":
    sys.exit(command.child(measure) if command.is_child() else main())
