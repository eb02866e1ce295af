"""The two systems that scripts/reliability.py breaks, behind one set of calls.

Both get the same states, the same number of steps to keep and their default settings; ckptmgr's
heartbeats are off. What a caller of Orbax has to do by hand (catch the error of a step that cannot
be read and ask for the one before) is done here for it.
"""

import importlib.metadata
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp

import ckptmgr

KEEP = 3
ITEM = "default"


def state(number: int, words: int = 4096) -> dict:
    """A state whose every leaf tells its number; its bytes do not compress."""
    rng = np.random.default_rng(number)
    return {
        "words": rng.integers(0, 2**32, words, np.uint32),
        "matrix": rng.standard_normal((64, 64)).astype(np.float32),
        "half": rng.standard_normal(64).astype(ml_dtypes.bfloat16),
        "number": np.full(3, number, np.int32),
    }


def on_device(tree: dict) -> dict:
    return {name: jnp.asarray(value) for name, value in tree.items()}


def same(found: dict, wanted: dict) -> bool:
    """Bit for bit, types and shapes included."""
    if sorted(found) != sorted(wanted):
        return False
    for name, right in wanted.items():
        got = np.asarray(found[name])
        if got.dtype != right.dtype or got.shape != right.shape or got.tobytes() != right.tobytes():
            return False
    return True


def target(wanted: dict) -> dict:
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return {
        name: jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=one)
        for name, value in wanted.items()
    }


class Ckptmgr:
    name = "ckptmgr"
    version = f"ckptmgr {importlib.metadata.version('ckptmgr')}"

    def open(self, root: str, keep: int | None = None):
        retention = ckptmgr.KeepLast(keep) if keep else ckptmgr.KeepAll()
        options = ckptmgr.Options(heartbeat=None, retention=retention)
        return ckptmgr.CheckpointManager(root, options)

    def save(self, manager, step: int, tree: dict) -> None:
        """Begins a save in the background."""
        manager.save(step, on_device(tree))

    def wait(self, manager) -> None:
        """Until every save is durable; raises what went wrong."""
        manager.wait()

    def steps(self, root: str) -> list[int]:
        with ckptmgr.CheckpointManager(root, ckptmgr.Options(read_only=True)) as reader:
            return [info.step for info in reader.steps()]

    def restore(self, root: str, step: int, like: dict) -> dict:
        with ckptmgr.CheckpointManager(root, ckptmgr.Options(read_only=True)) as reader:
            return reader.restore(target(like), step=step)

    def resume(self, root: str, like: dict) -> tuple[int, dict]:
        """Step and state, as a loop that starts again asks for them."""
        with ckptmgr.CheckpointManager(root, ckptmgr.Options(read_only=True)) as reader:
            found = reader.restore_latest(target(like))
        if found is None:
            raise LookupError("there is no step")
        return found.step, found.state


class Orbax:
    name = "Orbax"
    version = f"orbax-checkpoint {importlib.metadata.version('orbax-checkpoint')}"

    def open(self, root: str, keep: int | None = None):
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=True)
        return ocp.CheckpointManager(Path(root).resolve(), options=options)

    def save(self, manager, step: int, tree: dict) -> None:
        manager.save(step, args=ocp.args.StandardSave(on_device(tree)))

    def wait(self, manager) -> None:
        manager.wait_until_finished()
        manager.check_for_errors()

    def steps(self, root: str) -> list[int]:
        with self.open(root) as manager:
            return sorted(manager.all_steps())

    def restore(self, root: str, step: int, like: dict) -> dict:
        with self.open(root) as manager:
            return manager.restore(step, args=ocp.args.StandardRestore(target(like)))

    def resume(self, root: str, like: dict) -> tuple[int, dict]:
        """The newest step that restores; errors are caught here, as a careful caller would."""
        error: Exception = LookupError("there is no step")
        for step in reversed(self.steps(root)):
            try:
                return step, self.restore(root, step, like)
            except Exception as exc:
                error = exc
        raise error


SYSTEMS = {"ckptmgr": Ckptmgr(), "orbax": Orbax()}
