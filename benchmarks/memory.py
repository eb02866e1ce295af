"""Host memory over many saves: `python benchmarks/memory.py`.

A process for each workload and system. In it a loop of donated steps, each of which changes every
value, saves after each step, waits until the save is durable, collects garbage, and reads the
resident memory (RSS) at some of the saves. A system that leaks or fragments grows from the tenth
save to the last.

The peak is what the kernel saw between any two readings, reset before the first save.
`quarter` stands for `Snapshot(host_bytes=...)` at a quarter of the state: then the host memory that
snapshots hold, as the events tell it, must stay within that.

With `--restore` every save is restored before the next, and what comes back is dropped. And a state
of half the memory is saved and restored once: see `half.py`.
"""

import argparse
import collections
import gc
import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import command
import half
import machine
import report
from command import name_of, progress
from measure import reset_peak, status
from report import Check
from systems import MODES_AND_ORBAX, Ckptmgr, System, by_mode
from training import Training
from workloads import Workload, catalogue

ROWS_OF_DENSE = 512  # 128 MiB
WORKLOADS = ("dense1", "dense8", "small1", "small8")
QUARTERS = ("copy_on_write:quarter", "double_buffer:quarter")
SYSTEMS = (*MODES_AND_ORBAX, *QUARTERS)
RESTORED = {"workloads": [half.NAME, "dense8", "small8"], "systems": ["copy_on_write"]}
MARKS = (1, 10, 50, 100)  # saves after which memory is read; the ratio is last over second
SMOKE_MARKS = (1, 2, 3, 4)
KEEP = 2
GROWTH_AT_MOST = 1.05


def main() -> int:
    args = parse_args()
    known = {
        **catalogue(args.smoke, ROWS_OF_DENSE),
        half.NAME: half.workload(args.half, args.smoke),
    }
    return command.measure_each(
        args,
        Path(__file__),
        [known[name] for name in args.workloads],
        show,
        copies=1 if half.NAME in args.workloads else KEEP + 2,
        modules={MODES_AND_ORBAX[mode_of(label)].needs for label in args.systems},
        settings={
            "smoke": args.smoke,
            "marks": args.marks,
            "limit_seconds": args.limit_seconds,
            "restore": args.restore,
            "half": args.half,
        },
        parts=lambda workload: [
            {"system": label}
            for label in ([half.SYSTEM] if workload.name == half.NAME else args.systems)
        ],
    )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    command.add_arguments(parser, (*WORKLOADS, half.NAME), SYSTEMS)
    parser.set_defaults(workloads=None, systems=None)
    parser.add_argument(
        "--limit-seconds",
        type=float,
        default=300.0,
        help="a process stops saving after so long, and says how far it came. default: 300",
    )
    text = "restore every save, too, and a state of half the memory"
    parser.add_argument("--restore", action="store_true", help=text)
    parser.add_argument("--gib", type=float, help="of that state. default: half of the memory")
    args = parser.parse_args()
    usual = RESTORED if args.restore else {"workloads": list(WORKLOADS), "systems": list(SYSTEMS)}
    if args.workloads is None:
        without = [name for name in usual["workloads"] if name in (half.NAME, "dense8")]
        args.workloads = without if args.smoke else usual["workloads"]
    if half.NAME in args.workloads and not args.restore:
        parser.error(f"--workloads {half.NAME} goes with --restore")
    args.systems = command.labels(args.systems or usual["systems"])
    args.marks = list(SMOKE_MARKS if args.smoke else MARKS)
    args.half = int((args.gib or machine.facts(Path("."))["ram_gib"] / 2) * 2**30)
    return args


def mode_of(label: str) -> str:
    return name_of(label).partition(":")[0]


MEDIAN_OF = 5
"""A reading is the median after the saves up to and with the one it is named after."""

# -- the child ----------------------------------------------------------------------------------


def measure(task: dict[str, Any]) -> dict[str, Any]:
    """The record of one system on one workload. Bytes."""
    if task["workload"] == half.NAME:
        return half.measure(task)
    import jax

    workload = catalogue(task["smoke"], ROWS_OF_DENSE)[task["workload"]]
    training, like = Training(workload, seed=1), workload.like()
    limit = workload.nbytes // 4 if name_of(task["system"]) in QUARTERS else None
    root = Path(task["directory"], "root")
    root.mkdir()
    system = by_mode(mode_of(task["system"]), root, KEEP, limit)
    for _ in range(3):
        training.step()
    before = reading()
    reset_peak()
    started, readings, staged, saves = time.monotonic(), {}, 0, 0
    recent: collections.deque[dict[str, int]] = collections.deque(maxlen=MEDIAN_OF)
    for saves in range(1, task["marks"][-1] + 1):
        late = time.monotonic() - started > task["limit_seconds"]
        moved = training.moved
        staged = max(staged, save(system, training, saves))
        if task["restore"]:
            jax.block_until_ready(system.restore(saves, like))
        recent.append(reading())
        if saves in task["marks"] or late:
            # malloc keeps more or less of what was freed from one save to the next
            readings[saves] = {k: int(statistics.median(r[k] for r in recent)) for k in recent[-1]}
        if late:
            break
    peak = status("VmHWM")
    restored = system.restore(saves, like)
    training.verify(restored, moved)
    system.close()
    progress(f"{workload.name} {task['system']:<21} {saves} saves")
    return {
        "system": task["system"],
        "saves": saves,
        "before": before,
        "readings": readings,
        "peak": peak,
        "staged": staged,
        "limit": limit,
        "seconds": time.monotonic() - started,
    }


