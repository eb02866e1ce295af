"""The systems under comparison, one small class each, all with the same methods.

A class makes the calls that its users make, with the defaults that its users get unless a
benchmark is about an option, and does no timing: the clock is in `measure.py`, the same for all. A
system lives for the whole run, as a manager does in a training job.

The libraries are imported when a system is built, so the parent process imports neither.
"""

import contextlib
import os
import pickle
import queue
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from command import name_of
from files import read_into, write_whole
from workloads import Workload


class System:
    """Keeps steps under `root`. A step is durable when `save` and then `wait` have returned."""

    needs = "numpy"  # the module that must be installed
    optional = False  # whether it is left out, in one line, where that is missing
    usual = True  # whether it takes part without being named

    @classmethod
    def takes(cls, workload: Workload) -> bool:
        """Whether a comparison with it says anything."""
        return True

    def __init__(self, root: Path):
        self.root = root

    def prepare(self, state: dict) -> Any:
        """What to hand to `save`; not timed."""
        return state

    def save(self, step: int, state: Any) -> None:
        raise NotImplementedError

    def wait(self) -> None:
        """Raises if the save failed."""
        raise NotImplementedError

    def durable(self) -> bool:
        """Whether the last save is; asked from a thread of its own while training goes on."""
        raise NotImplementedError

    def idle(self) -> bool:
        """Whether nothing of the last save is left to do: durable, old steps deleted."""
        raise NotImplementedError

    def restore(self, step: int, like: dict) -> dict:
        raise NotImplementedError

    def restore_warm(self, step: int, restored: dict) -> bool:
        """Read once more, into the memory of what was restored; False where that is not possible."""
        return False

    def delete(self, step: int) -> None:
        raise NotImplementedError

    def close(self) -> None:
        pass


S = TypeVar("S", bound=System)


@contextlib.contextmanager
def each_open(task: dict[str, Any], make: Callable[[str, Path], S]) -> Iterator[dict[str, S]]:
    """A system for each label of a task, made by its name in a directory of its own, until the end."""
    with contextlib.ExitStack() as stack:
        systems: dict[str, S] = {}
        for label in task["systems"]:
            root = Path(task["directory"], label)
            root.mkdir(exist_ok=True)  # that of several processes is one
            systems[label] = make(name_of(label), root)
            stack.callback(systems[label].close)
        yield systems


class Ckptmgr(System):
    """With default options: copy-on-write snapshots, durable, digests checked on restore.

    `events` are those of the last save.
    """

    needs = "ckptmgr"

    def __init__(self, root: Path, options: Any = None):
        import ckptmgr

        super().__init__(root)
        self.events: list = []
        self.manager = ckptmgr.CheckpointManager(root, options, events=[self._note])

    def _note(self, event: Any) -> None:
        self.events.append(event)

    def save(self, step: int, state: dict) -> None:
        self.events = []
        self._handle = self.manager.save(step, state)

    def wait(self) -> None:
        self._handle.result()

    def durable(self) -> bool:
        return self._handle.settled

    def idle(self) -> bool:
        return self._handle.done

    def restore(self, step: int, like: dict) -> dict:
        return self.manager.restore(like, step=step)

    def delete(self, step: int) -> None:
        self.manager.delete(step)

    def close(self) -> None:
        self.manager.close()


class Orbax(System):
    """Stock Orbax: its CheckpointManager with default options, which saves asynchronously."""

    needs = "orbax.checkpoint"

    def __init__(self, root: Path, keep: int | None = None):
        import orbax.checkpoint as ocp

        super().__init__(root)
        self._args = ocp.args
        options = ocp.CheckpointManagerOptions(max_to_keep=keep)
        self._manager = ocp.CheckpointManager(root, options=options)

    def save(self, step: int, state: dict) -> None:
        self._step = step
        self._manager.save(step, args=self._args.StandardSave(state))

    def wait(self) -> None:
        self._manager.wait_until_finished()

    def durable(self) -> bool:
        return (self.root / str(self._step)).exists()  # the rename is its commit

    def idle(self) -> bool:
        return not self._manager.is_saving_in_progress()

    def restore(self, step: int, like: dict) -> dict:
        return self._manager.restore(step, args=self._args.StandardRestore(like))

    def delete(self, step: int) -> None:
        self._manager.delete(step)

    def close(self) -> None:
        self._manager.close()


