"""What the commands share: arguments, one child process per measurement, output.

A command measures nothing itself and imports neither jax nor what it compares: it starts a child
with the devices that a workload needs, and makes tables of the records that the child leaves.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import machine
import report
from workloads import Workload

MISSED, FAILED = 1, 2
DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"
CHILD = "--child"


def add_arguments(
    parser: argparse.ArgumentParser,
    workloads: Collection[str],
    systems: Collection[str],
    usual: Collection[str] = (),
) -> None:
    """The arguments that every command has; without `--systems` the `usual` take part, or all."""
    usual = usual or systems
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, one repetition: for CI")
    parser.add_argument(
        "--workloads",
        type=choice_of(workloads),
        default=list(workloads),
        help=f"default: {','.join(workloads)}",
    )
    parser.add_argument(
        "--systems",
        type=choice_of(systems),
        default=list(usual),
        help=f"of {','.join(systems)}; one named twice shows the noise. default: {','.join(usual)}",
    )
    add_output_arguments(parser)


def add_reps(parser: argparse.ArgumentParser, usual: int, warm_ups: str) -> None:
    """`--reps`; `repeated` gives the value."""
    parser.set_defaults(usual_reps=usual)
    text = f"after {warm_ups}. default: {usual}, smoke: 1"
    parser.add_argument("--reps", type=int, help=text)


def repeated(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The parsed arguments of a command with `--reps`, systems told apart."""
    args = parser.parse_args()
    if args.reps is None:
        args.reps = 1 if args.smoke else args.usual_reps
    if args.reps < 1:
        parser.error("--reps must be at least 1")
    args.systems = labels(args.systems)
    return args


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--directory",
        "--dir",
        help="where to write. default: a temporary directory on a disk",
    )
    parser.add_argument("--json", metavar="FILE", help="also write every record to FILE")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a target is missed")


def choice_of(known: Collection[str]) -> Callable[[str], list[str]]:
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


def name_of(label: str) -> str:
    """The system that a label stands for: orbax#2 -> orbax."""
    return label.partition("#")[0]


def directory_of(args: argparse.Namespace) -> Path:
    return Path(args.directory).resolve() if args.directory else machine.default_directory()


def why_not(directory: Path, needed: int, modules: Iterable[str]) -> str | None:
    """The reason why nothing can be measured, if there is one."""
    for module in modules:
        if not installed(module):
            return f"{module} is not installed in this Python; leave it out with --systems"
    if not directory.is_dir() or not os.access(directory, os.W_OK):
        return f"--directory: {directory} is not a directory that can be written to"
    free = machine.free_bytes(directory)
    if free < needed:
        have, need = report.show_bytes(free), report.show_bytes(needed)
        return f"--directory: {directory} has {have} free, {need} are needed"
    return None


def installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even the package that would hold it
        return False


def measure_each(
    args: argparse.Namespace,
    script: Path,
    chosen: Sequence[Workload],
    show: Callable[[Workload, Any], dict[str, Any]],
    *,
    copies: int,
    modules: Iterable[str],
    settings: dict[str, Any],
    parts: Sequence[dict[str, Any]] | Callable[[Workload], Sequence[dict[str, Any]]] | None = None,
    summary: Callable[[list[dict[str, Any]]], str] | None = None,
) -> int:
    """Measures each workload in a child process and shows what it found; the exit status.

    Args:
      copies: how many of the largest state have to fit on the disk.
      modules: what has to be installed.
      settings: for the child, and for the JSON file.
      parts: a child for each of these, whose settings are added; their results make a list. They
        may depend on the workload.
      summary: what to print of all results in the end.
    """
    directory = directory_of(args)
    needed = copies * max(workload.nbytes for workload in chosen)
    problem = why_not(directory, needed, modules)
    if problem:
        print(problem, file=sys.stderr)
        return FAILED
    facts = begin(args, directory)
    results = []
    for workload in chosen:
        found = []
        for part in (parts(workload) if callable(parts) else parts) or [{}]:
            task = {**settings, **part, "workload": workload.name}
            records = run_child(script, workload.devices, task, directory)
            if records is None:
                what = ", ".join([workload.name, *map(str, part.values())])
                print(f"{what}: the measuring process failed, see above.", file=sys.stderr)
                return FAILED
            found.append(records)
        results.append(show(workload, found if parts else found[0]))
    if summary:
        print(f"\n{summary(results)}")
    return finish(args, facts, settings, results)


def run_child(script: Path, devices: int, task: dict[str, Any], directory: Path) -> Any | None:
    """What the child measured, or None when its process failed.

    `task` goes to it as JSON, with a `directory` of its own to write below and the file for its
    `result` added.
    """
    with tempfile.TemporaryDirectory(prefix="ckptmgr-bench-", dir=directory) as scratch:
        result = Path(scratch, "result.json")
        text = json.dumps({**task, "directory": scratch, "result": str(result)})
        child = subprocess.run(
            [sys.executable, script, CHILD, text], env=child_environment(devices), check=False
        )
        return json.loads(result.read_text()) if child.returncode == 0 else None


def child_environment(devices: int) -> dict[str, str]:
    """Virtual CPU devices, as many as the mesh needs; other XLA flags stay."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    others = [flag for flag in flags if not flag.startswith(DEVICE_COUNT_FLAG)]
    xla_flags = " ".join([*others, f"{DEVICE_COUNT_FLAG}={devices}"])
    return {**os.environ, "XLA_FLAGS": xla_flags, "JAX_PLATFORMS": "cpu"}


def is_child() -> bool:
    """For a file that is both the command and its child."""
    return sys.argv[1:2] == [CHILD]


def child(measure: Callable[[dict[str, Any]], Any]) -> int:
    """Measure what `run_child` asked for, and leave the result where it said."""
    task = json.loads(sys.argv[2])
    Path(task["result"]).write_text(json.dumps(measure(task)))
    return 0


def progress(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


def begin(args: argparse.Namespace, directory: Path) -> dict:
    """Print the machine; return its facts."""
    facts = machine.facts(directory)
    print(machine.describe(facts))
    if args.smoke:
        print("Smoke sizes: they prove that the benchmark runs; the figures mean nothing.")
    return facts


def finish(args: argparse.Namespace, facts: dict, settings: dict, results: list[dict]) -> int:
    """Print what was missed, write the JSON file; the exit status."""
    missed = [f"{result['workload']}: {line}" for result in results for line in result["missed"]]
    print(f"\n{len(missed)} targets missed" + "".join(f"\n  {line}" for line in missed))
    if args.json:
        whole = {"format": 1, "machine": facts, "settings": settings, "results": results}
        Path(args.json).write_text(json.dumps(whole, indent=1) + "\n")
    return MISSED if args.check and missed else 0
