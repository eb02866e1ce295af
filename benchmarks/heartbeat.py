"""What a heartbeat costs, and its audit: `python benchmarks/heartbeat.py`.

Every save is one here, and new values are saved each time. Three ways take turns: a plain
synchronous save, a heartbeat without audit, a heartbeat with audit. The audit's cost is the
difference that it makes, repetition by repetition, since turns that follow each other meet the same
disk. Its own phase is no measure of it: the audit works beside the writing, and the phase is what
is left to wait for. On a disk of changing speed the difference is noise; `--directory /dev/shm` is
steadier, and the CPU time, printed beside, is steady anywhere.
"""

import argparse
import itertools
import statistics
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import command
import report
from command import name_of, progress
from measure import Clock, settle
from report import Check
from systems import Ckptmgr, each_open
from training import Training
from workloads import Workload, catalogue

WORKLOADS = ("dense8", "small8")
SYSTEMS = ("sync", "heartbeat", "audited")
WARM_UPS = 2  # buffers are made in the first saves
AUDIT_AT_MOST = 0.10  # of the heartbeat

ROWS: report.Rows = (
    ("durable", "to durable", report.seconds),
    ("cpu", "CPU", report.seconds),
)
RATIO_MEASURES = ("durable", "cpu")


def main() -> int:
    args = parse_args()
    return command.measure_each(
        args,
        Path(__file__),
        [catalogue(args.smoke)[name] for name in args.workloads],
        lambda workload, records: show(workload, args, records),
        copies=2,
        modules=[Ckptmgr.needs],
        settings={"smoke": args.smoke, "systems": args.systems, "reps": args.reps},
    )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    command.add_arguments(parser, WORKLOADS, SYSTEMS)
    command.add_reps(parser, 7, "two warm-ups")
    return command.repeated(parser)


# -- the child ----------------------------------------------------------------------------------


def measure(task: dict[str, Any]) -> list[dict[str, Any]]:
    """One record per system and repetition; those up to 0 are warm-ups."""
    workload = catalogue(task["smoke"])[task["workload"]]
    training = Training(workload, seed=1)
    records: list[dict[str, Any]] = []
    made = each_open(task, lambda name, root: Ckptmgr(root, options_of(name)))
    with made as systems:
        reps = range(1 - WARM_UPS, task["reps"] + 1)
        for step, (rep, label) in enumerate(itertools.product(reps, systems)):
            system = systems[label]
            training.step()
            settle(flush=not task["smoke"])
            record = one_save(system, training, step)
            records.append({"system": label, "rep": rep, "warmup": rep <= 0, **record})
            which = f"{rep}/{task['reps']}" if rep > 0 else "warm-up"
            took = record["measures"]["durable"]
            progress(f"{workload.name} {which:>7} {label:<9} {record['kind']:<9} {took:7.3f} s")
            if rep == task["reps"]:
                training.verify(system.restore(step, workload.like()), training.moved)
            system.delete(step)
    return records


def options_of(name: str):
    import ckptmgr

    if name == "sync":
        return ckptmgr.Options(snapshot=ckptmgr.Snapshot(mode="sync"), heartbeat=None)
    audit = name == "audited"
    return ckptmgr.Options(heartbeat=ckptmgr.Heartbeat(every_saves=1, audit=audit))


def one_save(system: Ckptmgr, training: Training, step: int) -> dict[str, Any]:
    with Clock() as clock:
        system.save(step, training.state)
        system.wait()
    return {
        "measures": {"durable": clock.wall, "cpu": clock.cpu},
        "phases": phases_of(system.events),
        "kind": system.manager.info(step).kind,
    }


def phases_of(events: Iterable[Any]) -> dict[str, float]:
    """Seconds by phase; a phase that came more than once is added up."""
    found: Counter[str] = Counter()
    for event in events:
        found[event.phase] += event.seconds
    return dict(found)


# -- the tables ---------------------------------------------------------------------------------


def show(workload: Workload, args: argparse.Namespace, records: list[dict]) -> dict[str, Any]:
    """Print the tables of one workload; return what goes into the JSON file."""
    first, *others = args.systems
    pairs = [(other, first) for other in others]
    ratios = report.compare(records, pairs, RATIO_MEASURES, ())
    checks = checks_of(records, args.systems)
    print(
        f"\n{workload.name}: {workload.describe()}.\n\nMedian of {args.reps} (smallest .. largest)"
        f"\n\n{report.table(args.systems, records, ROWS)}"
    )
    if ratios:
        print(f"\nRatio of the medians (rep by rep)\n\n{report.ratio_table(ratios, ROWS)}")
    print(f"\nBy phase, median; phases overlap\n\n{phase_table(args.systems, records)}")
    if checks:
        cpu = audit_share(records, "cpu")
        print(f"\n{report.check_table(checks)}\n\nOf its CPU time the audit takes {cpu:.2f}.")
    sys.stdout.flush()
    wrong = not_heartbeats(records)
    return {
        "workload": workload.name,
        "ratios": [asdict(item) for item in ratios],
        "checks": [{**asdict(item), "verdict": item.verdict} for item in checks],
        "missed": report.missed(checks) + wrong,
        "records": records,
    }


def not_heartbeats(records: list[dict]) -> list[str]:
    """A line for each system whose saves are not of the kind that it is there to measure."""
    wanted = {"sync": "sync", "heartbeat": "heartbeat", "audited": "heartbeat"}
    wrong = {
        (record["system"], record["kind"])
        for record in records
        if record["kind"] != wanted[name_of(record["system"])]
    }
    return [f"{system}: its steps are of kind {kind}" for system, kind in sorted(wrong)]


def phase_table(systems: list[str], records: list[dict]) -> str:
    phases = dict.fromkeys(phase for record in records for phase in record["phases"])
    lines = [["", *systems]]
    for phase in phases:
        line = [phase]
        for system in systems:
            times = times_of(records, system, phase)
            line.append(report.Spread.of(times).show(report.seconds) if times else "")
        lines.append(line)
    return report.columns(lines)


def times_of(records: list[dict], system: str, phase: str) -> list[float]:
    return [
        record["phases"][phase]
        for record in records
        if record["system"] == system and not record["warmup"] and phase in record["phases"]
    ]


def audit_share(records: list[dict], measure: str) -> float:
    """What the audit adds, of the audited heartbeat."""
    audited = report.values(records, "audited", measure)
    without = report.values(records, "heartbeat", measure)
    more = statistics.median(a - b for a, b in zip(audited, without, strict=True))
    return more / statistics.median(audited)


def checks_of(records: list[dict], systems: list[str]) -> list[Check]:
    if not {"heartbeat", "audited"} <= set(systems):
        return []
    share = audit_share(records, "durable")
    return [Check("audit, of the heartbeat", "audited", share, AUDIT_AT_MOST)]


if __name__ == "__main__":
    sys.exit(command.child(measure) if command.is_child() else main())
