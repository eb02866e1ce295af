"""What a job pays before its first step: `python benchmarks/startup.py`.

Importing: Pythons that import jax and Pythons that import ckptmgr besides take turns. Both find their
bytecode, as installed packages do.

A long run: a directory with ten thousand steps, all of them whole, is opened, asked for its latest
step, and saved into, with a retention policy that has to look at all of them.
"""

import argparse
import os
import resource
import shutil
import statistics
import subprocess
import sys
import uuid
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import command
import report
from command import progress
from measure import Clock, settle
from report import Check, Spread

IMPORT_AT_MOST = 0.3  # seconds that ckptmgr adds to jax
LATEST_AT_MOST = 0.2  # seconds, with so many steps
STEPS, SMOKE_STEPS = 10_000, 50
CPU = ", CPU"
IMPORTS = {"jax": "import jax", "jax and ckptmgr": "import jax, ckptmgr"}
SAVES = 4  # in a child; the first reads what a manager then remembers

MEASURES = {
    "open": "a manager opens",
    "open_to_read": "a manager opens, read_only",
    "latest": "latest_step()",
    "latest_again": "latest_step(), again",
    "in_first_save": "in save(), the first",
    "retain_first": "retention beside it, on a thread",
    "in_save": "in save(), further ones",
    "retain": "retention beside them",
    "steps": "steps(), which reads every manifest",
}


def main() -> int:
    args = parse_args()
    directory = command.directory_of(args)
    problem = command.why_not(directory, args.steps * 2**16, ("ckptmgr", "jax"))
    if problem:
        print(problem, file=sys.stderr)
        return command.FAILED
    facts = command.begin(args, directory)
    imported = show_imports(import_each(args.reps))
    task = {"steps": args.steps, "reps": args.reps}
    records = command.run_child(Path(__file__), 1, task, directory)
    if records is None:
        print("the measuring process failed, see above.", file=sys.stderr)
        return command.FAILED
    return command.finish(args, facts, task, [imported, show_steps(args.steps, records)])


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--smoke", action="store_true", help="few steps, one repetition: for CI")
    command.add_reps(parser, 15, "one warm-up")
    text = f"how many there are. default: {STEPS}, smoke: {SMOKE_STEPS}"
    parser.add_argument("--steps", type=int, help=text)
    command.add_output_arguments(parser)
    parser.set_defaults(systems=[])
    args = command.repeated(parser)
    args.steps = args.steps or (SMOKE_STEPS if args.smoke else STEPS)
    return args


# -- imports ------------------------------------------------------------------------------------


def import_each(reps: int) -> dict[str, list[float]]:
    """Seconds of a whole process by what it imports, and those of its CPU time."""
    environment = command.child_environment(1)
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    found: dict[str, list[float]] = {name + what: [] for what in ("", CPU) for name in IMPORTS}
    for rep in range(reps + 1):
        for name, code in IMPORTS.items():
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            with Clock() as clock:
                subprocess.run([sys.executable, "-c", code], env=environment, check=True)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            if rep:
                found[name].append(clock.wall)
                found[name + CPU].append(cpu)
    progress(f"imported {reps} times each")
    return found


def show_imports(found: dict[str, list[float]]) -> dict[str, Any]:
    lines = [["", *IMPORTS, "ckptmgr adds"]]
    for title, what in {"seconds of a Python": "", "CPU time of them": CPU}.items():
        alone, both = (found[name + what] for name in IMPORTS)
        added = [b - a for a, b in zip(alone, both, strict=True)]
        row = (Spread.of(values).show(report.seconds) for values in (alone, both, added))
        lines.append([title, *row])
    alone, both = (statistics.median(found[name]) for name in IMPORTS)
    checks = [Check("added by the import, seconds", "ckptmgr", both - alone, IMPORT_AT_MOST)]
    print(f"\nImporting\n\n{report.columns(lines)}\n\n{report.check_table(checks)}", flush=True)
    return result("import", checks, found)


# -- a directory with many steps ----------------------------------------------------------------


