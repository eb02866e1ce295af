"""The default: a model that trains on two CPU cores, for `scripts/demo` and for trying things out.

Every field can be changed on the command line, for example
`--config.checkpoint.schedule.every_steps=20`. Other configs start from this one and change what
differs, so this file is the list of what there is to set.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "seed": 0,
            "steps": 60,
            # Axis names and sizes, outermost first. `--mesh=2x1` changes the sizes.
            "mesh": {"data": 4, "model": 2},
            "model": {
                "vocab": 256,  # bytes
                "width": 128,
                "layers": 2,
                "heads": 4,
                "mlp_width": 512,
                "dropout": 0.1,
            },
            # Text of the running Python's standard library, cut off at max_bytes.
            "data": {"batch": 16, "length": 64, "max_bytes": 4_000_000, "held_out_batches": 4},
            "optimizer": {"learning_rate": 3e-3, "warmup_steps": 10, "weight_decay": 0.01},
            # The groups of ckptmgr.Options, see `checkpoint_options` in scripts/train.py.
            "checkpoint": {
                "schedule": {"every_steps": 5},
                "snapshot": {"mode": "copy_on_write"},
                "storage": {},
                "heartbeat": {"every_saves": 10, "audit": True},
                # Names of policies and their arguments; a step that any of them keeps is kept.
                "retention": {"KeepLast": {"n": 3}},
            },
        }
    )
