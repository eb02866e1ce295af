"""`ckptmgr.advise`: the figures of its page, against arithmetic by hand, and what it refuses."""

import dataclasses
import inspect
import math
import pathlib
from typing import NamedTuple

import flax
import jax
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training import train_state

import ckptmgr
from ckptmgr import InvalidOption, advise
from ckptmgr.core import figures
from tests.support import ROOT

DAY = 86400.0
GPT3 = {"params": 175e9, "accelerators": 1024, "write_bytes_per_second": 10e9}


def shown(advice):
    """{name: value as shown} of the page, read from its text."""
    found = {}
    for line in str(advice).splitlines():
        name = line[2 : 2 + figures.NAME].rstrip()
        if line.startswith("  ") and line[2] not in " -" and len(line) > figures.NAME:
            value = line[2 + figures.NAME : 2 + figures.NAME + figures.VALUE].strip()
            found[name] = value
    return found


def test_the_page_of_175e9_parameters_on_1024_accelerators():
    """Each figure by hand, with M = 54 x 16384 / (419 x 1024) d = 178161 s:

    cost of a save 0.15 + 2.45e12 / 1024 / 25e9 + 490 / 100 = 5.1447 s; sqrt(2 x 5.1447 x 178161) =
    1353.9 s; 90 steps of 15 s and the cost are 1355.1 s; saving 5.1447 / 1355.1; a day has
    86400 / 1355.1 = 63.76 saves of 2.45 TB.
    """
    advice = advise(**GPT3, step_seconds=15, keep_last=3)
    assert shown(advice) == {
        "state": "2.45 TB",
        "flush": "245 s",
        "stall": "0.246 s",
        "heartbeat": "4.9 s",
        "time between failures": "2.06 d",
        "recovery": "14.1 min",
        "interval": "22.6 min",
        "interval in steps": "90",
        "Young": "22.6 min",
        "Daly": "22.5 min",
        "availability optimum": "22.7 min",
        "bound by the flush": "368 s",
        "goodput": "98.64 %",
        "saving": "0.38 %",
        "lost work per failure": "15.3 min",
        "failures in 30 days": "14.5",
        "lost in 30 days": "9.79 h",
        "without heartbeats": "99.22 %",
        "mode": "double_buffer",
        "staging memory": "4.9 TB",
        "... of each host": "38.3 GB",
        "written a day": "156 TB",
        "written a month": "4.69 PB",
        "held at most": "12.2 TB",
    }
    assert (advice.mode, advice.config) == ("double_buffer", "configs/large.py")
    assert (advice.interval_steps, round(advice.interval_seconds, 1)) == (90, 1355.1)
    assert advice.warnings == ()


def test_the_page_says_where_its_figures_come_from():
    page = str(advise(**GPT3, step_seconds=15))
    said = " ".join(page.split())
    for words in (
        "175e9 parameters of 14 bytes: Adam in mixed precision, weights 2 and master weights 4",
        "2.45 TB at 10 GB/s",
        "1,024 accelerators with 0.474 failures a day per thousand (419 in 54 days on 16,384 GPUs",
        "sqrt(2 C M), C = 5.14 s a save with its share of heartbeats, M = 178,161 s between failures",
        "1,355 s from save to save, 90 steps of 15 s: the highest expected goodput",
        "T_s + sqrt(2 (T_f + T_r) T_s + T_s^2) with the recovery as T_r",
        "more than 512 accelerators: two saves in flight, and a heartbeat now and then; start from "
        "configs/large.py",
        "2 x the state",
        "128 hosts, 8 accelerators on each assumed",
    ):
        assert words in said
    assert max(map(len, page.splitlines())) <= figures.WIDTH
    assert page.endswith("\n") and "\n\n\n" not in page


def test_every_figure_has_a_name_of_its_own_and_a_sentence():
    advice = advise(**GPT3, interval_seconds=600, keep_last=2, undetected_seconds=100)
    names = [figure.name for figure in advice.figures]
    assert len(set(names)) == len(names)
    for figure in advice.figures:
        assert figure.why.endswith(".") and len(figure.why) > 10
        assert figure.unit in ("seconds", "bytes", "share", "count", "")
        assert figure.shown in str(advice)
        assert advice[figure.name] is figure
    with pytest.raises(KeyError, match="no figure 'speed'; there are 'state', 'flush'"):
        advice["speed"]


# -- three examples, worked out in docs/ADVICE.md -------------------------------------------------


