"""All processes of a job change over to what process 0 has chosen with the same save."""

import numpy as np
import pytest

import ckptmgr
from ckptmgr.core.compression import CODECS
from ckptmgr.reading import open_path
from tests.support import trees
from tests.support.processes import run_job

pytestmark = pytest.mark.timeout(150)

STEPS = 5

JOB = """
from jax.experimental import multihost_utils
from ckptmgr import Storage
from tests.multiprocess import test_compression as cases
from tests.support.slow import SlowStore

m = mesh(4)
tree = {name: put(value, NamedSharding(m, P("x"))) for name, value in cases.values().items()}
store = SlowStore(root, 2e6 if rank == 0 else 1e12)  # by itself the other would choose nothing
events = []
options = Options(
    storage=Storage(compression="auto", chunk_bytes=2**16),
    snapshot=Snapshot(mode=arguments[0], when_busy=arguments[1]),
    heartbeat=None,
    coordination=Coordination(deadline_seconds=30.0),
)
with ckptmgr.CheckpointManager(
    root, options, store=store, clock=store.clock, events=[events.append]
) as manager:
    accepted = [step for step in range(cases.STEPS) if manager.save(step, tree).accepted]
    manager.wait()
    accepted += [step for step in range(10, 12) if manager.save(step, tree, force=True).accepted
                 and manager.wait() is None]
    for name, array in manager.restore(tree).items():
        assert same(array, cases.values()[name]), name
report(accepted=accepted, chosen=[e.detail for e in events if e.phase == "compression"])
multihost_utils.sync_global_devices("the end")
"""


def values():
    rng = np.random.default_rng(7)
    return {
        "tokens": rng.integers(0, 32_000, 2**18).astype(np.int32),
        "zeros": np.zeros((64, 256), np.float32),
    }


@pytest.mark.parametrize(
    ("mode", "when_busy"),
    [("copy_on_write", "wait"), ("copy_on_write", "skip"), ("double_buffer", "wait")],
)
def test_all_processes_change_over_with_the_same_save(tmp_path, mode, when_busy):
    first, second = run_job(JOB, tmp_path, mode, when_busy)
    assert first["accepted"] == second["accepted"]
    assert len(first["chosen"]) == 1 and second["chosen"] == []
    found = []
    for step in first["accepted"]:
        found.append(open_path(tmp_path, step).items["default"].tree.compression)
        assert ckptmgr.verify(tmp_path, step).good
        trees.assert_same_leaves(ckptmgr.restore(tmp_path, step=step), values())
    assert found[0] is None and found[-1] in CODECS
    changed = found.index(found[-1])
    assert found == [None] * changed + [found[-1]] * (len(found) - changed)
    assert first["chosen"][0].startswith(f"compression: {found[-1]}; ")