def measure(task: dict[str, Any]) -> dict[str, list[float]]:
    """Seconds, by measure; each repetition with managers of its own."""
    root = Path(task["directory"], "root")
    fill(root, task["steps"])
    progress(f"{task['steps']} steps made")
    found: dict[str, list[float]] = {measure: [] for measure in MEASURES}
    for rep in range(task["reps"] + 1):
        measured = one_manager(root, task["steps"])
        for name, seconds in measured.items() if rep else ():
            found[name].append(seconds)
    progress(f"opened {task['reps']} times")
    return found


def fill(root: Path, count: int) -> None:
    """Steps from 1 up: one that is saved, and copies with manifests and numbers of their own."""
    import ckptmgr
    from ckptmgr.core import layout
    from ckptmgr.core.manifest import Manifest

    with ckptmgr.CheckpointManager(root, ckptmgr.Options(heartbeat=None)) as manager:
        manager.save(1, state(), metrics={"loss": 1.0}, sync=True)
    first = root / layout.step_name(1)
    document = Manifest.from_json((first / layout.MANIFEST).read_bytes())
    for step in range(2, count + 1):
        copy = root / layout.step_name(step)
        shutil.copytree(first, copy, copy_function=os.link)
        (copy / layout.MANIFEST).unlink()
        mine = replace(
            document,
            step=step,
            attempt=uuid.uuid4().hex[:16],
            created=document.created + step / count,
        )
        (copy / layout.MANIFEST).write_text(mine.to_json())


def state() -> dict[str, Any]:
    import numpy as np

    return {"w": np.arange(4, dtype=np.float32)}


def one_manager(root: Path, newest: int) -> dict[str, float]:
    """Opened, asked, and saved into a few times; the saves are deleted again."""
    import ckptmgr

    events: list[Any] = []
    keep = ckptmgr.Options(retention=ckptmgr.KeepLast(2 * newest), heartbeat=None)
    settle()
    reader, to_read = timed(
        lambda: ckptmgr.CheckpointManager(root, ckptmgr.Options(read_only=True))
    )
    latest, first = timed(reader.latest_step)
    _, again = timed(reader.latest_step)
    if latest != newest:
        raise AssertionError(f"the latest step is said to be {latest}, not {newest}")
    _, listing = timed(reader.steps)
    manager, opened = timed(lambda: ckptmgr.CheckpointManager(root, keep, events=[events.append]))
    saves, retained = [], []
    with manager:
        for step in range(newest + 1, newest + 1 + SAVES):
            handle, seconds = timed(lambda step=step: manager.save(step, state()))
            saves.append(seconds)
            handle.result()
            manager.wait()  # for retention, too
        retained = [event.seconds for event in events if event.phase == "retain"]
        for step in range(newest + 1, newest + 1 + SAVES):
            manager.delete(step)
    reader.close()
    return {
        "open": opened,
        "open_to_read": to_read,
        "latest": first,
        "latest_again": again,
        "in_first_save": saves[0],
        "retain_first": retained[0],
        "in_save": Spread.of(saves[1:]).median,
        "retain": Spread.of(retained[1:]).median,
        "steps": listing,
    }


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    with Clock() as clock:
        found = call()
    return found, clock.wall


def show_steps(count: int, found: dict[str, list[float]]) -> dict[str, Any]:
    lines = [["", "median (smallest .. largest)"]]
    lines += [[MEASURES[name], Spread.of(found[name]).show(report.seconds)] for name in MEASURES]
    latest = Spread.of(found["latest"]).median
    checks = [Check("latest_step(), seconds", "ckptmgr", latest, LATEST_AT_MOST)]
    head = f"A directory of {count} steps"
    print(f"\n{head}\n\n{report.columns(lines)}\n\n{report.check_table(checks)}", flush=True)
    return result(f"{count} steps", checks, found)


def result(workload: str, checks: list[Check], records: dict[str, list[float]]) -> dict[str, Any]:
    return {
        "workload": workload,
        "checks": [{**asdict(item), "verdict": item.verdict} for item in checks],
        "missed": report.missed(checks),
        "records": records,
    }


if __name__ == "__main__":
    sys.exit(command.child(measure) if command.is_child() else main())
