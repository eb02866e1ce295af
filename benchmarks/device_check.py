"""Saving from an accelerator, in minutes: `python benchmarks/device_check.py`.

One process, all local devices in one mesh. For each size of state that fits, ckptmgr's modes and
stock Orbax take turns; a turn is a few saves in a row from a loop of donated steps. It needs
neither an installed ckptmgr nor anything else of this checkout but its files, and prints markdown
tables, after each size those that there are.

A size is left out where the device, the host or the disk is too small for it or the time too short,
and a system where its turn would not be over in time; the tables say so. Values are checked: the
state of the last save of each turn is donated to the next step at once, then restored leaf by leaf
and compared, bit for bit, with what it was when `save()` was called.
"""

import argparse
import contextlib
import gc
import importlib.metadata
import json
import math
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

START = time.monotonic()
sys.path.insert(0, str(Path(__file__).parent.parent))  # ckptmgr need not be installed

import machine  # noqa: E402  these need no more than the standard library
from command import installed  # noqa: E402
from device_report import size_report  # noqa: E402

NEEDED = ("jax", "numpy", "ml_dtypes", "tensorstore", "xxhash")
JAX_FROM = (0, 10)
GB = 10**9
LEAVES = 16
ROW_BYTES = 4096 * 4
HOST_COPIES = {"copy_on_write": 1, "orbax": 1, "double_buffer": 2, "sync": 1}
SYSTEMS = tuple(HOST_COPIES)
FAILED = 2
RESERVE_SECONDS = 10  # for the tables, and for what takes longer than was thought
VERIFY_SECONDS = 10  # a turn checks as many leaves as it can in so long
COPY_BYTES = 4 * GB  # plain copies are measured on so much


@dataclass
class Turn:
    """What one system did at one size: seconds, and what was found."""

    base: list[float] = field(default_factory=list)
    in_save: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    during: list[float] = field(default_factory=list)
    durable: list[float] = field(default_factory=list)
    transfer: list[float] = field(default_factory=list)  # bytes per second
    donated: bool = True
    checked: int = 0
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0
    why_not: str = ""


@dataclass
class Size:
    """One size of state: its turns by system, and plain copies in bytes per second."""

    name: str
    nbytes: int
    turns: dict[str, Turn] = field(default_factory=dict)
    pinned: list[float] = field(default_factory=list)
    asarray: list[float] = field(default_factory=list)
    step: float = 0.0
    prepared: float = 0.0
    why_not: str = ""