class Raw(System):
    """The floor: the same bytes to one file, synced and renamed; read into fresh host memory.

    It measures the disk and the memory, not jax: the bytes are gathered before the clock starts,
    and a restore ends with numpy arrays.
    """

    def prepare(self, state: dict) -> np.ndarray:
        return np.concatenate(
            [np.asarray(leaf).reshape(-1).view(np.uint8) for leaf in state.values()]
        )

    def save(self, step: int, state: np.ndarray) -> None:
        write_whole(self._file(step), [state])

    def wait(self) -> None:
        pass

    def restore(self, step: int, like: dict) -> dict:
        buffer = np.empty(self._file(step).stat().st_size, np.uint8)
        self._read(step, buffer)
        restored, start = {}, 0
        for name, leaf in like.items():
            end = start + leaf.size * leaf.dtype.itemsize
            restored[name] = buffer[start:end].view(leaf.dtype).reshape(leaf.shape)
            start = end
        return restored

    def restore_warm(self, step: int, restored: dict) -> bool:
        """What is left is the copy out of the page cache: no page is touched for the first time."""
        self._read(step, next(iter(restored.values())).base)
        return True

    def _read(self, step: int, buffer: np.ndarray) -> None:
        with open(self._file(step), "rb", buffering=0) as file:
            read_into(file, buffer)

    def delete(self, step: int) -> None:
        self._file(step).unlink()

    def _file(self, step: int) -> Path:
        return self.root / f"{step}.raw"


class Bare(System):
    """A plain asynchronous save of donated jax arrays, for comparison.

    One `device_put` orders the copies, of every replica; a thread writes one replica of each shard
    to a file, and where each is to another. No format, no digests, one process.
    """

    needs = "jax"
    usual = False

    def __init__(self, root: Path, keep: int | None = None):
        super().__init__(root)
        self._keep = keep
        self._thread: threading.Thread | None = None
        self._settled = threading.Event()
        self._problem: BaseException | None = None

    def save(self, step: int, state: dict) -> None:
        import jax

        self.wait()
        self._settled = threading.Event()
        ordered: queue.SimpleQueue[dict | None] = queue.SimpleQueue()
        # started while the cores are idle; later it would have to wait for the copies
        self._thread = threading.Thread(target=self._finish, args=(step, ordered), name="bare")
        self._thread.start()
        copies = None
        try:
            hosts = {
                name: leaf.sharding.with_memory_kind("pinned_host") for name, leaf in state.items()
            }
            copies = jax.device_put(state, hosts)
        finally:
            ordered.put(copies)

    def _finish(self, step: int, ordered: "queue.SimpleQueue[dict | None]") -> None:
        try:
            copies = ordered.get()
            if copies is not None:
                self._write(step, copies)
                self._settled.set()
                steps = sorted(int(path.stem) for path in self.root.glob("*.bare"))
                for old in steps[: -self._keep] if self._keep else ():
                    self.delete(old)
        except BaseException as error:
            self._problem = error

    def _write(self, step: int, copies: dict) -> None:
        shards = [
            (name, shard)
            for name, copy in copies.items()
            for shard in copy.addressable_shards
            if shard.replica_id == 0
        ]
        copies.clear()
        pieces = pickle.dumps([(name, shard.index) for name, shard in shards])
        write_whole(self._file(step, ".pieces"), [np.frombuffer(pieces, np.uint8)])
        shards.reverse()
        write_whole(
            self._file(step), (np.asarray(shards.pop()[1].data) for _ in range(len(shards)))
        )

    def wait(self) -> None:
        if self._thread is not None:
            self._thread.join()
        problem, self._problem = self._problem, None
        if problem is not None:
            raise problem

    def durable(self) -> bool:
        return self._settled.is_set()

    def idle(self) -> bool:
        return self._thread is None or not self._thread.is_alive()

    def restore(self, step: int, like: dict) -> dict:
        import jax

        arrays = {name: np.empty(leaf.shape, leaf.dtype) for name, leaf in like.items()}
        with open(self._file(step), "rb", buffering=0) as file:
            for name, index in pickle.loads(self._file(step, ".pieces").read_bytes()):
                there = arrays[name][(*index, ...)]  # a view, of a scalar too
                whole = there.flags.c_contiguous
                piece = there if whole else np.empty(there.shape, there.dtype)
                read_into(file, piece)
                if not whole:
                    there[...] = piece
        return jax.device_put(arrays, {name: leaf.sharding for name, leaf in like.items()})

    def delete(self, step: int) -> None:
        self._file(step).unlink()
        self._file(step, ".pieces").unlink()

    def close(self) -> None:
        self.wait()

    def _file(self, step: int, suffix: str = ".bare") -> Path:
        return self.root / f"{step}{suffix}"


