"""What the size of chunks costs, and what it saves on a finer mesh: `python benchmarks/resharding.py`.

A manager for each `Storage(chunk_bytes=...)`; they take turns. A restore reads chunks whole, since it
compares their digests, so that a device reads more than it needs where chunks are larger than its
part or cut another way. How much more is worked out from the steps that were saved, with the
library's own plan, for meshes on which every device is a process of its own:

    over-read = bytes of the chunks read / bytes needed, of the device where that is the most
"""

import argparse
import itertools
import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import command
import report
from command import name_of, progress
from measure import measure as save_and_restore
from report import Check, Ratio, Target
from systems import Ckptmgr, each_open
from workloads import Leaf, Workload, dense, trainstate

if TYPE_CHECKING:
    from ckptmgr.core.boxes import Box
    from ckptmgr.core.manifest import StoredLeaf

DEFAULT, LARGEST = "default", "16MiB"
SYSTEMS: Mapping[str, int | None] = {
    DEFAULT: None,
    **{f"{size}MiB": size * 2**20 for size in (1, 2, 4, 8, 16)},
}
ONE_CHUNK_BYTES = 2**20  # leaves up to this are one chunk whatever the mesh; shown apart
GROUPS = {"large": "leaves above 1 MiB", "small": "leaves up to 1 MiB", "all": "all leaves"}
# The meshes of a restore by workload, as sizes of their axes. A leaf that is split at all is split
# over every axis that it has a dimension for, the first dimension over the first axis.
MESHES: Mapping[str, Sequence[tuple[int, ...]]] = {
    "dense": ((16,), (32,), (64,), (4, 2), (1, 8)),
    "trainstate": ((2, 4), (8, 1), (8, 2), (8, 4)),
}
OVER_READ_AT_MOST: Mapping[tuple[str, tuple[int, ...]], float] = {
    ("dense", (16,)): 1.2,
    ("dense", (32,)): 1.2,
}
TARGETS = (Target("durable", LARGEST, 1.1), Target("restore", LARGEST, 1.15))

RATIO_MEASURES = ("durable", "restore", "cpu_save", "cpu_restore")
ROWS: report.Rows = tuple(row for row in report.ROWS if row[0] in RATIO_MEASURES)


def main() -> int:
    args = parse_args()
    return command.measure_each(
        args,
        Path(__file__),
        [catalogue(args.smoke)[name] for name in args.workloads],
        lambda workload, found: show(workload, args, found),
        copies=2,
        modules=[Ckptmgr.needs],
        settings={"smoke": args.smoke, "systems": args.systems, "reps": args.reps},
    )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    command.add_arguments(parser, MESHES, SYSTEMS)
    command.add_reps(parser, 5, "two warm-ups")
    return command.repeated(parser)


def catalogue(smoke: bool) -> dict[str, Workload]:
    split = dense("dense", devices=8, leaves=2 if smoke else 8, rows=512 if smoke else 4096)
    return {workload.name: workload for workload in (split, trainstate(smoke))}


# -- the child ----------------------------------------------------------------------------------


def measure(task: dict[str, Any]) -> dict[str, Any]:
    """Records of saves and restores on one mesh, and of each system what its chunks are like."""
    import ckptmgr

    workload = catalogue(task["smoke"])[task["workload"]]
    like = workload.like()
    records: list[dict[str, Any]] = []
    chunks = []

    def made(name: str, root: Path) -> Ckptmgr:
        storage = ckptmgr.Storage(chunk_bytes=SYSTEMS[name])
        return Ckptmgr(root, ckptmgr.Options(heartbeat=None, storage=storage))

    with each_open(task, made) as systems:
        for label, system in systems.items():
            found = chunks_of(system, workload)
            chunks.append({"system": label, "warmup": False, "measures": found})
        for rep in range(task["reps"] + 1):
            for label, system in systems.items():
                seed = len(records)  # new values for each save
                found = asdict(save_and_restore(system, workload, like, rep + 1, seed, "warm"))
                records.append({"system": label, "rep": rep, "warmup": rep == 0, "measures": found})
                took = " ".join(f"{key} {found[key]:.3f}" for key in RATIO_MEASURES)
                progress(f"{workload.name} {rep}/{task['reps']} {label:<9} {took}")
    return {"records": records, "chunks": chunks}


def chunks_of(system: Ckptmgr, workload: Workload) -> dict[str, float | None]:
    """The number of chunks of a saved step, and the over-read on each mesh."""
    from ckptmgr.core.layout import DEFAULT_ITEM
    from ckptmgr.reading import open_path

    system.save(0, workload.state(seed=0))
    system.wait()
    item = open_path(system.root, step=0).items[DEFAULT_ITEM]
    system.delete(0)
    assert item.tree is not None
    found: dict[str, float | None] = {"chunks": len(item.digests)}
    for mesh in MESHES[workload.name]:
        for group, ratio in over_read(item.tree.leaves, workload.leaves, mesh).items():
            found[key_of(mesh, group)] = ratio
    return found


