"""For one accelerator or a CPU with many cores: about 19 million parameters, 230 MB a checkpoint.

Large enough for the time to durable to be felt, small enough to be trained in minutes.
"""

from ml_collections import ConfigDict

from configs import tiny


def get_config() -> ConfigDict:
    config = tiny.get_config()
    config.steps = 1000
    config.mesh = {"data": 1, "model": 1}
    config.model.update(width=512, layers=6, heads=8, mlp_width=2048)
    config.data.update(batch=32, length=256, max_bytes=20_000_000)
    config.optimizer.update(learning_rate=1e-3, warmup_steps=100)
    config.checkpoint.schedule.every_steps = 100
    config.checkpoint.retention = {"KeepLast": {"n": 2}}
    return config
