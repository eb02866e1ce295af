"""What proving costs: `python benchmarks/verification.py`.

Saves and restores of the same state take turns: as it is (`digests`), without any digest of chunks
(`none`: the function that takes them gives a constant, for this process alone; the library has no
such option), and with leaf digests besides (`leaf`). A restore is measured with verification and
without, into fresh memory. Shares are repetition by repetition, since turns that follow each other meet the same
disk; CPU time stands beside, and is steadier than the time on the clock.
"""

import argparse
import contextlib
import ctypes
import statistics
import sys
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
SYSTEMS = ("none", "digests", "leaf")
WARM_UPS = 2
SAVE_AT_MOST, RESTORE_AT_MOST = 0.05, 0.10

ROWS: report.Rows = (
    ("save", "save, to durable", report.seconds),
    ("cpu_save", "its CPU", report.seconds),
    ("restore", "restore", report.seconds),
    ("cpu_restore", "its CPU", report.seconds),
)
RATIO_MEASURES = ("save", "cpu_save", "restore", "cpu_restore")


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
    like = workload.like()
    records: list[dict[str, Any]] = []
    made = each_open(task, lambda name, root: Ckptmgr(root, options_of(name)))
    with made as systems:
        for rep in range(1 - WARM_UPS, task["reps"] + 1):
            for label, system in systems.items():
                step = len(records)
                training.step()
                settle(flush=not task["smoke"])
                measures = one(system, name_of(label), training, like, step)
                records.append(
                    {"system": label, "rep": rep, "warmup": rep <= 0, "measures": measures}
                )
                system.delete(step)
                progress(f"{workload.name} {rep}/{task['reps']} {label:<8} {measures}")
    return records


def options_of(name: str):
    import ckptmgr

    integrity = ckptmgr.Integrity(verify_on_restore=name != "none", leaf_digests=name == "leaf")
    return ckptmgr.Options(heartbeat=None, integrity=integrity)


def one(system: Ckptmgr, name: str, training: Training, like: Any, step: int) -> dict[str, float]:
    import jax

    with no_digests() if name == "none" else contextlib.nullcontext():
        with Clock() as save:
            system.save(step, training.state)
            system.wait()
    settle(flush=False)
    release_freed()
    with Clock() as restore:
        found = jax.block_until_ready(system.restore(step, like))
    training.verify(found, training.moved)
    return {
        "save": save.wall,
        "cpu_save": save.cpu,
        "restore": restore.wall,
        "cpu_restore": restore.cpu,
    }


def release_freed() -> None:
    """Every restore begins with fresh memory, as at the start of a job; else those that find some
    that was freed and is still mapped are twice as fast."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


@contextlib.contextmanager
def no_digests():
    """Chunks get a constant instead of a digest."""
    from ckptmgr.engine import arrays

    real = arrays.digest
    arrays.digest = lambda values: "0" * 32
    try:
        yield
    finally:
        arrays.digest = real


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
    if checks:
        print(f"\n{report.check_table(checks)}")
    sys.stdout.flush()
    return {
        "workload": workload.name,
        "ratios": [asdict(item) for item in ratios],
        "checks": [{**asdict(item), "verdict": item.verdict} for item in checks],
        "missed": report.missed(checks),
        "records": records,
    }


def checks_of(records: list[dict], systems: list[str]) -> list[Check]:
    if not {"none", "digests"} <= set(systems):
        return []
    return [
        Check("digests, of a save", "digests", share(records, "save"), SAVE_AT_MOST),
        Check("digests, of a restore", "digests", share(records, "restore"), RESTORE_AT_MOST),
    ]


def share(records: list[dict], measure: str) -> float:
    """What digests add, of the time without them."""
    proved = report.values(records, "digests", measure)
    without = report.values(records, "none", measure)
    more = statistics.median(a - b for a, b in zip(proved, without, strict=True))
    return more / statistics.median(without)


if __name__ == "__main__":
    sys.exit(command.child(measure) if command.is_child() else main())