def test_saves_of_45_s_every_ten_minutes_take_more_than_two_of_thirty_days():
    """30 d / 600 s = 4320 saves; x 45 s = 194400 s = 2.25 d. From the end of a save to the next call
    a cycle is 645 s: 4018.6 saves, 2.09 d."""
    advice = advise(
        accelerators=32,
        state_bytes=1e11,
        flush_seconds=45,
        interval_seconds=600,
        heartbeat_every_saves=None,
    )
    assert advice["your saves"].value == 194_400
    assert shown(advice)["your saves"] == "2.25 d"
    assert advice["your saves"].why == (
        "of training in 30 days: 4,320 saves of 45 s each; 2.09 d where the interval begins at the "
        "end of a save."
    )
    assert advice["your wait per save"].value == 0
    assert advice.goodput > advice["your goodput"].value == pytest.approx(0.925, abs=0.001)


def test_hourly_saves_of_two_and_a_half_terabytes_write_60_terabytes_a_day():
    advice = advise(
        accelerators=512, state_bytes=2.5e12, write_bytes_per_second=10e9, interval_seconds=3600
    )
    assert advice["written a day by yours"].value == 60e12
    assert shown(advice)["written a day by yours"] == "60 TB"


def test_a_flush_that_is_longer_than_the_interval_turns_into_waiting():
    advice = advise(
        accelerators=512, state_bytes=2.5e12, write_bytes_per_second=10e9, interval_seconds=200
    )
    assert advice["flush"].value == 250
    assert advice["your wait per save"].value == 50
    assert "the flush of 250 s is longer" in advice["your wait per save"].why
    assert "A save every 200 s waits 50 s for the one before, since a flush takes 250 s." in (
        advice.warnings
    )
    # One in 250 s is what comes of it, whatever was asked for.
    assert advice["written a day by yours"].value == 2.5e12 * DAY / 250
    assert advice["your saves"].why.startswith("of training in 30 days: 10,368 saves of")
    assert advice["your saves"].value == pytest.approx(10_368 * advice["stall"].value)


# -- modes, memory, storage -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("accelerators", "job", "mode", "config", "copies"),
    [
        (1, "training", "sync", "small", 0),
        (63, "training", "sync", "small", 0),
        (64, "training", "copy_on_write", "medium", 1),
        (512, "training", "copy_on_write", "medium", 1),
        (513, "training", "double_buffer", "large", 2),
        (16384, "training", "double_buffer", "large", 2),
        (63, "rl", "sync", "rl", 0),
        (2048, "rl", "copy_on_write", "rl", 1),
        (64, "llm", "double_buffer", "llm", 2),
    ],
)
def test_the_mode_goes_by_size_and_job(accelerators, job, mode, config, copies):
    advice = advise(accelerators=accelerators, job=job, state_bytes=8e9, flush_seconds=10, hosts=4)
    assert (advice.mode, advice.config) == (mode, f"configs/{config}.py")
    assert pathlib.Path(ROOT, advice.config).is_file()
    assert advice["staging memory"].value == copies * 8e9
    assert advice["... of each host"].value == copies * 2e9


def test_a_mode_that_is_given_is_taken_and_what_would_suit_is_said():
    advice = advise(**GPT3, mode="sync")
    assert (advice.mode, advice.config) == ("sync", "configs/small.py")
    assert advice["mode"].why.startswith("as given; double_buffer would suit (more than 512")
    assert advice["stall"].value == 245
    assert advice["lost work per failure"].why.count("flush") == 0
    assert advise(**GPT3).goodput > advice.goodput


def test_what_is_held_goes_by_the_retention_and_grows_without_one():
    def names(**given):
        advice = advise(**GPT3, interval_seconds=3600, **given)
        return {f.name: f.value for f in advice.figures if f.group == "Storage"}

    everything = names()
    assert everything["growth a month"] == everything["written a month"]
    assert everything["written a month"] == 30 * everything["written a day"]
    assert "held at most" not in everything
    three = names(keep_last=3)  # and the newest heartbeat, and one that is being written
    assert three["held at most"] == 5 * 2.45e12 and "growth a month" not in three
    assert names(keep_last=3, heartbeat_every_saves=None)["held at most"] == 4 * 2.45e12
    daily = names(keep_last=3, keep_every_seconds=DAY)
    assert daily["growth a month"] == 30 * 2.45e12 and daily["held at most"] == 5 * 2.45e12


