"""What a stranger broke in the structure cache, the kept buffers, heartbeats and interrupts."""

import enum
import os
import threading

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import ckptmgr
from ckptmgr import AuditFailed, Heartbeat, Options, SaveFailed, Snapshot
from ckptmgr.engine import snapshot as engine_snapshot
from ckptmgr.engine.snapshot import Stager
from ckptmgr.events import Clock
from ckptmgr.testing import TornStager
from tests.support import run_python
from tests.support.trees import assert_same_leaves

MODES = ("sync", "copy_on_write", "double_buffer")
QUIET = Options(heartbeat=None)


def options(mode, **rest):
    return Options(snapshot=Snapshot(mode=mode, **rest), heartbeat=None)


# -- structures that are looked up --------------------------------------------------------------

NARROW = ("int4", "uint4", "float8_e4m3fn", "float8_e3m4", "float8_e8m0fnu", "float4_e2m1fn")


@pytest.mark.parametrize("mode", MODES)
def test_host_leaves_of_one_shape_and_different_narrow_types_keep_their_own_values(tmp_path, mode):
    def tree(k):
        return {name: np.full(8, 1 + k % 2, getattr(ml_dtypes, name)) for name in NARROW}

    with ckptmgr.CheckpointManager(tmp_path, options(mode)) as manager:
        for k in range(4):
            manager.save(k, tree(k))
            manager.wait()
        for k in range(4):
            assert_same_leaves(manager.restore(step=k), tree(k))


@pytest.mark.parametrize("kind", [np.str_, np.bytes_, str, bytes])
def test_text_and_bytes_of_every_class_are_those_of_their_own_save(tmp_path, kind):
    texts = ["red", "green", "b", ""]
    values = [kind(t.encode()) if issubclass(kind, bytes) else kind(t) for t in texts]
    with ckptmgr.CheckpointManager(tmp_path, QUIET) as manager:
        for k, value in enumerate(values):
            manager.save(k, {"phase": value, "x": np.arange(3.0)})
        manager.wait()
        for k, value in enumerate(values):
            assert manager.restore(step=k)["phase"] == value


class Name(str, enum.Enum):  # noqa: UP042  its text is not its value
    A = "a"


def test_dict_keys_that_are_equal_and_of_other_types_are_kept_apart(tmp_path):
    x = np.arange(3.0)
    trees = [{1: x}, {True: x}, {1.0: x}, {"a": x}, {Name.A: x}, {1: x}]
    with ckptmgr.CheckpointManager(tmp_path, QUIET) as manager:
        for k, tree in enumerate(trees):
            manager.save(k, tree)
        manager.wait()
        for k, tree in enumerate(trees):
            manager.restore(tree, step=k)
        for k, tree in enumerate(trees[:4]):
            (key,) = manager.restore(step=k)
            assert type(key) is type(next(iter(tree)))


# -- gathered arrays and kept buffers -----------------------------------------------------------


@pytest.mark.parametrize("where", ["the first device", "another device", "replicated"])
@pytest.mark.parametrize("guard", ["allow", "disallow"])
def test_small_arrays_are_gathered_into_kept_buffers_wherever_they_lie(tmp_path, where, guard):
    places = {
        "the first device": jax.devices()[0],
        "another device": jax.devices()[3],
        "replicated": jax.NamedSharding(jax.make_mesh((8,), ("x",)), jax.P()),
    }
    snapshot = Snapshot(mode="double_buffer")
    stager = Stager(snapshot)
    chosen = Options(snapshot=snapshot, heartbeat=None)

    def tree(k):
        return {
            f"a{i}": jax.device_put(np.arange(10, dtype="f4") + i + k, places[where])
            for i in range(300)
        }

    with ckptmgr.CheckpointManager(tmp_path, chosen, stager=stager) as manager:
        for k in range(4):
            state = tree(k)
            with jax.transfer_guard(guard):
                manager.save(k, state)
            manager.wait()
            stager.programs.wait()
        for k in range(4):
            assert_same_leaves(manager.restore(step=k), tree(k))
    programs = list(stager.programs._compiled.values())
    assert programs and all(program is not None for program in programs)


@pytest.mark.parametrize(("leaves", "programs"), [(7, 0), (8, 1)])  # waves alike share one
def test_the_small_arrays_of_each_wave_are_gathered_from_64_pieces_on(
    tmp_path, monkeypatch, leaves, programs
):
    monkeypatch.setattr(engine_snapshot, "WAVE_BYTES", leaves * 8 * 1024)
    over_all = jax.NamedSharding(jax.make_mesh((8,), ("x",)), jax.P("x"))
    stager = Stager(Snapshot())

    def tree(k):
        return {
            f"a{i:02d}": jax.device_put(np.arange(2048, dtype="f4") + i + k, over_all)
            for i in range(3 * leaves)
        }

    with ckptmgr.CheckpointManager(tmp_path, QUIET, stager=stager) as manager:
        for k in range(3):
            manager.save(k, tree(k))
            manager.wait()
            stager.programs.wait()
        for k in range(3):
            assert_same_leaves(manager.restore(step=k), tree(k))
    made = list(stager.programs._compiled.values())
    assert len(made) == programs and None not in made


def test_kept_buffers_stay_within_the_bound_on_host_memory(tmp_path):
    stager = Stager(Snapshot(mode="double_buffer", host_bytes=10_000))
    chosen = options("double_buffer", host_bytes=10_000)
    with ckptmgr.CheckpointManager(tmp_path, chosen, stager=stager) as manager:
        manager.save(0, {"a": np.zeros(1_000_000)})
        manager.wait()
        assert stager.memory.held == 0


