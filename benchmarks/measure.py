"""The child process: one workload, all systems in turn, one record per system and repetition.

`run.py` starts it with the right number of devices, and reads the records from a file. Host memory
is looked at in a process of its own for each system, for one would live on what another has freed.
"""

import contextlib
import ctypes
import functools
import gc
import os
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from command import child, name_of, progress
from report import show_bytes
from systems import SYSTEMS, Ckptmgr, System, counted_waves, each_open
from workloads import Leaf, Workload, catalogue


@dataclass(frozen=True)
class Task:
    """What the parent asks for, passed as JSON on the command line.

    `part` is `time` or `memory`. `systems` are labels: `orbax#2` is a second, separate Orbax.
    `cache` is the state of the page cache before a restore: `warm` or `cold`.
    """

    part: str
    workload: str
    smoke: bool
    systems: list[str]
    reps: int
    cache: str
    directory: str
    result: str


@dataclass(frozen=True)
class Measures:
    """One save and one restore by one system. Seconds, bytes, counts."""

    in_save: float = 0.0  # until save() returns
    cpu_in_save: float = 0.0  # of the thread that called it; the rest is waiting for a core
    durable: float = 0.0  # from the call of save() until the step is durable
    restore: float = 0.0  # until every array is ready
    restore_warm: float | None = None  # the same into memory that was used before
    cpu_save: float = 0.0  # user + system time of this process, all threads, until durable
    cpu_restore: float = 0.0
    disk_bytes: int = 0
    files: int = 0


@dataclass(frozen=True)
class Peaks:
    """Host memory of one save and one restore: the most there was over what there was before."""

    peak_save: int
    peak_restore: int
    restored_bytes: int  # of all arrays, replicas included

    @property
    def of_restored(self) -> float:
        return self.peak_restore / self.restored_bytes


class Clock:
    """Wall and CPU seconds of a `with` block; `lap()` is the wall time so far."""

    def __enter__(self) -> "Clock":
        self._cpu_start = cpu_seconds()
        self._start = time.perf_counter()
        return self

    def lap(self) -> float:
        return time.perf_counter() - self._start

    def __exit__(self, *_) -> None:
        self.wall = self.lap()
        self.cpu = cpu_seconds() - self._cpu_start


def measure(
    system: System,
    workload: Workload,
    like: dict,
    step: int,
    seed: int,
    cache: str,
    rouse: Callable[[], object] = lambda: None,
) -> Measures:
    """Save a new state, drop it, restore it, check it, delete it. Two parts are timed.

    In a training job the code of a save ran not long ago, and much else since. Here several GiB are
    touched before each part, and the hypervisor may drop what it knows of other pages: the next
    call then took its caller up to 0.2 s of CPU, in any system. So `rouse` is called between.
    """
    bytes_before, files_before = _usage(system.root)
    state = workload.state(seed)
    to_save = system.prepare(state)
    settle()
    _touch_free_memory(3 * workload.nbytes)
    rouse()
    with Clock() as save:
        own = time.thread_time()
        system.save(step, to_save)
        in_save, own = save.lap(), time.thread_time() - own
        system.wait()

    bytes_after, files_after = _usage(system.root)
    for leaf in state.values():
        leaf.delete()
    del state, to_save
    settle()
    _set_page_cache(system.root, cache)
    _touch_free_memory(3 * workload.nbytes)
    rouse()
    with Clock() as restore:
        restored = _ready(system.restore(step, like))

    workload.verify(restored, seed)
    _set_page_cache(system.root, cache)
    with Clock() as again:
        warm = system.restore_warm(step, restored)
    if warm:
        workload.verify(restored, seed)
    del restored
    system.delete(step)
    return Measures(
        in_save=in_save,
        cpu_in_save=own,
        durable=save.wall,
        restore=restore.wall,
        restore_warm=again.wall if warm else None,
        cpu_save=save.cpu,
        cpu_restore=restore.cpu,
        disk_bytes=bytes_after - bytes_before,
        files=files_after - files_before,
    )


def run(task: Task) -> list[dict]:
    """Repetition 0 is the warm-up: measured and marked, left out of the medians."""
    workload = catalogue(task.smoke)[task.workload]
    like = workload.like()
    records: list[dict] = []
    second_root = Path(task.directory, "second")
    second_root.mkdir()
    with (
        each_open(asdict(task), _system) as systems,
        # by which its code is used and its caches are not
        each_open({**asdict(task), "directory": second_root}, _system) as second,
    ):
        for rep in range(task.reps + 1):
            for label, system in systems.items():
                seed = len(records)  # new values for each save
                rouse = functools.partial(_use, second[label], workload)
                record = {"system": label, "rep": rep, "warmup": rep == 0}
                ours = isinstance(system, Ckptmgr)
                with counted_waves() if ours else contextlib.nullcontext() as waves:
                    measured = measure(system, workload, like, rep, seed, task.cache, rouse)
                if waves:  # it plans once for each structure
                    record["waves"] = max(waves)
                records.append({**record, "measures": asdict(measured)})
                _progress(task, label, rep, measured)
    return records


