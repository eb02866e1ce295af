"""A real training process, killed by SIGKILL at random moments: see scripts/crash_loop.py."""

import importlib.util
import json
import subprocess
import sys

import numpy as np
import pytest

from tests.support import ROOT

SECONDS_A_KILL = 1.5  # 0.4 to 0.6 on two free cores


def crash_loop(root, kills, seed):
    done = subprocess.run(
        [
            *(sys.executable, "scripts/crash_loop.py", "--json"),
            *("--kills", str(kills), "--seed", str(seed), "--dir", str(root)),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30 + SECONDS_A_KILL * kills,
    )
    assert done.stdout, done.stderr
    return json.loads(done.stdout), done.stderr


def assert_nothing_happened(found, stderr, kills):
    for what in ("lost", "wrong", "left", "failed"):
        assert found[what] == [], stderr
    assert found["kills"] == kills
    assert found["told"] > kills  # it did train and save
    assert found["moments"]["start"] > kills // 10
    assert found["in_a_save"] > kills // 20


def test_after_40_kills_no_step_that_was_told_of_is_lost_and_no_value_is_wrong(tmp_path):
    assert_nothing_happened(*crash_loop(tmp_path, kills=40, seed=7), kills=40)


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("crash_loop", ROOT / "scripts/crash_loop.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["crash_loop"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["crash_loop"]


def seen(there, wrong=(), left=(), after=()):
    return {"steps": there, "wrong": list(wrong), "left": list(left), "after": list(after)}


@pytest.mark.parametrize(
    "heard,there,what",
    [
        (["durable 5 async", "durable 6 async"], {5: "async"}, "lost"),
        (["durable 5 heartbeat"], {6: "async", 7: "async", 8: "async"}, "lost"),
        (["resumed 4 12 0"], {5: "async"}, "lost"),
        (["resumed 5 15 1"], {5: "async"}, "lost"),
        ([], seen({5: "async"}, wrong=["step 5: leaf one has other values"]), "wrong"),
        ([], seen({5: "async"}, left=["x"] * 99), "left"),
        ([], seen({5: "async"}, left=["x"], after=["x"]), "left"),
    ],
)
def test_the_loop_notices_what_is_lost_wrong_or_left(heard, there, what, script, tmp_path):
    loop = script.Loop(str(tmp_path), seed=1)
    loop.tally.newest = 5
    loop._hear(1, heard)
    loop._judge(1, there if "steps" in there else seen(there), sweep=True)
    assert len(getattr(loop.tally, what)) == 1 and not loop.tally.good


def test_the_loop_lets_go_what_retention_may_drop(script, tmp_path):
    loop = script.Loop(str(tmp_path), seed=1)
    loop._hear(1, ["resumed 0 0 0", "durable 4 heartbeat", "durable 5 async"])
    loop._judge(1, seen({6: "async", 7: "async", 8: "async", 9: "heartbeat"}), sweep=True)
    assert loop.tally.good and loop.durable == {}


def test_a_value_that_differs_by_one_bit_is_called_wrong(script):
    right = script.Expected()(3)
    place = {"at": 9}
    assert script.problem_of({"data": place, "state": right}, 3, script.Expected()(3)) == ""
    assert "iterator" in script.problem_of({"data": {"at": 8}, "state": right}, 3, right)
    for name, value in right.items():
        raw = bytearray(value.tobytes())
        raw[-1] ^= 1
        other = np.frombuffer(bytes(raw), value.dtype).reshape(value.shape)
        found = {"data": place, "state": {**right, name: other}}
        assert name in script.problem_of(found, 3, right)


@pytest.mark.soak
def test_after_1000_kills_no_step_that_was_told_of_is_lost_and_no_value_is_wrong(tmp_path):
    assert_nothing_happened(*crash_loop(tmp_path, kills=1000, seed=1), kills=1000)
