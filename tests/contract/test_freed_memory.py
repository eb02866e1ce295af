"""What a restore leaves of the memory it worked in."""

from tests.support import run_python

RESTORES = """
import ctypes, pathlib, sys
import jax
import numpy as np
import ckptmgr

MIB = 2**20
mesh = jax.make_mesh((8,), ("x",))
split = jax.NamedSharding(mesh, jax.P("x"))
state = {f"w{i}": jax.device_put(np.full((512, 4096), i, np.float32), split) for i in range(16)}
like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=split), state)

def resident():
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * 4096

with ckptmgr.CheckpointManager(sys.argv[1], ckptmgr.Options(heartbeat=None)) as manager:
    manager.save(0, state, sync=True)
    for _ in range(8):
        back = jax.block_until_ready(manager.restore(like))
    found = resident()
    ctypes.CDLL(None).malloc_trim(0)
    print((found - resident()) // MIB)
"""


def test_a_restore_gives_back_what_it_freed(tmp_path):
    done = run_python(
        RESTORES, tmp_path, env={"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    )
    assert int(done.stdout) < 64
