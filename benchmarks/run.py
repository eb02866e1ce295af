"""Compare ckptmgr with stock Orbax and with writing the same bytes raw: `python benchmarks/run.py`.

Each workload runs in a process of its own, which has the devices it needs. In that process the
systems take turns, so that a slow minute of the machine hits all of them. See README.md.
"""

import argparse
import sys
from dataclasses import asdict
from pathlib import Path

import command
import report
from systems import SYSTEMS
from workloads import Workload, catalogue


def main() -> int:
    args = parse_args()
    return command.measure_each(
        args,
        Path(__file__).with_name("measure.py"),
        [catalogue(args.smoke)[name] for name in args.workloads],
        lambda workload, records: show(workload, args, records),
        copies=2,
        modules=[SYSTEMS[command.name_of(label)].needs for label in args.systems],
        settings={
            "smoke": args.smoke,
            "reps": args.reps,
            "cache": args.cache,
            "systems": args.systems,
        },
    )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    command.add_arguments(parser, catalogue(smoke=False), SYSTEMS)
    command.add_reps(parser, 5, "one warm-up")
    parser.add_argument(
        "--cache",
        choices=["warm", "cold"],
        default="warm",
        help="the page cache before a restore, the same for all systems. default: warm",
    )
    args = command.repeated(parser)
    if args.check and (args.systems[0] != report.SUBJECT or "orbax" not in args.systems):
        parser.error(f"--check needs {report.SUBJECT} as the first system, and orbax")
    return args


def show(workload: Workload, args: argparse.Namespace, records: list[dict]) -> dict:
    """Print the tables of one workload; return what goes into the JSON file."""
    found = report.ratios(workload.kind, args.systems, records)
    print(
        f"\n{workload.name}: {workload.describe()}. Page cache before a restore: {args.cache}."
        f"\n\nMedian of {args.reps} (smallest .. largest)\n\n"
        f"{report.table(args.systems, records)}",
        flush=True,
    )
    if found:
        print(f"\nRatio of the medians (rep by rep)\n\n{report.ratio_table(found)}", flush=True)
    return {
        "workload": workload.name,
        "ratios": [{**asdict(item), "verdict": item.verdict} for item in found],
        "missed": report.missed(found),
        "records": records,
    }


if __name__ == "__main__":
    sys.exit(main())
