"""Every config trains: saves, restores and goes on, with the options that it says."""

import json
import pathlib

import pytest

from tests.support import ROOT, run_python

SITUATIONS = ("small", "medium", "large", "rl", "llm")

TRAIN_EACH = """
import importlib, json, pathlib, sys
root, repository, *names = sys.argv[1:]
sys.path[:0] = [f"{repository}/scripts", repository]
import train
from absl import flags
small = {"layers": 1, "width": 16, "heads": 2, "mlp_width": 16}
data = {"batch": 4, "length": 16, "max_bytes": 20000, "held_out_batches": 1}
found = {}
for name in names:
    for steps in (9, 12):
        config = importlib.import_module(f"configs.{name}").get_config()
        config.model.update(small)
        config.data.update(data)
        flags.FLAGS.unparse_flags()
        flags.FLAGS(["train", f"--checkpoints={root}/{name}", f"--steps={steps}", "--mesh=4x2"])
        flags.FLAGS["config"].value = config
        train.main([])
    with train.ckptmgr.CheckpointManager(f"{root}/{name}") as manager:
        steps = manager.steps()
    mode = train.FLAGS.config.checkpoint.snapshot.mode
    found[name] = [mode, [[info.step, info.kind] for info in steps]]
pathlib.Path(root, "found.json").write_text(json.dumps(found))
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("configs")
    cache = {  # all runs compile the same programs
        "JAX_COMPILATION_CACHE_DIR": str(root / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    done = run_python(TRAIN_EACH, root, ROOT, *SITUATIONS, env=cache, timeout=110)
    assert done.stdout.count("resumed from step 9") == len(SITUATIONS)
    return json.loads((root / "found.json").read_text())


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("small", "sync"),
        ("medium", "copy_on_write"),
        ("large", "double_buffer"),
        ("rl", "copy_on_write"),
        ("llm", "double_buffer"),
    ],
)
def test_a_run_with_each_config_saves_resumes_and_ends_with_its_last_step_saved(runs, name, mode):
    found, steps = runs[name]
    assert found == mode
    kind = "sync" if mode == "sync" else "async"
    assert steps[-1] == [12, kind]
    assert len(steps) >= 2


@pytest.mark.parametrize("name", SITUATIONS)
def test_each_config_says_for_whom_it_is_and_why(name):
    text = pathlib.Path(ROOT, "configs", f"{name}.py").read_text()
    about = text.split('"""')[1]
    assert "For whom:" in about and "Why:" in about