def look_at_memory(task: Task) -> list[dict]:
    """The record of one system. It restores as after a restart, with nothing kept from the save."""
    workload = catalogue(task.smoke)[task.workload]
    (label,) = task.systems
    root = Path(task.directory, label)
    root.mkdir()
    system = _system(name_of(label), root)
    _use(system, workload)
    state = workload.state(seed=1)
    to_save = system.prepare(state)
    with _Peak() as save:
        system.save(1, to_save)
        system.wait()
    system.close()
    for leaf in state.values():
        leaf.delete()
    del state, to_save
    system = _system(name_of(label), root)
    like = workload.like()
    with _Peak() as restore:
        restored = _ready(system.restore(1, like))
    peaks = Peaks(save.nbytes, restore.nbytes, sum(map(_host_bytes, restored.values())))
    workload.verify(restored, seed=1)
    system.close()
    measures = {**asdict(peaks), "of_restored": peaks.of_restored}
    over, of = show_bytes(peaks.peak_restore), show_bytes(peaks.restored_bytes)
    progress(f"{task.workload}  memory {label:<11} restoring {of}: {over} over base")
    return [{"system": label, "rep": 1, "warmup": False, "measures": measures}]


def _use(system: System, workload: Workload) -> None:
    """Save and restore next to nothing: code and threads are not what a state costs."""
    tiny = replace(workload, leaves={"tiny": Leaf((64, 64), spec=())})
    system.save(0, system.prepare(tiny.state(seed=0)))
    system.wait()
    tiny.verify(_ready(system.restore(0, tiny.like())), seed=0)
    system.delete(0)


class _Peak:
    """`nbytes`: the most host memory in a `with` block over that before it."""

    def __enter__(self) -> "_Peak":
        settle(flush=False)
        with contextlib.suppress(AttributeError):  # a C library without it
            ctypes.CDLL(None).malloc_trim(0)  # else what was freed would serve the block unseen
        self._base = status("VmRSS")
        reset_peak()
        return self

    def __exit__(self, *_) -> None:
        self.nbytes = status("VmHWM") - self._base


def _host_bytes(array) -> int:
    shards = getattr(array, "addressable_shards", None)
    return array.nbytes if shards is None else sum(shard.data.nbytes for shard in shards)


def _ready(restored: dict) -> dict:
    import jax

    return jax.block_until_ready(restored)


def _system(name: str, root: Path) -> System:
    return SYSTEMS[name](root)


def _progress(task: Task, label: str, rep: int, measured: Measures) -> None:
    which = f"{rep}/{task.reps}" if rep else "warm-up"
    progress(
        f"{task.workload} {which:>7} {label:<11} in save() {measured.in_save:7.3f} s, "
        f"durable {measured.durable:7.3f} s, restore {measured.restore:7.3f} s"
    )


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def status(field: str) -> int:
    """A size from the kernel's account of this process, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise KeyError(field)


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def settle(flush: bool = True) -> None:
    """Nothing left over from the measure before: no garbage, and with `flush` no dirty pages."""
    gc.collect()
    if flush:
        os.sync()


def _touch_free_memory(nbytes: int) -> None:
    """So that every system finds free memory in one state: a virtual machine may have to fetch what
    was not touched for a while from its host, which takes longer than anything measured here."""
    np.empty(nbytes, np.uint8).fill(1)


def _files(root: Path) -> Iterator[Path]:
    return (path for path in root.rglob("*") if path.is_file())


def _usage(root: Path) -> tuple[int, int]:
    sizes = [path.stat().st_size for path in _files(root)]
    return sum(sizes), len(sizes)


def _set_page_cache(root: Path, cache: str) -> None:
    """Every file of the step in the page cache (`warm`), or none of them (`cold`)."""
    buffer = bytearray(1 << 20)
    for path in _files(root):
        with open(path, "rb", buffering=0) as file:
            if cache == "cold":
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            else:
                while file.readinto(buffer):
                    pass


if __name__ == "__main__":
    PARTS = {"time": run, "memory": look_at_memory}
    child(lambda task: PARTS[task["part"]](Task(**task)))
