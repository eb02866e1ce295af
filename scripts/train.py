"""Trains a small flax transformer on text, saves while training, and resumes where it stopped.

    python scripts/train.py --checkpoints=/tmp/tiny
    python scripts/train.py --checkpoints=/tmp/tiny --mesh=2x1 --steps=80   # goes on, on 2 devices
    python scripts/train.py --checkpoints=/tmp/llm --config=configs/llm.py

Several processes make one job; each is started with its own number (0 and 1 here):

    python scripts/train.py --checkpoints=/shared/tiny --coordinator=host0:1234 --processes=2 --process=0

On a machine without accelerators the mesh is made of virtual CPU devices. Stop it in any way,
`kill -9` too, and start it again: on the same mesh the losses are those of a run that never
stopped, bit for bit. The lines to copy into another loop are marked in `train`.
"""

import functools
import operator
import sys
from collections.abc import Callable
from pathlib import Path

import jax
from absl import app, flags
from ml_collections import ConfigDict, config_flags

import ckptmgr
import stdlib_text
import tinylm
from run_log import RunLog

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.append(str(REPOSITORY))  # configs import one another

config_flags.DEFINE_config_file("config", str(REPOSITORY / "configs" / "tiny.py"))
flags.DEFINE_string("checkpoints", None, "Directory of the checkpoints.", required=True)
flags.DEFINE_string("mesh", None, "Sizes of the mesh axes, like 4x2, instead of the config's.")
flags.DEFINE_integer("steps", None, "Step to train up to, instead of the config's.", 1)
flags.DEFINE_string("coordinator", None, "Address of process 0, host:port, for several processes.")
flags.DEFINE_integer("processes", 1, "How many processes train together.", 1)
flags.DEFINE_integer("process", 0, "The number of this one.", 0)
flags.DEFINE_string("losses", None, "File to add a JSON line to each step: the exact loss.")
flags.DEFINE_string("summary", None, "File for what the run measured, as JSON.")
FLAGS = flags.FLAGS


def checkpoint_options(
    config: ConfigDict, on_committed: Callable[[ckptmgr.StepInfo], None]
) -> ckptmgr.Options:
    """The `checkpoint` part of a config as the options of a manager, group by group."""
    policies = [getattr(ckptmgr, name)(**args) for name, args in config.retention.items()]
    return ckptmgr.Options(
        schedule=ckptmgr.Schedule(**config.schedule),
        snapshot=ckptmgr.Snapshot(**config.snapshot),
        heartbeat=ckptmgr.Heartbeat(**config.heartbeat) if config.heartbeat else None,
        storage=ckptmgr.Storage(**config.storage),
        retention=functools.reduce(operator.or_, policies),
        on_committed=on_committed,
    )


def train(config: ConfigDict, job: tinylm.Job, batches: stdlib_text.Batches, log: RunLog):
    """Trains up to `config.steps` from the newest good checkpoint; returns the last state."""
    options = checkpoint_options(config.checkpoint, log.committed)
    about = {"config": config.to_dict()}  # so that a checkpoint says how to evaluate it

    # The lines to copy: `job.abstract` is the state as jax.ShapeDtypeStructs with shardings. Here
    # every process is at the same batch, so its place goes in as plain values and any number of
    # processes can go on from it. An iterator that reads a part of the data in each process goes in
    # itself, as `data=iterator`: each then gets its own state back.
    with ckptmgr.CheckpointManager(FLAGS.checkpoints, options) as mgr:
        latest = mgr.restore_latest(ckptmgr.Items(state=job.abstract, data=batches.get_state()))
        start, state = (latest.step, latest.state.state) if latest else (0, job.init())
        if latest:
            batches.set_state(latest.state.data)
        log.start(start)
        for step in range(start + 1, config.steps + 1):
            state, loss = job.step(state, next(batches))  # donates the state: saved copies stay
            loss = float(loss)
            if mgr.should_save(step) or step == config.steps:
                items = ckptmgr.Items(state=state, data=batches.get_state())
                if step == config.steps:
                    mgr.wait()  # so that the last save cannot be skipped for a busy one
                with log.saving(step):
                    mgr.save(step, items, metrics={"loss": loss}, extra=about, force=True)
            log.step(step, loss, mgr.saves_in_flight)
            if mgr.preempted:
                break
    # Leaving the block waits for the save in flight, and raises if one has failed.
    return state


def join() -> None:
    """Makes this process one of the job's."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(FLAGS.coordinator, FLAGS.processes, FLAGS.process)


def main(_) -> None:
    config = FLAGS.config
    if FLAGS.steps is not None:
        config.steps = FLAGS.steps
    if FLAGS.processes > 1:
        join()
    axes = tinylm.parse_mesh(FLAGS.mesh) if FLAGS.mesh else dict(config.mesh)
    mesh = tinylm.make_mesh(axes, FLAGS.processes)
    training_text, held_out_text = stdlib_text.load(config.data.max_bytes)
    job = tinylm.build(config, mesh)
    log = RunLog(config.steps, FLAGS.losses, quiet=FLAGS.process > 0)
    state = train(config, job, stdlib_text.batches(training_text, config), log)
    held_out = stdlib_text.batches(held_out_text, config)
    loss = tinylm.held_out_loss(config, mesh, state.params, held_out)
    if FLAGS.process > 0:
        return
    print(f"held-out loss {loss:.4f}")
    if FLAGS.summary:
        log.write_summary(FLAGS.summary, mesh=dict(mesh.shape), held_out_loss=loss)


if __name__ == "__main__":
    app.run(main)