def test_a_heartbeat_frees_no_buffers_of_the_saves_around_it(tmp_path):
    snapshot = Snapshot(mode="double_buffer")
    stager = Stager(snapshot)
    chosen = Options(snapshot=snapshot, heartbeat=Heartbeat(every_saves=3, audit=False))
    with ckptmgr.CheckpointManager(tmp_path, chosen, stager=stager) as manager:
        held = []
        for k in range(6):
            manager.save(k, {"a": jnp.full(1000, k)})
            manager.wait()
            held.append(stager.memory.held)
    assert held == [held[0]] * 6 and held[0] > 0 and stager.memory.held == 0


# -- heartbeats ---------------------------------------------------------------------------------


class Turned(Clock):
    off = 0.0

    def time(self):
        return super().time() + self.off


def test_a_clock_that_went_back_hides_no_suspect(tmp_path):
    clock = Turned()
    chosen = Options(heartbeat=Heartbeat(every_saves=3))
    stager = TornStager(chosen.snapshot, "x")
    stager.armed = False
    with ckptmgr.CheckpointManager(tmp_path, chosen, clock=clock, stager=stager) as manager:
        for step in range(3):
            manager.save(step, {"x": jnp.arange(1000.0)})
        clock.off, stager.armed = -3600.0, True
        for step in (3, 4):
            manager.save(step, {"x": jnp.arange(1000.0)})
        with pytest.raises(SaveFailed) as caught:
            manager.save(5, {"x": jnp.arange(1000.0)})
        assert caught.value.__cause__.suspects == (3, 4)
        assert manager.restore_latest(None).step == 2


def test_the_count_goes_on_after_a_restart_whatever_the_numbers_of_the_steps(tmp_path):
    kinds = []
    for step in (100, 1, 2, 99, 3, 50):
        with ckptmgr.CheckpointManager(
            tmp_path, Options(heartbeat=Heartbeat(every_saves=3))
        ) as manager:
            kinds.append(manager.save(step, {"x": 1}).result().kind)
    assert kinds == ["async", "async", "heartbeat"] * 2


@pytest.mark.parametrize("broken", [b"", b'{"attempt": "', b"[" * 100_000, b"[]", None])
def test_a_suspect_whose_record_is_broken_stays_one_until_it_is_saved_again(tmp_path, broken):
    chosen = Options(heartbeat=Heartbeat(every_saves=2))
    stager = TornStager(chosen.snapshot, "x")
    with ckptmgr.CheckpointManager(tmp_path, chosen, stager=stager) as manager:
        manager.save(1, {"x": jnp.arange(10.0)})
        with pytest.raises(SaveFailed):
            manager.save(2, {"x": jnp.arange(10.0)})
        record = tmp_path / "_ckptmgr" / "suspect" / "1.json"
        record.unlink()
        record.mkdir() if broken is None else record.write_bytes(broken)
        assert [info.status for info in manager.steps()] == ["suspect"]
        with pytest.raises(SaveFailed) as caught:
            manager.save(2, {"x": jnp.arange(10.0)})
        assert isinstance(caught.value.__cause__, AuditFailed)
        stager.armed = False
        manager.save(1, {"x": jnp.arange(10.0)}, overwrite=True)
        assert [info.status for info in manager.steps()] == ["good"]


# -- interrupts and exit --------------------------------------------------------------------------


def test_an_interrupt_while_the_thread_starts_leaves_nothing_that_anybody_waits_for(
    tmp_path, monkeypatch
):
    real = threading.Thread.start

    def start(thread):
        real(thread)
        if thread.name == "ckptmgr-save-0":
            raise KeyboardInterrupt

    with ckptmgr.CheckpointManager(tmp_path, QUIET) as manager:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", start)
            with pytest.raises(KeyboardInterrupt):
                manager.save(0, {"x": jnp.arange(3.0)})
        assert manager.saves_in_flight == 0
        manager.save(0, {"x": jnp.arange(3.0)})
    for thread in threading.enumerate():
        if thread.name == "ckptmgr-save-0":
            thread.join(30)
            assert not thread.is_alive()


def test_an_interrupt_before_the_work_is_handed_over_leaves_no_save_in_flight(tmp_path):
    def interrupt(event):
        if event.phase == "order":
            raise KeyboardInterrupt

    with ckptmgr.CheckpointManager(tmp_path, QUIET, events=[interrupt]) as manager:
        with pytest.raises(KeyboardInterrupt):
            manager.save(0, {"x": jnp.arange(3.0)})
        assert manager.saves_in_flight == 0 and manager.steps() == ()
        manager.wait()


AT_EXIT = """
import atexit, sys
import jax.numpy as jnp
import ckptmgr
manager = ckptmgr.CheckpointManager(sys.argv[1], ckptmgr.Options(heartbeat=None))
x = jnp.arange(100_000.0)
manager.save(0, {"x": x}).result()
atexit.register(lambda: print("saved", manager.save(1, {"x": x}).result().step, flush=True))
atexit.register(lambda: print("asked", manager.save(2, {"x": x}).accepted, flush=True))
manager.save(3, {"x": x})
"""


def test_saves_of_the_users_own_exit_handlers_are_there(tmp_path):
    done = run_python(AT_EXIT, tmp_path)
    assert done.stdout.splitlines() == ["asked True", "saved 1"]
    with ckptmgr.CheckpointManager(tmp_path, Options(read_only=True)) as manager:
        assert [info.step for info in manager.steps()] == [0, 1, 2, 3]
    assert not [name for name in os.listdir(tmp_path) if "tmp" in name]
