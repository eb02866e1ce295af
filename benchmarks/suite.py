"""All benchmarks of speed, one after the other: `python benchmarks/suite.py`.

Each runs as it would alone and prints its tables. At the end stands one table of everything that has
a target, and `--json` holds it together with all that the commands recorded.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import command
import lost_time
import report
from report import Check, Ratio
from workloads import catalogue

HERE = Path(__file__).parent
WORKLOADS = {"run": tuple(catalogue(smoke=True)), "lost_time": lost_time.WORKLOADS}
ORDER = ("run", "lost_time", "growth", "compression", "startup", "resharding")
TITLES = {measure: title for measure, title, _ in (*lost_time.SINGLE_ROWS, *report.ROWS)}


def main() -> int:
    args = parse_args()
    started = time.monotonic()
    found: dict[str, Any] = {}
    failed: list[str] = []
    with tempfile.TemporaryDirectory(prefix="ckptmgr-bench-") as scratch:
        for name in args.only:
            out = Path(scratch, f"{name}.json")
            given = arguments(name, args)
            if given is None:
                continue
            print(f"\n# {name}\n", flush=True)
            done = subprocess.run(
                [sys.executable, HERE / f"{name}.py", *given, "--json", out], check=False
            )
            if done.returncode != 0 or not out.exists():
                failed.append(name)
                continue
            found[name] = json.loads(out.read_text())
    lines = [
        {"command": name, **line}
        for name, whole in found.items()
        for result in whole["results"]
        for line in targets_of(result)
    ]
    missed = sum(line["verdict"] == "MISS" for line in lines)
    minutes = (time.monotonic() - started) / 60
    print(f"\n# All targets\n\n{report.verdict_table(lines)}")
    print(f"\n{missed} of {len(lines)} missed; it took {minutes:.0f} minutes")
    for name in failed:
        print(f"{name}: failed, see above")
    if args.json:
        whole = {
            "format": 1,
            "targets": lines,
            "failed": failed,
            "commands": found,
        }
        Path(args.json).write_text(json.dumps(whole, indent=1) + "\n")
    if failed:
        return command.FAILED
    return command.MISSED if args.check and missed else 0


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    add = parser.add_argument
    there = [name for name in ORDER if (HERE / f"{name}.py").exists()]
    add(
        "--only",
        type=command.choice_of(there),
        default=there,
        help=f"these commands. default: {','.join(there)}",
    )
    add("--smoke", action="store_true", help="tiny sizes, one repetition: for CI")
    add("--reps", type=int, help="of each command. default: its own")
    add(
        "--workloads",
        type=command.choice_of(WORKLOADS["run"]),
        help=f"of {' and '.join(WORKLOADS)}. default: their own",
    )
    command.add_output_arguments(parser)
    return parser.parse_args()


def arguments(name: str, args: argparse.Namespace) -> list[str] | None:
    """What a command is given; None where it has none of the workloads asked for."""
    given = ["--smoke"] if args.smoke else []
    if args.reps is not None:
        given += ["--reps", str(args.reps)]
    if args.directory:
        given += ["--directory", args.directory]
    if args.workloads and name in WORKLOADS:
        chosen = [workload for workload in args.workloads if workload in WORKLOADS[name]]
        if not chosen:
            return None
        given += ["--workloads", ",".join(chosen)]
    return given


def targets_of(result: dict[str, Any]) -> list[dict[str, str]]:
    """The lines of one result in the last table, made of its ratios and checks where it has none."""
    if "judged" in result:
        return result["judged"]
    found = [
        *(_made(Ratio, item) for item in result.get("ratios", ())),
        *(_made(Check, item) for item in result.get("checks", ())),
    ]
    measures = [item.measure for item in found if isinstance(item, Ratio)]
    rows = [(measure, TITLES.get(measure, measure), report.factor) for measure in measures]
    return report.judged(result["workload"], found, rows)


def _made(kind: type, item: dict[str, Any]) -> Any:
    """What `asdict` was called on, which other fields have been added to since."""
    names = {field.name for field in fields(kind)}
    return kind(**{name: value for name, value in item.items() if name in names})


if __name__ == "__main__":
    sys.exit(main())