def over_read(
    stored: Sequence["StoredLeaf"], leaves: Mapping[str, Leaf], mesh: tuple[int, ...]
) -> dict[str, float | None]:
    """For each of `GROUPS` bytes read over bytes needed, of the device where that is the most.

    None where a group has no leaves. Leaves that are alike are planned once.
    """
    from ckptmgr.core.plan import Wanted, plan_restore

    alike = Counter(
        (replace(leaf, path=("any",), name="any", sharding=None), leaves[leaf.dotted].spec)
        for leaf in stored
    )
    totals = {group: np.zeros((math.prod(mesh), 2), np.int64) for group in GROUPS}
    for (leaf, spec), count in alike.items():
        group = "large" if leaf.nbytes > ONE_CHUNK_BYTES else "small"
        for device, box in enumerate(device_boxes(leaf.stored_shape, spec, mesh)):
            plan = plan_restore(
                [leaf],
                [Wanted(0, (box,))],
                whole_chunks=True,
                unit_bytes=0,  # of arrays without digests
                host_bytes=0,  # the waves change nothing in what is read
            )
            for name in (group, "all"):
                totals[name][device] += count * np.array([plan.read_bytes, plan.wanted_bytes])
    return {
        group: float((read / needed).max()) if needed.all() else None
        for group, (read, needed) in ((group, total.T) for group, total in totals.items())
    }


def device_boxes(
    shape: tuple[int, ...], spec: tuple[str | None, ...], mesh: tuple[int, ...]
) -> list["Box"]:
    """What each device of a mesh has of an array.

    Dimension d is split over axis d of the mesh; not where it does not divide, and none of a leaf
    that is on every device anyway.
    """
    from ckptmgr.core.boxes import Box

    axes = mesh[: len(shape)] if any(spec) else ()
    pieces = [
        axes[d] if d < len(axes) and size % axes[d] == 0 else 1 for d, size in enumerate(shape)
    ]
    lengths = [size // count for size, count in zip(shape, pieces, strict=True)]
    boxes = []
    for place in itertools.product(*map(range, mesh)):
        which = [place[d] if count > 1 else 0 for d, count in enumerate(pieces)]
        start = tuple(i * length for i, length in zip(which, lengths, strict=True))
        stop = tuple(a + length for a, length in zip(start, lengths, strict=True))
        boxes.append(Box(start, stop))
    return boxes


# -- the tables ---------------------------------------------------------------------------------


def show(workload: Workload, args: argparse.Namespace, found: dict[str, Any]) -> dict[str, Any]:
    """Print the tables of one workload; return what goes into the JSON file."""
    records, chunks = found["records"], found["chunks"]
    ours = [label for label in args.systems if name_of(label) == DEFAULT]
    pairs = [(label, LARGEST) for label in args.systems if label != LARGEST]
    ratios: list[Ratio] = []
    if LARGEST in args.systems:
        ratios = report.compare(records, pairs, RATIO_MEASURES, TARGETS, subjects=ours)
    checks = checks_of(workload.name, ours, chunks)
    small = [leaf.nbytes for leaf in workload.leaves.values() if leaf.nbytes <= ONE_CHUNK_BYTES]
    print(
        f"\n{workload.name}: {workload.describe()}, of these {report.show_bytes(sum(small))} in "
        f"{len(small)} leaves up to 1 MiB.\n\nMedian of {args.reps} (smallest .. largest)\n\n"
        f"{report.table(args.systems, records, ROWS)}"
    )
    if ratios:
        print(f"\nRatio of the medians (rep by rep)\n\n{report.ratio_table(ratios, ROWS)}")
    print(
        "\nChunks of a step, and over-read of the device that has the most, by the mesh restored on"
        f"\n\n{report.table(args.systems, chunks, chunk_rows(workload, chunks))}"
    )
    if checks:
        print(f"\n{report.check_table(checks)}")
    sys.stdout.flush()
    judged: list[Ratio | Check] = [*ratios, *checks]
    return {
        "workload": workload.name,
        "ratios": [{**asdict(item), "verdict": item.verdict} for item in ratios],
        "checks": [{**asdict(item), "verdict": item.verdict} for item in checks],
        "judged": report.judged(workload.name, judged, ROWS),
        "missed": report.missed(judged, ROWS),
        **found,
    }


def checks_of(name: str, systems: Sequence[str], chunks: list[dict[str, Any]]) -> list[Check]:
    """The over-read that has a limit."""
    limits = {mesh: limit for (of, mesh), limit in OVER_READ_AT_MOST.items() if of == name}
    return [
        Check(f"over-read, {shown(mesh)}", system, ratio, limit)
        for mesh, limit in limits.items()
        for system in systems
        for ratio in report.values(chunks, system, key_of(mesh, "large"))
    ]


def chunk_rows(workload: Workload, chunks: list[dict[str, Any]]) -> report.Rows:
    """Rows of the meshes. Where all leaves are large, or all small, these are the whole tree."""
    rows = [("chunks", "chunks", report.count)]
    for mesh in MESHES[workload.name]:
        measures = chunks[0]["measures"]
        mixed = all(measures[key_of(mesh, group)] is not None for group in GROUPS)
        rows += [
            (key_of(mesh, group), f"{shown(mesh)}, {GROUPS[group]}", report.factor)
            for group in (GROUPS if mixed else ["all"])
        ]
    return rows


def key_of(mesh: tuple[int, ...], group: str) -> str:
    return f"over_read {shown(mesh)} {group}"


def shown(mesh: tuple[int, ...]) -> str:
    return " x ".join(map(str, mesh)) + " devices"


if __name__ == "__main__":
    sys.exit(command.child(measure) if command.is_child() else main())