class Dcp(System):
    """PyTorch Distributed Checkpoint with its defaults, in one process, into fresh tensors.

    Like `Raw` it gets the bytes gathered, as tensors, and a restore ends on the host.
    """

    needs = "torch"
    optional = True

    @classmethod
    def takes(cls, workload: Workload) -> bool:
        return workload.devices == 1 or workload.kind == "trainstate"

    def __init__(self, root: Path):
        import torch
        import torch.distributed.checkpoint as dcp

        super().__init__(root)
        self._torch, self._dcp = torch, dcp

    def prepare(self, state: dict) -> dict:
        return {name: self._tensor(np.array(leaf)) for name, leaf in state.items()}

    def save(self, step: int, state: dict) -> None:
        writer = self._dcp.FileSystemWriter(self.root / str(step))
        self._dcp.save(state, storage_writer=writer, no_dist=True)

    def wait(self) -> None:
        pass

    def restore(self, step: int, like: dict) -> dict:
        torch = self._torch
        tensors = {
            name: torch.empty(leaf.shape, dtype=getattr(torch, leaf.dtype.name))
            for name, leaf in like.items()
        }
        reader = self._dcp.FileSystemReader(self.root / str(step))
        self._dcp.load(tensors, storage_reader=reader, no_dist=True)
        return {name: self._array(tensor, like[name].dtype) for name, tensor in tensors.items()}

    def delete(self, step: int) -> None:
        shutil.rmtree(self.root / str(step))

    def _tensor(self, array: np.ndarray) -> Any:
        if array.dtype.name == "bfloat16":  # which torch does not take from numpy
            return self._torch.from_numpy(array.view(np.int16)).view(self._torch.bfloat16)
        return self._torch.from_numpy(array)

    def _array(self, tensor: Any, dtype: np.dtype) -> np.ndarray:
        if dtype.name == "bfloat16":
            return tensor.view(self._torch.int16).numpy().view(dtype)
        return tensor.numpy()


class Safetensors(System):
    """Its numpy functions, and the sync that they leave to others; one file, no sharding."""

    needs = "safetensors"
    optional = True

    @classmethod
    def takes(cls, workload: Workload) -> bool:
        return workload.devices == 1

    def __init__(self, root: Path):
        import safetensors.numpy

        super().__init__(root)
        self._library = safetensors.numpy

    def prepare(self, state: dict) -> dict:
        return {name: np.asarray(leaf) for name, leaf in state.items()}

    def save(self, step: int, state: dict) -> None:
        self._library.save_file(state, self._file(step))
        with open(self._file(step), "rb") as file:
            os.fsync(file.fileno())

    def wait(self) -> None:
        pass

    def restore(self, step: int, like: dict) -> dict:
        return self._library.load_file(self._file(step))

    def delete(self, step: int) -> None:
        self._file(step).unlink()

    def _file(self, step: int) -> Path:
        return self.root / f"{step}.safetensors"


SYSTEMS: dict[str, type[System]] = {
    "ckptmgr": Ckptmgr,
    "orbax": Orbax,
    "raw": Raw,
    "bare": Bare,
    "dcp": Dcp,
    "safetensors": Safetensors,
}

MODES = ("copy_on_write", "double_buffer", "sync")  # of ckptmgr's snapshots
MODES_AND_ORBAX = {**dict.fromkeys(MODES, Ckptmgr), "orbax": Orbax}
MODES_AND_PEERS = {**MODES_AND_ORBAX, "bare": Bare}


def by_mode(
    name: str, root: Path, keep: int | None = None, host_bytes: int | None = None
) -> System:
    """ckptmgr in one of its modes, without heartbeats, or a peer; keeping the last `keep` steps."""
    if name not in MODES:
        return MODES_AND_PEERS[name](root, keep)
    import ckptmgr

    options = ckptmgr.Options(
        snapshot=ckptmgr.Snapshot(mode=name, host_bytes=host_bytes),
        heartbeat=None,
        retention=ckptmgr.KeepLast(keep) if keep else ckptmgr.KeepAll(),
    )
    return Ckptmgr(root, options)


@contextlib.contextmanager
def counted_waves() -> Iterator[list[int]]:
    """The number of waves of each plan that ckptmgr makes meanwhile: it is in no event."""
    from ckptmgr.core import plan

    found: list[int] = []
    cut = plan.waves

    def counted(*args: Any) -> tuple:
        waves = cut(*args)
        found.append(len(waves))
        return waves

    plan.waves = counted
    try:
        yield found
    finally:
        plan.waves = cut
