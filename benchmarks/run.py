"""Compare ckptmgr with stock Orbax and with writing the same bytes raw: `python benchmarks/run.py`.

Each workload runs in a process of its own, which has the devices it needs. In that process the
systems take turns, so that a slow minute of the machine hits all of them. See README.md.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import machine
import report
from measure import Task
from systems import SYSTEMS
from workloads import Workload, catalogue

MISSED, FAILED = 1, 2
DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"


def main() -> int:
    args = parse_args()
    directory = Path(args.dir).resolve() if args.dir else machine.default_directory()
    chosen = [catalogue(args.smoke)[name] for name in args.workloads]
    problem = why_not(directory, chosen, args.systems)
    if problem:
        print(problem, file=sys.stderr)
        return FAILED

    facts = machine.facts(directory)
    print(machine.describe(facts))
    if args.smoke:
        print("Smoke sizes: they prove that the benchmark runs; the ratios mean nothing.")
    results = []
    for workload in chosen:
        records = run_child(workload, args, directory)
        if records is None:
            print(f"{workload.name}: the measuring process failed, see above.", file=sys.stderr)
            return FAILED
        results.append(show(workload, args, records))
    missed = [f"{r['workload']} {m}" for r in results for m in r["missed"]]
    print(f"\n{len(missed)} targets missed" + "".join(f"\n  {line}" for line in missed))

    if args.json:
        settings = {"smoke": args.smoke, "reps": args.reps, "cache": args.cache}
        whole = {"format": 1, "machine": facts, "settings": settings, "results": results}
        Path(args.json).write_text(json.dumps(whole, indent=1) + "\n")
    return MISSED if args.check and missed else 0


def parse_args() -> argparse.Namespace:
    names = list(catalogue(smoke=False))
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, one repetition: for CI")
    parser.add_argument(
        "--workloads", type=choice_of(names), default=names, help=f"default: {','.join(names)}"
    )
    parser.add_argument(
        "--systems",
        type=choice_of(SYSTEMS),
        default=list(SYSTEMS),
        help="the first is compared with the others; 'orbax,orbax' shows the noise. "
        f"default: {','.join(SYSTEMS)}",
    )
    parser.add_argument("--reps", type=int, help="after one warm-up. default: 5, smoke: 1")
    parser.add_argument(
        "--cache",
        choices=["warm", "cold"],
        default="warm",
        help="the page cache before a restore, the same for all systems. default: warm",
    )
    parser.add_argument("--dir", help="where to write. default: a temporary directory on a disk")
    parser.add_argument("--json", metavar="FILE", help="also write every record to FILE")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a target is missed")
    args = parser.parse_args()
    if args.reps is None:
        args.reps = 1 if args.smoke else 5
    if args.reps < 1:
        parser.error("--reps must be at least 1")
    if args.check and (args.systems[0] != report.SUBJECT or "orbax" not in args.systems):
        parser.error(f"--check needs {report.SUBJECT} as the first system, and orbax")
    args.systems = labels(args.systems)
    return args


def choice_of(known):
    """An argparse type: names separated by commas, all of them known."""

    def parse(text: str) -> list[str]:
        names = text.split(",")
        unknown = [name for name in names if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(
                f"unknown: {', '.join(unknown)}; choose from {', '.join(known)}"
            )
        return names

    return parse


def labels(names: list[str]) -> list[str]:
    """Tell repeated systems apart: orbax,orbax -> orbax, orbax#2."""
    seen: Counter[str] = Counter()
    found = []
    for name in names:
        seen[name] += 1
        found.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return found


def why_not(directory: Path, chosen: list[Workload], systems: list[str]) -> str | None:
    """The reason why nothing can be measured, if there is one."""
    for label in systems:
        needs = SYSTEMS[label.partition("#")[0]].needs
        if not installed(needs):
            return f"{needs} is not installed in this Python; leave it out with --systems"
    if not directory.is_dir() or not os.access(directory, os.W_OK):
        return f"--dir: {directory} is not a directory that can be written to"
    needed = 2 * max(workload.nbytes for workload in chosen)
    free = machine.free_bytes(directory)
    if free < needed:
        have, need = report.show_bytes(free), report.show_bytes(needed)
        return f"--dir: {directory} has {have} free, {need} are needed"
    return None


def installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even the package that would hold it
        return False


def run_child(workload: Workload, args: argparse.Namespace, directory: Path) -> list[dict] | None:
    """The records of one workload, or None when its process failed."""
    with tempfile.TemporaryDirectory(prefix="ckptmgr-bench-", dir=directory) as scratch:
        result = Path(scratch, "result.json")
        task = Task(
            workload=workload.name,
            smoke=args.smoke,
            systems=args.systems,
            reps=args.reps,
            cache=args.cache,
            directory=scratch,
            result=str(result),
        )
        script = Path(__file__).with_name("measure.py")
        child = subprocess.run(
            [sys.executable, script, task.to_json()], env=child_environment(workload), check=False
        )
        return json.loads(result.read_text()) if child.returncode == 0 else None


def child_environment(workload: Workload) -> dict[str, str]:
    """Virtual CPU devices, as many as the mesh needs; other XLA flags stay."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    others = [flag for flag in flags if not flag.startswith(DEVICE_COUNT_FLAG)]
    xla_flags = " ".join([*others, f"{DEVICE_COUNT_FLAG}={workload.devices}"])
    return {**os.environ, "XLA_FLAGS": xla_flags, "JAX_PLATFORMS": "cpu"}


def show(workload: Workload, args: argparse.Namespace, records: list[dict]) -> dict:
    """Print the tables of one workload; return what goes into the JSON file."""
    found = report.ratios(workload.kind, args.systems, records)
    devices = "1 device" if workload.devices == 1 else f"{workload.devices} devices"
    print(
        f"\n{workload.name}: {report.show_bytes(workload.nbytes)} in {len(workload.leaves)} leaves "
        f"on {devices}. Page cache before a restore: {args.cache}."
        f"\n\nMedian of {args.reps} (smallest .. largest)\n"
        f"{report.table(args.systems, records)}",
        flush=True,
    )
    if found:
        print(f"\nRatio of the medians (rep by rep)\n{report.ratio_table(found)}", flush=True)
    return {
        "workload": workload.name,
        "ratios": [{**asdict(item), "verdict": item.verdict} for item in found],
        "missed": [report.miss(item) for item in found if item.verdict == "MISS"],
        "records": records,
    }


if __name__ == "__main__":
    sys.exit(main())
