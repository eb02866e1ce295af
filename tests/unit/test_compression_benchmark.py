"""The benchmark of compressions runs at its smoke size, with weights and without."""

import json

import numpy as np
import pytest

from tests.support import ChildFailed
from tests.support.benchmarks import full, run, tables


def test_compression(tmp_path):
    weights, scratch = tmp_path / "weights.npz", tmp_path / "scratch"
    scratch.mkdir()
    rng = np.random.default_rng(0)
    np.savez(weights, w=rng.standard_normal((64, 512), np.float32), ids=np.arange(9))
    workloads = ["weights_bf16", "synthetic_f32"]
    args = ["--weights", weights, "--directory", scratch, "--json", tmp_path / "out.json"]
    args += ["--workloads", ",".join(workloads)]
    found = tables(run("compression.py", *args))
    choices = ["zstd", "blosc", "blosc_bitshuffle"]
    results = json.loads((tmp_path / "out.json").read_text())["results"]
    assert [result["workload"] for result in results] == workloads
    for number, result in enumerate(results):
        times, ratios, alone = found[3 * number : 3 * number + 3]
        rows = ["bytes that remain", "save, to durable", "CPU of the save", "restore"]
        rows += ["CPU of the restore", "restore, from the disk"]
        full(times, ["none", *choices, "auto"], *rows)
        assert ratios[""] == [
            cell for system in [*choices, "auto"] for cell in (f"{system} / none", "target")
        ]
        assert "<= 1.10" in ratios["save, to durable"][-1]
        full(alone, ["bytes that remain", "GB/s"], *choices)
        (said,) = result["said"]
        assert said.startswith("auto: compression: ")
    assert list(scratch.iterdir()) == []


def test_compression_says_that_there_are_no_weights(tmp_path):
    args = ["--directory", tmp_path, "--workloads", "weights_f32,synthetic_bf16"]
    args += ["--systems", "zstd", "--weights", tmp_path / "absent.npz"]
    with pytest.raises(ChildFailed, match="there is no file"):
        run("compression.py", *args)
