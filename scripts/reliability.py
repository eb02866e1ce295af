"""Break ckptmgr and stock Orbax in the same ways, and print what came of it as a table.

    python scripts/reliability.py            some minutes; writes docs/RELIABILITY.md
    python scripts/reliability.py --quick    a smaller number of each, printed only

Every fault class runs in a process of its own, once for each system. `ENOSPC` needs the right to
mount a file system of 32 MiB; without it that class is left out. Figures are counts of this run.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT)]
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=1")

NAMES = ("ckptmgr", "orbax")
LABELS = {"ckptmgr": "ckptmgr", "orbax": "Orbax"}
COLUMNS = ("tried", "survived", "lost", "wrong", "undetected", "harmless")
TIMEOUT = 900.0  # seconds, for one class and system


def catalogue() -> dict:
    import reliability_faults
    import reliability_processes

    return reliability_faults.CATALOGUE | reliability_processes.CATALOGUE


def child(name: str, fault: str, root: str, scale: int) -> None:
    """Runs one class and prints its tally as the last line."""
    import logging

    from absl import logging as absl_logging

    from reliability_faults import Place
    from reliability_systems import SYSTEMS

    logging.disable(logging.CRITICAL)
    absl_logging.set_verbosity(absl_logging.FATAL)
    try:
        found = vars(catalogue()[fault](Place(SYSTEMS[name], root, scale)))
    except NotImplementedError as exc:
        found = {"skipped": str(exc)}
    print(json.dumps(found))


def measure(name: str, fault: str, scale: int) -> dict:
    """One class, in a process of its own."""
    base = tempfile.mkdtemp(prefix="reliability-")
    command = [sys.executable, __file__, "--child", name, fault, f"{base}/run", str(scale)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
        if done.returncode != 0:
            raise SystemExit(f"{name}, {fault}: the process failed\n{done.stderr[-4000:]}")
        return json.loads(done.stdout.splitlines()[-1])
    finally:
        shutil.rmtree(base, ignore_errors=True)


def table(results: dict) -> str:
    lines = ["| fault | system | " + " | ".join(COLUMNS) + " |", "|---|---|" + "---:|" * 6]
    totals = {name: dict.fromkeys(COLUMNS, 0) for name in NAMES}
    for fault, found in results.items():
        for name in NAMES:
            if "skipped" in found[name]:
                lines.append(f"| {fault} | {LABELS[name]} | not tried" + " | " * 6 + "|")
                continue
            row = [found[name][column] for column in COLUMNS]
            for column, value in zip(COLUMNS, row, strict=True):
                totals[name][column] += value
            lines.append(f"| {fault} | {LABELS[name]} | " + " | ".join(map(str, row)) + " |")
    for name in NAMES:
        row = " | ".join(f"**{value}**" for value in totals[name].values())
        lines.append(f"| **all** | **{LABELS[name]}** | {row} |")
    return "\n".join(lines)


def harmless(results: dict) -> str:
    """Alterations that changed nothing, by kind of file."""
    counts: dict[str, dict[str, int]] = {}
    for found in results.values():
        for name in NAMES:
            for kind, count in found[name].get("by_kind", {}).items():
                kind = kind.partition(",")[0]
                row = counts.setdefault(kind, dict.fromkeys(NAMES, 0))
                row[name] += count
    lines = ["| file | " + " | ".join(LABELS.values()) + " |", "|---|---:|---:|"]
    for kind, row in sorted(counts.items()):
        lines.append(f"| {kind} | " + " | ".join(str(row[name]) for name in NAMES) + " |")
    return "\n".join(lines)


def notes(results: dict) -> str:
    lines = []
    for fault, found in results.items():
        for name in NAMES:
            for note, count in sorted(found[name].get("notes", {}).items()):
                lines.append(f"- {LABELS[name]}, {fault}: {note} ({count})")
    return "\n".join(lines) or "- none"


PAGE = """# Reliability