def test_errors_that_show_late_make_the_interval_longer():
    advice = advise(**GPT3, keep_last=3, undetected_seconds=7200, step_seconds=15)
    assert advice["bound by detection"].value == 3600
    assert advice.interval_seconds >= 3600
    assert "as detection allows" in advice["interval"].why
    one = advise(**GPT3, keep_last=1, undetected_seconds=7200, interval_seconds=600)
    assert [text for text in one.warnings if "no interval is safe" in text]
    assert [text for text in one.warnings if "no good step is left" in text]


def test_what_was_measured_goes_before_what_is_assumed():
    advice = advise(
        **GPT3,
        flush_seconds=300,
        restore_seconds=100,
        stall_seconds=2,
        mean_seconds_between_failures=1e5,
        detect_and_restart_seconds=60,
        heartbeat_every_saves=None,
    )
    wanted = {"flush": 300, "stall": 2, "recovery": 160, "time between failures": 1e5}
    assert {name: advice[name].value for name in wanted} == wanted
    assert advice["Young"].value == math.sqrt(2 * 2 * 1e5)
    faster = advise(**GPT3, read_bytes_per_second=100e9)
    assert faster["recovery"].value == 600 + 24.5
    assert "24.5 s to read 2.45 TB at 100 GB/s" in faster["recovery"].why


def test_a_job_that_cannot_work_is_told():
    advice = advise(**GPT3, mean_seconds_between_failures=200)
    assert any("longer than the 200 s between failures" in text for text in advice.warnings)
    slow = advise(**GPT3, mean_seconds_between_failures=900)
    assert any("More than half of the time is lost" in text for text in slow.warnings)
    assert str(slow).rstrip().endswith("whatever the interval.")


def test_an_interval_in_steps_is_never_below_its_bounds():
    advice = advise(**GPT3, heartbeat_every_saves=None, step_seconds=110)
    assert advice.interval_steps == 4  # 367.5 s are 1.5 flushes, and 3.34 steps
    assert advice.interval_seconds == pytest.approx(440.25, abs=0.01)
    assert "as often as the flush allows" in advice["interval"].why
    long = advise(**GPT3, step_seconds=5000)
    assert long.interval_steps == 1


# -- the size of a state --------------------------------------------------------------------------


class Pair(NamedTuple):
    first: object


class Fixed:
    nbytes = 7


@flax.struct.dataclass
class Struct:
    w: object
    fixed: object = flax.struct.field(pytree_node=False)  # no part of the tree


def test_the_size_of_a_state_is_that_of_its_arrays():
    params = {"w": np.zeros((4, 8), np.float32), "b": np.zeros(8, np.float64)}  # 128 + 64
    adam = optax.adam(1e-3).init({"w": jax.numpy.zeros((4, 8), jax.numpy.bfloat16)})  # 4 + 2 x 64
    state = {
        "params": params,
        "list": [np.int16(3), (1, "text", b"bytes", None, True, 2.5, 1j)],  # 2
        "opt": adam,
        "struct": Struct(jax.ShapeDtypeStruct((10, 10), np.float16), Fixed()),  # 200
        "pair": Pair(np.zeros(3, np.uint8)),  # 3
        "fn": math.sin,
    }
    assert figures.bytes_of(state) == 128 + 64 + 2 + 4 + 128 + 200 + 3
    assert figures.bytes_of(state) == sum(
        np.dtype(leaf.dtype).itemsize * math.prod(leaf.shape)
        for leaf in jax.tree.leaves(state)
        if hasattr(leaf, "dtype")
    )
    advice = advise(accelerators=1, state=state, flush_seconds=1)
    assert advice["state"].value == figures.bytes_of(state)


class Iterator:
    def get_state(self): ...
    def set_state(self, state): ...


def test_states_of_flax_keys_and_items_have_their_size():
    assert figures.bytes_of(jax.random.key(0)) == jax.random.key_data(jax.random.key(0)).nbytes
    params = {"w": np.zeros((4, 8), np.float32), "b": np.float64(1)}
    made = train_state.TrainState.create(apply_fn=math.sin, params=params, tx=optax.sgd(1e-3))
    assert figures.bytes_of(made) == 4 * 4 * 8 + 8
    items = ckptmgr.Items(state=made, data=Iterator())
    assert figures.bytes_of(items) == 4 * 4 * 8 + 8
    model = nnx.state(nnx.Linear(4, 8, rngs=nnx.Rngs(0)))
    assert figures.bytes_of(model) == 4 * (4 * 8 + 8)