def save(system: System, training: Training, number: int) -> int:
    """One save, with a donated step on top of it; the most that its snapshot held, if told."""
    system.save(number, training.state)
    training.step()
    while not system.idle():
        time.sleep(0.002)
    system.wait()
    gc.collect()
    events = system.events if isinstance(system, Ckptmgr) else []
    return max((event.host_bytes or 0 for event in events), default=0)


def reading() -> dict[str, int]:
    import jax

    gc.collect()
    buffers = {  # several arrays may be the same memory
        shard.data.unsafe_buffer_pointer(): shard.data.nbytes
        for array in jax.live_arrays()
        for shard in array.addressable_shards
    }
    return {"rss": status("VmRSS"), "live": sum(buffers.values())}


# -- the tables ---------------------------------------------------------------------------------


def show(workload: Workload, records: list[dict[str, Any]]) -> dict[str, Any]:
    """Print the tables of one workload; return what goes into the JSON file."""
    if workload.name == half.NAME:
        checks, tables = half.checks_of(records), half.table(records)
    else:
        checks = checks_of(records)
        tables = (
            f"Resident memory after a save\n\n{resident_table(records)}"
            f"\n\nPeaks\n\n{peak_table(workload, records)}"
        )
    print(
        f"\n{workload.name}: {workload.describe()}.\n\n{tables}\n\n{report.check_table(checks)}",
        flush=True,
    )
    return {
        "workload": workload.name,
        "checks": [{**asdict(item), "verdict": item.verdict} for item in checks],
        "missed": report.missed(checks),
        "records": records,
    }


def resident_table(records: list[dict[str, Any]]) -> str:
    marks = sorted({int(mark) for record in records for mark in record["readings"]})
    head = ["", "before", *(f"save {mark}" for mark in marks), "last / early"]
    lines = [[*head, "live arrays, before", "after"]]
    for record in records:
        found = {int(mark): value for mark, value in record["readings"].items()}
        cells = [report.show_bytes(found[m]["rss"]) if m in found else "" for m in marks]
        _, _, ratio = growth(record)
        live = [record["before"]["live"], found[max(found)]["live"]]
        before = report.show_bytes(record["before"]["rss"])
        shown = [report.show_bytes(size) for size in live]
        lines.append([record["system"], before, *cells, f"{ratio:.3f}", *shown])
    return report.columns(lines)


def growth(record: dict[str, Any]) -> tuple[int, int, float]:
    """An early save, the last one, and the resident memory after this over that after the other.

    The early one is the second that was looked at: the first save still fills pools and buffers.
    """
    rss = {int(mark): value["rss"] for mark, value in record["readings"].items()}
    marks = sorted(rss)
    early = marks[min(1, len(marks) - 1)]
    return early, marks[-1], rss[marks[-1]] / rss[early]


def peak_table(workload: Workload, records: list[dict[str, Any]]) -> str:
    lines = [["", "peak", "over before", "of the state", "held by snapshots", "limit"]]
    for record in records:
        grown = record["peak"] - record["before"]["rss"]
        lines.append(
            [
                record["system"],
                report.show_bytes(record["peak"]),
                report.show_bytes(grown),
                f"{grown / workload.nbytes:.2f}",
                report.show_bytes(record["staged"]) if mode_of(record["system"]) != "orbax" else "",
                report.show_bytes(record["limit"]) if record["limit"] else "",
            ]
        )
    return report.columns(lines)


def checks_of(records: list[dict[str, Any]]) -> list[Check]:
    """Of ckptmgr's modes; of Orbax the growth stands in the first table."""
    found = []
    for record in records:
        if mode_of(record["system"]) != "orbax":
            early, last, ratio = growth(record)
            title = f"RSS, save {last} over save {early}"
            found.append(Check(title, record["system"], ratio, GROWTH_AT_MOST))
        if record["limit"]:
            held = record["staged"] / record["limit"]
            found.append(Check("held by snapshots, of host_bytes", record["system"], held, 1.0))
    return found


if __name__ == "__main__":
    sys.exit(command.child(measure) if command.is_child() else main())
