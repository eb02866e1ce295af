"""Pre-training of a large language model: throughput first.

For whom: runs of weeks with terabytes of state, where a lost save costs a few minutes of work and
a stall costs the whole machine. Why: double buffers, and a save that finds both of them busy is
skipped rather than waited for; the next one is due soon. Host memory has a hard bound, so that the
data pipeline's share is safe: a state larger than it goes to the host in waves. Large chunks keep
the number of requests to storage low.

The model is that of `tiny.py`, so that it runs anywhere; the checkpoint part is the example.
"""

from ml_collections import ConfigDict

from configs import tiny


def get_config() -> ConfigDict:
    config = tiny.get_config()
    checkpoint = config.checkpoint
    checkpoint.schedule = {"every_steps": 4, "on_preemption": True}
    checkpoint.snapshot = {
        "mode": "double_buffer",
        "when_busy": "skip",
        "host_bytes": 64 * 2**30,
    }
    checkpoint.storage = {"chunk_bytes": 64 * 2**20}
    checkpoint.heartbeat = {"every_saves": 100, "audit": True}
    checkpoint.retention = {"KeepLast": {"n": 3}}
    return config