def main() -> int:
    args = parse_args()
    problem = what_is_missing()
    if problem:
        print(problem)
        return FAILED
    if not installed("orbax.checkpoint"):
        print("orbax-checkpoint is not installed: measured without it\n")
        args.systems = [name for name in args.systems if name != "orbax"]
    # XLA's pool of pinned host memory ends at 64 GiB otherwise; two copies of 32 GB are more.
    host = available_memory()
    os.environ.setdefault("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", str(max(64, host // GB)))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))

    scratch = Path(tempfile.mkdtemp(prefix="ckptmgr-device-", dir=args.directory))
    check = Check(args, scratch, host)
    print(f"{check.describe()}\n")
    try:
        for nbytes in args.sizes:
            size = check.size(nbytes)
            check.sizes.append(size)
            try:
                check.measure(size)
            except Exception as exc:
                size.why_not = failure(exc)
            finally:  # stopped from outside, too
                print(size_report(size, args.systems), end="\n\n", flush=True)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        if args.json:
            found = {"machine": check.describe(), "sizes": [asdict(size) for size in check.sizes]}
            Path(args.json).write_text(json.dumps(found, indent=1) + "\n")
    return 1 if check.failed() else 0


def what_is_missing() -> str:
    """What has to be installed first, in a line; "" where nothing."""
    missing = [name for name in NEEDED if not installed(name)]
    if missing:
        return f"device_check needs what is not installed here: {', '.join(missing)}"
    found = importlib.metadata.version("jax")
    if tuple(int(part) for part in found.split(".")[:2]) < JAX_FROM:
        return f"device_check needs jax {JAX_FROM[0]}.{JAX_FROM[1]} or later; {found} is installed"
    return ""


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    add = parser.add_argument
    add("--smoke", action="store_true", help="sizes of MiB: does it run? Also without accelerator")
    add("--sizes", help="of the state, in GB, comma-separated. default: 1,8,32")
    add("--systems", default=",".join(SYSTEMS), help=f"in turn. default: {','.join(SYSTEMS)}")
    add("--saves", type=int, help="in a row, two of them warm-ups. default: 5, smoke: 3")
    add("--step-ms", type=float, help="compute of a step. default: 100, smoke: 2")
    add("--directory", "--dir", help="where to write, such as /dev/shm. default: a disk")
    add("--budget-seconds", type=float, default=230, help="start nothing too late. default: 230")
    add("--json", metavar="FILE", help="also write every figure to FILE")
    args = parser.parse_args()
    args.systems = args.systems.split(",")
    if set(args.systems) - set(SYSTEMS):
        parser.error(f"--systems: choose from {', '.join(SYSTEMS)}")
    sizes = args.sizes or ("0.002,0.004" if args.smoke else "1,8,32")
    args.sizes = [int(float(size) * GB) for size in sizes.split(",")]
    args.saves = args.saves or (3 if args.smoke else 5)
    args.step_ms = args.step_ms or (2 if args.smoke else 100)
    args.directory = Path(args.directory) if args.directory else machine.default_directory()
    if not args.directory.is_dir() or not os.access(args.directory, os.W_OK):
        parser.error(f"--directory: {args.directory} cannot be written to; try /dev/shm")
    return args


def failure(error: Exception) -> str:
    return f"failed: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:150]}"


def available_memory() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable"):
            return int(line.split()[1]) * 1024
    return 0


class Check:
    """The run: what there is, what fits, and the measuring."""

    def __init__(self, args: argparse.Namespace, scratch: Path, host_bytes: int):
        import jax

        self.args, self.scratch, self._host_bytes = args, scratch, host_bytes
        self._devices = jax.local_devices()
        self.sizes: list[Size] = []

    def describe(self) -> str:
        first, count = self._devices[0], len(self._devices)
        kind = first.device_kind or first.platform
        memory = self._device_bytes()
        device = f"{count} x {kind}" + (f", {memory / GB:.0f} GB for arrays" if memory else "")
        return f"{device}; {machine.describe(machine.facts(self.args.directory))}"

    def failed(self) -> bool:
        """Whether something of ckptmgr went wrong; what was left out did not."""
        if any(size.why_not.startswith("failed") for size in self.sizes):
            return True
        ours = [t for size in self.sizes for name, t in size.turns.items() if name != "orbax"]
        return any(t.wrong or not t.donated or t.why_not.startswith("failed") for t in ours)

    # -- what fits --------------------------------------------------------------------------

    def left(self) -> float:
        return self.args.budget_seconds - (time.monotonic() - START)

    def size(self, nbytes: int) -> Size:
        """The size nearest to what was asked for that all devices share evenly."""
        unit = LEAVES * ROW_BYTES * len(self._devices)
        nbytes = max(1, round(nbytes / unit)) * unit
        name = f"{nbytes / GB:.0f} GB" if nbytes >= 0.5 * GB else f"{nbytes / 1e6:.0f} MB"
        return Size(name, nbytes)

    def _device_bytes(self) -> int:
        """What arrays may take on all devices together; 0: not known, as on CPU."""
        stats = [device.memory_stats() or {} for device in self._devices]
        return sum(found.get("bytes_limit", 0) for found in stats)

    def _does_not_fit(self, size: Size, copies: int) -> str:
        """Why the state cannot be measured with so many copies on the host; "" if it can."""
        device, disk = self._device_bytes(), machine.free_bytes(self.args.directory)
        on_host = copies * size.nbytes
        if not device:
            on_host += 2 * size.nbytes  # the state itself
        elif device < 1.3 * size.nbytes + GB / 4:
            return f"{device / GB:.0f} GB on the device are too few"
        if disk < 1.2 * size.nbytes:
            return f"{disk / GB:.0f} GB free to write to are too few"
        if machine.file_system(self.args.directory) == "tmpfs":
            on_host += size.nbytes
        if self._host_bytes < 1.1 * on_host + GB / 4:
            return f"{self._host_bytes / GB:.0f} GB of host memory are too few"
        return ""

    def _share(self, size: Size, systems_left: int) -> float:
        """Seconds for the next turn: systems share evenly, sizes by the roots of their bytes."""
        later = sum(math.sqrt(nbytes) for nbytes in self.args.sizes[len(self.sizes) :])
        now = math.sqrt(size.nbytes)
        left = max(0.0, self.left() - RESERVE_SECONDS)
        return left * now / (now * systems_left + later * len(self.args.systems))

    def _save_seconds(self, size: Size, system: str) -> float:
        """A save and the steps beside it, going by the last size; 0 where there was none."""
        for before in reversed(self.sizes[:-1]):
            turn = before.turns.get(system)
            if turn and turn.in_save:
                return turn.seconds / len(turn.in_save) * size.nbytes / before.nbytes
        return 0.0

    # -- measuring --------------------------------------------------------------------------

    def measure(self, size: Size) -> None:
        from training import Training
        from workloads import dense

        started = time.monotonic()
        prepared = max((before.prepared for before in self.sizes), default=0.0)
        size.why_not = self._does_not_fit(size, 1)
        if self.left() < RESERVE_SECONDS + 2 * prepared:
            size.why_not = f"{max(0, self.left()):.0f} s were left"
        if size.why_not:
            return
        rows = size.nbytes // LEAVES // ROW_BYTES
        workload = dense(size.name, len(self._devices), LEAVES, rows)
        matrix = 256 if self._devices[0].platform == "cpu" else 4096
        training = Training(workload, seed=1, matrix=matrix)
        training.compute_for(self.args.step_ms / 1000)
        size.step = statistics.median(training.step() for _ in range(5))
        plain_copies(size, training)
        size.prepared = time.monotonic() - started
        for place, system in enumerate(self.args.systems):
            turn = size.turns[system] = Turn()
            share = self._share(size, len(self.args.systems) - place)
            need, left = self._save_seconds(size, system), self.left() - RESERVE_SECONDS
            turn.why_not = self._does_not_fit(size, HOST_COPIES[system])
            if need > left:
                turn.why_not = f"about {need:.0f} s needed, {max(0, left):.0f} s left"
            if not turn.why_not:
                self._turn(turn, system, training, share)
            print(f"  {size.name} {system:<14} {turn.seconds:6.1f} s", file=sys.stderr, flush=True)

    def _turn(self, turn: Turn, name: str, training: Any, share: float) -> None:
        from systems import by_mode

        started = time.monotonic()
        root = self.scratch / f"{len(self.sizes)}-{name}"
        root.mkdir()
        try:
            with contextlib.closing(by_mode(name, root)) as system:
                self._saves(turn, system, training, started + share)
        except Exception as exc:  # the other turns are still wanted
            turn.why_not = failure(exc)
        finally:
            shutil.rmtree(root, ignore_errors=True)
            gc.collect()
            turn.seconds = time.monotonic() - started

    def _saves(self, turn: Turn, system: Any, training: Any, until: float) -> None:
        """As many saves in a row as there is time for, at least one."""
        from training import Baseline, save_and_step

        turn.base = list(Baseline.of(training, 5).steps)
        for number in range(self.args.saves):
            began = time.monotonic()
            if number:
                system.delete(number - 1)  # there is room for one step, not for two
            window = save_and_step(system, training, number, at_least=3)
            turn.in_save.append(window.in_save)
            turn.first.append(window.steps[0])
            turn.during.append(statistics.median(window.steps[1:]))
            turn.durable.append(window.durable)
            turn.donated &= window.donated == 1
            for event in getattr(system, "events", ()):
                if event.phase == "transfer" and event.bytes_per_second:
                    turn.transfer.append(event.bytes_per_second)
            if 2 * time.monotonic() - began > until:  # another one would end too late
                break
        if hasattr(system, "manager"):
            self._verify(turn, system, training, number, window.moved)

    def _verify(self, turn: Turn, system: Any, training: Any, number: int, moved: int) -> None:
        started = time.monotonic()
        for name, target in training.workload.like().items():
            restored = system.manager.restore({name: target}, step=number, partial=True)
            if not training.same(name, restored[name], moved):
                turn.wrong.append(name)
            turn.checked += 1
            if time.monotonic() - started > VERIFY_SECONDS or self.left() < RESERVE_SECONDS:
                break


def plain_copies(size: Size, training: Any) -> None:
    """What the machine gives: the same leaves to the host, without a checkpoint.

    Twice each: the first time the host memory is new.
    """
    import jax
    import numpy as np

    names = list(training.state)[: max(1, COPY_BYTES * LEAVES // size.nbytes)]
    leaves = [training.state[name] for name in names]
    moved = sum(leaf.nbytes for leaf in leaves)
    targets = [leaf.sharding.with_memory_kind("pinned_host") for leaf in leaves]
    for _ in range(2):
        began = time.perf_counter()
        copies = jax.block_until_ready(jax.device_put(leaves, targets, may_alias=False))
        size.pinned.append(moved / (time.perf_counter() - began))
        del copies
    for _ in range(2):
        seconds = 0.0
        for name in names:
            leaf = training.workload.leaf(name, 1)  # a new one: JAX keeps the value of a read one
            leaf.block_until_ready()
            began = time.perf_counter()
            np.asarray(leaf)
            seconds += time.perf_counter() - began
        size.asarray.append(moved / seconds)


if __name__ == "__main__":
    sys.exit(main())