Faults made on purpose, the same for ckptmgr and for stock Orbax (`orbax.checkpoint.CheckpointManager`
with its default settings), counted by

    python scripts/reliability.py

{versions}.
It took {minutes:.0f} minutes. Every figure down to the last section is a count of that one run; the
script writes this page.

{table}

What the columns mean:

- **tried**: faults made, each on its own. A flipped bit is one bit at one place of one file of the
  newer of two steps: the first and the last byte of each file, and places drawn with a fixed seed
  from all bytes alike.
- **survived**: afterwards a loop that starts again has the right values of the newest step that can
  be right, without anybody's help. For ckptmgr that is what `restore_latest` returns. For Orbax the
  script catches the error of `restore` and asks for the step before, as a careful caller would, and
  counts that as survived, too. For a full disk and a limit on file sizes: the failure is told, the
  earlier step is intact, and the next save in the same process works. For a background save that
  fails: the process ends with an error, whether it saves again, waits, closes or just ends. For two
  writers: the step has the values of the one that was told that it is saved.
- **lost**: steps that were durable, or said to be, and that the fault itself did not touch, but which
  cannot be restored any more.
- **wrong**: restores that returned, without an error, values other than those saved.
- **undetected**: alterations or failures that changed what a user gets and of which nobody is told:
  all of **wrong**, and saves that failed or were overwritten without a word.
- **harmless**: alterations after which the step was restored bit for bit: bytes that the restore does
  not need.

What was done, so that the rows can be read fairly: the arrays hold random bits, which Orbax's default
compression (zstd) stores as they are; with values that compress the rates may be others. Both systems keep arrays in TensorStore's OCDBT, whose tree nodes carry checksums and
whose larger values do not; what ckptmgr adds is a digest of each chunk and of each other file, which
it compares in every restore. ckptmgr's heartbeats were off. Most of the alterations
that were harmless to Orbax are in files that its restore of this state did not need. Who never lets
two jobs share a directory does not meet the last row.

## What went wrong

{notes}

## Harmless alterations by file

{harmless}

ckptmgr reads the database that the processes' databases were merged into, and no process's own
manifest or the tree nodes that only this leads to; the last byte of `_CKPTMGR` is a line feed that
it can do without.
"""

LAST = "## A training process that is killed a thousand times"
TO_DO = LAST + "\n\nNot run yet: `python scripts/crash_loop.py --kills 1000`.\n"


def page(results: dict, minutes: float, before: str) -> str:
    """The whole page; its last section, which this script does not measure, stays as it was."""
    text = PAGE.format(
        versions=versions(),
        minutes=minutes,
        table=table(results),
        notes=notes(results),
        harmless=harmless(results),
    )
    kept = before.find(LAST)
    return text + "\n" + (before[kept:] if kept >= 0 else TO_DO)


def versions() -> str:
    names = ("ckptmgr", "orbax-checkpoint", "jax", "tensorstore")
    found = [f"{name} {importlib.metadata.version(name)}" for name in names]
    return ", ".join([f"Python {platform.python_version()}", *found])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", help="only the classes whose name holds this text; printed only")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        name, fault, root, scale = args.child
        child(name, fault, root, int(scale))
        return 0
    scale = 1 if args.quick else 5
    began, results = time.monotonic(), {}
    for fault in catalogue():
        if args.only and args.only not in fault:
            continue
        started = time.monotonic()
        results[fault] = {name: measure(name, fault, scale) for name in NAMES}
        print(f"{fault}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    minutes = (time.monotonic() - began) / 60
    print(table(results), "\n\n" + notes(results))
    if not args.quick and not args.only:
        path = ROOT / "docs" / "RELIABILITY.md"
        path.write_text(page(results, minutes, path.read_text() if path.exists() else ""))
    ours = [found["ckptmgr"] for found in results.values()]
    return int(any(r.get(c) for r in ours for c in ("lost", "wrong", "undetected")))


if __name__ == "__main__":
    sys.exit(main())
