"""A job on 64 to 512 accelerators: copy-on-write saves, with a heartbeat now and then.

For whom: training where a synchronous save would cost minutes of all accelerators every hour.
Why: `save()` only orders the copies; host memory is taken while a save is in flight and given
back after it, which suits hosts whose memory the data pipeline wants too. A save that comes while
one is in flight waits for it, so that every step of the schedule is there.

The model is that of `tiny.py`, so that it runs anywhere; the checkpoint part is the example.
"""

from ml_collections import ConfigDict

from configs import tiny


def get_config() -> ConfigDict:
    config = tiny.get_config()
    checkpoint = config.checkpoint
    checkpoint.schedule = {"every_steps": 5, "on_preemption": True}
    checkpoint.snapshot = {"mode": "copy_on_write", "when_busy": "wait"}
    checkpoint.heartbeat = {"every_saves": 50, "audit": True}
    checkpoint.retention = {"KeepLast": {"n": 3}}
    return config
