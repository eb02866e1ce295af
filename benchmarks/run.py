"""Compare ckptmgr with stock Orbax and with writing the same bytes raw: `python benchmarks/run.py`.

Each workload runs in a process of its own, which has the devices it needs. In that process the
systems take turns, so that a slow minute of the machine hits all of them. Host memory is looked at
in a process for each system. See README.md.
"""

import argparse
import statistics
import sys
from dataclasses import asdict
from pathlib import Path

import command
import machine
import report
from report import Check, Ratio
from systems import SYSTEMS
from workloads import Workload, catalogue

# One device and one mesh, several dtypes and a restore on another mesh: a smoke run is for CI.
SMOKE_WORKLOADS = ("small1", "reshard_8x1")
DATA_FILE_BYTES = 2**31  # after which a save begins another file
FILES_BESIDES = 16  # of a step, whatever its size: metadata, manifests, receipts


def main() -> int:
    args = parse_args()
    if left_out(args):
        print(f"Not installed, left out: {', '.join(left_out(args))}")
    return command.measure_each(
        args,
        Path(__file__).with_name("measure.py"),
        [catalogue(args.smoke)[name] for name in args.workloads],
        lambda workload, found: show(workload, args, found),
        copies=2,
        modules=[SYSTEMS[command.name_of(label)].needs for label in args.systems],
        settings={"smoke": args.smoke, "reps": args.reps, "cache": args.cache},
        parts=lambda workload: parts(workload, args),
        summary=lambda results: report.verdict_table(
            [line for result in results for line in result["judged"]]
        ),
    )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    usual = [name for name, system in SYSTEMS.items() if system.usual]
    command.add_arguments(parser, catalogue(smoke=False), SYSTEMS, usual)
    installed = [
        name
        for name in usual
        if not SYSTEMS[name].optional or command.installed(SYSTEMS[name].needs)
    ]
    parser.set_defaults(systems=installed, installed=installed)
    command.add_reps(parser, 5, "one warm-up")
    parser.add_argument(
        "--cache",
        choices=["warm", "cold"],
        default="warm",
        help="the page cache before a restore, the same for all systems. default: warm",
    )
    parser.add_argument(
        "--memory",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="whether to look at host memory too, in a process for each system",
    )
    args = command.repeated(parser)
    if args.smoke and args.workloads == list(catalogue(smoke=True)):
        args.workloads = list(SMOKE_WORKLOADS)
    if args.check and (args.systems[0] != report.SUBJECT or "orbax" not in args.systems):
        parser.error(f"--check needs {report.SUBJECT} as the first system, and orbax")
    return args


def left_out(args: argparse.Namespace) -> list[str]:
    """Systems that would take part if they were installed; none where some were named."""
    missing = [
        name for name, system in SYSTEMS.items() if system.usual and name not in args.installed
    ]
    return missing if args.systems == args.installed else []


def parts(workload: Workload, args: argparse.Namespace) -> list[dict]:
    """One child for the times of all systems, and one for the memory of each."""
    systems = taking_part(workload, args.systems)
    memory = [{"part": "memory", "systems": [label]} for label in systems if args.memory]
    return [{"part": "time", "systems": systems}, *memory]


def taking_part(workload: Workload, labels: list[str]) -> list[str]:
    return [label for label in labels if SYSTEMS[command.name_of(label)].takes(workload)]


def show(workload: Workload, args: argparse.Namespace, found: list[list[dict]]) -> dict:
    """Print the tables of one workload; return what goes into the JSON file."""
    systems = taking_part(workload, args.systems)
    records, memory = found[0], [record for part in found[1:] for record in part]
    subject, *others = systems
    pairs = [(subject, against) for against in others]
    file_system = machine.file_system(command.directory_of(args))
    targets = report.targets(workload.name, workload.kind, file_system)
    ratios = report.compare(records, pairs, report.RATIO_MEASURES, targets)
    print(
        f"\n{workload.name}: {workload.describe()}. Page cache before a restore: {args.cache}."
        f"\n\nMedian of {args.reps} (smallest .. largest)\n\n{report.table(systems, records)}",
        flush=True,
    )
    if ratios:
        print(f"\nRatio of the medians (rep by rep)\n\n{report.ratio_table(ratios)}", flush=True)
    if memory:
        peaks = report.compare(memory, pairs, report.MEMORY_MEASURES, targets)
        print(f"\nHost memory\n\n{report.table(systems, memory, report.MEMORY_ROWS)}", flush=True)
        if peaks:
            print(f"\nRatio\n\n{report.ratio_table(peaks, report.MEMORY_ROWS)}", flush=True)
        ratios += peaks
    checks = checks_of(records, memory)
    judged: list[Ratio | Check] = [*ratios, *checks]
    rows = (*report.ROWS, *report.MEMORY_ROWS)
    return {
        "workload": workload.name,
        "ratios": [{**asdict(item), "verdict": item.verdict} for item in ratios],
        "checks": [{**asdict(item), "verdict": item.verdict} for item in checks],
        "judged": report.judged(workload.name, judged, rows),
        "missed": report.missed(judged, rows),
        "records": records,
        "memory": memory,
    }


def checks_of(records: list[dict], memory: list[dict]) -> list[Check]:
    """Of ckptmgr: the memory of a restore and the files of a step."""
    subject = report.SUBJECT
    peaks = report.values(memory, subject, "of_restored")
    title, limit = "peak over base, restore", report.RESTORED_AT_MOST
    found = [Check(title, subject, peak, limit, against="of the bytes restored") for peak in peaks]
    files = report.values(records, subject, "files")
    waves = max(
        (record.get("waves", 0) for record in records if record["system"] == subject), default=0
    )
    if files:
        data = statistics.median(report.values(records, subject, "disk_bytes")) / DATA_FILE_BYTES
        against = f"{FILES_BESIDES}, 1 for each of {waves} waves, 1 for each 2 GiB"
        limit = FILES_BESIDES + waves + int(data)
        found.append(Check("files", subject, max(files), limit, against=against, digits=0))
    return found


if __name__ == "__main__":
    sys.exit(main())
