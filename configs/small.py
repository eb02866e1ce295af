"""A job on fewer than 64 accelerators: synchronous saves.

For whom: research runs on one or a few hosts, where a save takes seconds and a run has a few
hundred of them. Why: nothing is simpler to reason about than a step that is durable when `save()`
returns, no host memory is needed for copies, and the time lost is small. A run that saves every
few minutes and feels it should take `medium.py`.

The model is that of `tiny.py`, so that it runs anywhere; the checkpoint part is the example.
"""

from ml_collections import ConfigDict

from configs import tiny


def get_config() -> ConfigDict:
    config = tiny.get_config()
    checkpoint = config.checkpoint
    checkpoint.schedule = {"every_steps": 10, "on_preemption": True}
    checkpoint.snapshot = {"mode": "sync"}
    # Nothing is staged that an audit could find torn; what is left is the reading back.
    checkpoint.heartbeat = {"every_saves": 20, "audit": False}
    checkpoint.retention = {"KeepLast": {"n": 3}}
    return config
