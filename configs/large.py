"""A job on more than 512 accelerators: double buffers and a frequent heartbeat.

For whom: jobs whose hardware fails every few hours, so that they save every few minutes and
restore often. Why: two sets of host buffers are allocated once, so a save never waits for memory,
and one may be staged while another is still written. At this size something in the path from
device to disk will be wrong one day: every 20th save is synchronous, compared with a direct read
of the arrays, and read back from storage, so a fault is at most 20 saves old when it is found. Its
steps become suspect, and the run goes back to the last heartbeat, which is always kept.

The model is that of `tiny.py`, so that it runs anywhere; the checkpoint part is the example.
"""

from ml_collections import ConfigDict

from configs import tiny


def get_config() -> ConfigDict:
    config = tiny.get_config()
    checkpoint = config.checkpoint
    checkpoint.schedule = {"every_steps": 2, "on_preemption": True}
    checkpoint.snapshot = {"mode": "double_buffer", "when_busy": "wait"}
    checkpoint.heartbeat = {"every_saves": 20, "audit": True}
    checkpoint.retention = {"KeepLast": {"n": 5}}
    return config
