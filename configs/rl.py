"""Reinforcement learning with policy gradients: every policy version, exactly.

For whom: loops in which actors load the policy that was saved, and a result must be traced to the
weights that made it. Why: no step of the schedule may be left out, so a busy save waits; and the
values are those of the call, to the bit, although the learner goes on at once. With a small policy
`"mode": "sync"` costs little and makes a version visible to actors when `save()` returns.

The model is that of `tiny.py`, so that it runs anywhere; the checkpoint part is the example.
"""

from ml_collections import ConfigDict

from configs import tiny


def get_config() -> ConfigDict:
    config = tiny.get_config()
    checkpoint = config.checkpoint
    checkpoint.schedule = {"every_steps": 1, "on_preemption": True}
    checkpoint.snapshot = {"mode": "copy_on_write", "when_busy": "wait"}
    checkpoint.heartbeat = {"every_saves": 50, "audit": True}
    checkpoint.retention = {"KeepLast": {"n": 10}}
    return config