def test_a_state_that_is_not_known_says_what_to_pass_instead():
    class Strange:
        pass

    with pytest.raises(InvalidOption) as caught:
        advise(accelerators=1, state={"a": [Strange()]}, flush_seconds=1)
    assert str(caught.value) == (
        "state: what a Strange holds is not known here; pass jax.tree.leaves(state) instead"
    )
    with pytest.raises(InvalidOption, match="state holds no array, so there is nothing to save"):
        advise(accelerators=1, state={"a": 1}, flush_seconds=1)


# -- what is refused ------------------------------------------------------------------------------

SIZED = {"accelerators": 8, "state_bytes": 1e9, "flush_seconds": 10}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"accelerators": 0}, "accelerators must be a whole number from 1 to 1,000,000,000, got 0"),
        ({"accelerators": 8.5}, "accelerators must be a whole number"),
        ({"accelerators": True}, "accelerators must be a whole number"),
        ({"accelerators": 10**400}, "accelerators must be a whole number"),
        ({"hosts": -1}, "hosts must be a whole number"),
        ({"keep_last": 0}, "keep_last must be a whole number"),
        ({"heartbeat_every_saves": 0}, "heartbeat_every_saves must be a whole number"),
        (
            {"state_bytes": None},
            "the size needs one of params, state_bytes and state, and only one",
        ),
        ({"params": 1e9}, "the size needs one of params, state_bytes and state, and only one"),
        ({"state_bytes": -1}, "state_bytes must be a positive number, got -1"),
        ({"state_bytes": "1e9"}, "state_bytes must be a positive number, got '1e9'"),
        ({"bytes_per_param": 0}, "bytes_per_param must be a positive number, got 0"),
        ({"flush_seconds": None}, "the time of a save needs write_bytes_per_second, or a measured"),
        ({"flush_seconds": math.nan}, "flush_seconds must be a positive number, got nan"),
        ({"write_bytes_per_second": 0}, "write_bytes_per_second must be a positive number, got 0"),
        ({"read_bytes_per_second": 0}, "read_bytes_per_second must be a positive number, got 0"),
        ({"restore_seconds": 0}, "restore_seconds must be a positive number, got 0"),
        ({"step_seconds": 0}, "step_seconds must be a positive number, got 0"),
        ({"stall_seconds": -1}, "stall_seconds must be a number of at least 0, got -1"),
        ({"undetected_seconds": -1}, "undetected_seconds must be a number of at least 0, got -1"),
        (
            {"detect_and_restart_seconds": None},
            "detect_and_restart_seconds must be a number of at least 0, got None",
        ),
        (
            {"mean_seconds_between_failures": math.inf},
            "mean_seconds_between_failures must be a positive number, got inf",
        ),
        (
            {"failures_per_accelerator_day": 0},
            "failures_per_accelerator_day must be a positive number, got 0",
        ),
        (
            {"failures_per_accelerator_day": 1e-320},
            "the time between failures that follows must be a positive number, got inf",
        ),
        (
            {"interval_seconds": 10},
            "interval_seconds must be longer than the 10.1 s that a save stops training, got 10",
        ),
        ({"run_days": 0}, "run_days must be a positive number, got 0"),
        ({"keep_every_seconds": 0}, "keep_every_seconds must be a positive number, got 0"),
        (
            {"mode": "fast"},
            "mode must be one of None, 'sync', 'copy_on_write', 'double_buffer'; got",
        ),
        ({"mode": []}, "mode must be one of"),
        ({"job": "vision"}, "job must be one of 'training', 'llm', 'rl'; got 'vision'"),
    ],
)
def test_what_cannot_be_used_is_one_sentence(changes, message):
    with pytest.raises(InvalidOption) as caught:
        advise(**{**SIZED, **changes})
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_numbers_of_numpy_are_numbers():
    advice = advise(
        accelerators=np.int64(8), state_bytes=np.int32(10**9), flush_seconds=np.float32(9)
    )
    assert advice["flush"].value == 9
    assert isinstance(advice["state"].value, float)


def test_an_advice_is_a_value():
    advice = advise(**SIZED)
    assert advice == advise(**SIZED)
    assert isinstance(advice, ckptmgr.Advice)
    with pytest.raises(dataclasses.FrozenInstanceError):
        advice.mode = "sync"
    assert all(
        parameter.kind is inspect.Parameter.KEYWORD_ONLY
        for parameter in inspect.signature(advise).parameters.values()
    )
