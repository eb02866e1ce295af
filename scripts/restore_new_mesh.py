"""Opens a checkpoint on a mesh it was not saved on, and evaluates it on held-out text.

    python scripts/restore_new_mesh.py --checkpoints=/tmp/tiny --mesh=1x8

No config is needed: scripts/train.py stored the one it used in the checkpoint.
"""

from absl import app, flags
from ml_collections import ConfigDict

import ckptmgr
import stdlib_text
import tinylm

flags.DEFINE_string("checkpoints", None, "Directory of the checkpoints.", required=True)
flags.DEFINE_integer("step", None, "The step to open; the latest if not given.")
flags.DEFINE_string("mesh", "1x1", "Sizes of the new mesh's axes, like 4x2.")
FLAGS = flags.FLAGS


def main(_) -> None:
    mesh = tinylm.make_mesh(tinylm.parse_mesh(FLAGS.mesh))
    info = ckptmgr.describe(FLAGS.checkpoints, FLAGS.step).info
    if "config" not in (info.extra or {}):
        raise app.UsageError(f"step {info.step} was not written by scripts/train.py")
    config = ConfigDict(info.extra["config"])

    plan = ckptmgr.plan_restore(FLAGS.checkpoints, step=info.step, mesh=mesh)
    print(
        f"to read: {plan.read_bytes / 1e6:.1f} MB, {plan.wanted_bytes / 1e6:.1f} MB of it needed;"
        f" on the mesh: {plan.target_bytes / 1e6:.1f} MB;"
        f" host memory: at most {plan.peak_host_bytes / 1e6:.1f} MB"
    )
    for note in plan.notes:
        print(f"note: {note}")
    state = ckptmgr.restore(FLAGS.checkpoints, step=info.step, mesh=mesh).state

    _, held_out_text = stdlib_text.load(config.data.max_bytes)
    held_out = stdlib_text.batches(held_out_text, config)
    loss = tinylm.held_out_loss(config, mesh, state["params"], held_out)
    print(f"step {info.step} on mesh {dict(mesh.shape)}: held-out loss {loss:.4f}")


if __name__ == "__main__":
    app.run(main)
