"""Every compression keeps every bit and every proof; "auto" chooses by what it measures."""

import logging

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ckptmgr
from ckptmgr.core.compression import CODECS
from ckptmgr.engine.store import Store
from ckptmgr.errors import CorruptCheckpoint, InvalidOption
from ckptmgr.reading import open_path
from ckptmgr.testing import Fault, FaultyStore, Hold
from tests.support import trees
from tests.support.slow import SlowStore

LIMIT = 60.0
CHOICES = [None, *CODECS]
FORMATS = [(driver, name) for driver in ("zarr", "zarr3") for name in CHOICES]
IDS = [f"{driver} {name}" for driver, name in FORMATS]


def host(number=0):
    """Values that compress, values that do not, and of every width."""
    rng = np.random.default_rng(number)
    return {
        "f32": rng.standard_normal((128, 64), np.float32),
        "bf16": rng.standard_normal((128, 64)).astype(ml_dtypes.bfloat16),
        "int8": rng.integers(-128, 128, (128, 3), np.int8),
        "bool": rng.integers(0, 2, (64, 8)).astype(bool),
        "int4": rng.integers(-8, 8, (8, 3)).astype(ml_dtypes.int4),
        "complex": (rng.standard_normal(8) + 1j).astype(np.complex64),
        "zeros": np.zeros((256, 64), np.float32),
        "ramp": np.arange(8 * 1001, dtype=np.int32).reshape(8, 1001),
        "scalar": np.float32(number + 0.1),
        "empty": np.zeros((0, 8), np.float32),
        "number": number,
    }


SPECS = {
    "f32": P("data", "model"), "bf16": P("model", "data"), "zeros": P(("data", "model")),
    "int8": P("data"), "ramp": P("data"),
}  # fmt: skip


def on(mesh, tree):
    return {
        name: jax.device_put(value, NamedSharding(mesh, SPECS.get(name, P())))
        if isinstance(value, np.ndarray | np.generic)
        else value
        for name, value in tree.items()
    }


def options(driver="zarr", compression=None, chunk_bytes=2**14, **rest):
    storage = ckptmgr.Storage(driver=driver, compression=compression, chunk_bytes=chunk_bytes)
    return ckptmgr.Options(storage=storage, **rest)


def compression_of(root, step):
    return open_path(root, step).items["default"].tree.compression


@pytest.mark.parametrize(("driver", "name"), FORMATS, ids=IDS)
def test_every_bit_comes_back_on_any_mesh_and_verifies(tmp_path, mesh42, mesh8, driver, name):
    wanted = host(3)
    tree = on(mesh42, wanted)
    with ckptmgr.CheckpointManager(tmp_path, options(driver, name)) as manager:
        manager.save(3, tree).result(LIMIT)
        trees.assert_same_tree(manager.restore(tree), tree)
        assert manager.verify(3) == ()
    trees.assert_same_leaves(ckptmgr.restore(tmp_path), wanted)
    turned = jax.sharding.Mesh(np.array(jax.devices()[:6]).reshape(2, 3), ("model", "data"))
    like = {
        name: jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=NamedSharding(turned, P()))
        if isinstance(value, np.ndarray | np.generic)
        else value
        for name, value in wanted.items()
    }
    like["f32"] = jax.ShapeDtypeStruct(
        (128, 64), "float32", sharding=NamedSharding(turned, P("model"))
    )
    with ckptmgr.CheckpointManager(tmp_path) as manager:
        back = manager.restore(like)
    trees.assert_same_leaves(back, wanted)
    assert back["f32"].sharding == like["f32"].sharding
    assert ckptmgr.verify(tmp_path, from_storage=True).verified


@pytest.mark.parametrize(("driver", "name"), FORMATS, ids=IDS)
def test_a_heartbeat_is_read_back_and_audited(tmp_path, mesh42, driver, name):
    tree = on(mesh42, host(1))
    beats = options(driver, name, heartbeat=ckptmgr.Heartbeat(every_saves=1))
    with ckptmgr.CheckpointManager(tmp_path, beats) as manager:
        info = manager.save(1, tree).result(LIMIT)
        assert (info.kind, info.verified) == ("heartbeat", True)
        trees.assert_same_tree(manager.restore(tree), tree)


@pytest.mark.parametrize(("driver", "name"), FORMATS, ids=IDS)
def test_damage_of_a_chunk_is_found(tmp_path, driver, name):
    tree = {"w": np.random.default_rng(0).standard_normal((64, 64), np.float32)}
    with ckptmgr.CheckpointManager(tmp_path, options(driver, name)) as manager:
        manager.save(1, tree).result(LIMIT)
    files = (tmp_path / "1" / "default" / "ocdbt.process_0" / "d").iterdir()
    file = max(files, key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    assert not ckptmgr.verify(tmp_path, 1).good
    with pytest.raises(CorruptCheckpoint, match="w"):
        ckptmgr.restore(tmp_path)


@pytest.mark.parametrize("name", CODECS)
def test_the_step_is_smaller_and_says_how(tmp_path, name):
    tree = {"zeros": jnp.zeros((512, 512)), "ramp": jnp.arange(2**18)}
    with ckptmgr.CheckpointManager(
        tmp_path, options(compression=name, chunk_bytes=2**20)
    ) as manager:
        info = manager.save(1, tree).result(LIMIT)
    assert info.stored_bytes < info.nbytes / 2
    assert compression_of(tmp_path, 1) == name


@pytest.mark.parametrize("name", ["gzip", "Blosc", "blosc-bitshuffle", True, 3, ""])
def test_an_unknown_compression_is_refused_with_the_choices(name):
    with pytest.raises(InvalidOption) as refused:
        ckptmgr.Storage(compression=name)
    choices = "None, 'zstd', 'blosc', 'blosc_bitshuffle', 'auto'"
    assert str(refused.value) == f"Storage.compression must be one of {choices}; got {name!r}"


# -- "auto" -------------------------------------------------------------------------------------


def weights():
    values = np.random.default_rng(5).standard_normal(2**20, np.float32)
    return {f"layer {i}": part for i, part in enumerate(np.split(values.astype("bfloat16"), 8))}


def tokens():
    values = np.random.default_rng(5).integers(0, 32_000, 2**19).astype(np.int32)
    return {f"part {i}": part for i, part in enumerate(np.split(values, 4))}


def noise():
    return {"noise": np.random.default_rng(5).integers(0, 256, 2**21, np.uint8)}


def zeros():
    return {"zeros": np.zeros(2**19, np.float32), "ints": np.arange(2**18) // 1000}


def auto(root, store, events=(), **rest):
    """A manager that chooses; on a slow store by the store's time."""
    rest.setdefault("heartbeat", None)
    chosen = options(compression="auto", chunk_bytes=2**18, **rest)
    clock = getattr(store, "clock", None)
    return ckptmgr.CheckpointManager(root, chosen, store=store, clock=clock, events=[*events])


def save_all(manager, steps, state, **how):
    for step in steps:
        manager.save(step, state, **how).result(LIMIT)
        manager.wait()


def chosen_of(events):
    return [event for event in events if event.phase == "compression"]


@pytest.mark.parametrize("mode", ["copy_on_write", "double_buffer", "sync"])
@pytest.mark.parametrize(
    ("make", "wanted"),
    [
        (weights, {"zstd", "blosc_bitshuffle"}),
        (tokens, {"blosc_bitshuffle"}),
        (zeros, set(CODECS)),
        (noise, {None}),
    ],
    ids=["weights", "tokens", "zeros", "noise"],
)
def test_on_a_slow_disk_auto_takes_what_makes_later_saves_shorter(
    tmp_path, make, wanted, mode, caplog
):
    events, state = [], make()
    snapshot = ckptmgr.Snapshot(mode=mode)
    with caplog.at_level(logging.INFO, logger="ckptmgr"):
        with auto(
            tmp_path, SlowStore(tmp_path, 2e6), [events.append], snapshot=snapshot
        ) as manager:
            save_all(manager, range(3), state)
            infos = manager.steps()
    found = [compression_of(tmp_path, step) for step in range(3)]
    assert found[0] is None  # is stored plainly, and measured
    assert found[1] in wanted and found[2] == found[1]
    (event,) = chosen_of(events)
    assert event.step == 0
    assert event.detail.startswith(f"compression: {found[1] or 'none'}; the disk writes ")
    assert [r.message for r in caplog.records if "compression" in r.message] == [event.detail]
    assert (infos[1].stored_bytes < 0.9 * infos[0].stored_bytes) == (found[1] is not None)
    for step in range(3):
        trees.assert_same_leaves(ckptmgr.restore(tmp_path, step=step), state)
    assert list((tmp_path / "_ckptmgr" / "trash").iterdir()) == []


def test_auto_leaves_a_fast_disk_uncompressed(tmp_path):
    store = SlowStore(tmp_path, 1e12)
    with auto(tmp_path, store) as manager:
        save_all(manager, range(2), {"big": np.zeros(100, np.float32)})
    assert [compression_of(tmp_path, step) for step in range(2)] == [None, None]


def test_saving_goes_on_while_the_first_save_is_measured(tmp_path):
    hold = Hold(lambda operation: "probe-" in operation.path)
    events = []
    with auto(tmp_path, FaultyStore(Store(str(tmp_path)), [hold]), [events.append]) as manager:
        manager.save(0, zeros()).result(LIMIT)
        assert hold.reached.wait(LIMIT)
        manager.save(1, zeros()).result(LIMIT)
        assert manager.latest_step() == 1 and not chosen_of(events)
        hold.release()
        manager.wait()
    assert len(chosen_of(events)) == 1
    assert [compression_of(tmp_path, step) for step in range(2)] == [None, None]


@pytest.mark.parametrize("effect", ["none", "full"])
@pytest.mark.parametrize("operation", ["write_file", "sync_path", "remove_file"])
def test_a_probe_that_fails_fails_no_save(tmp_path, operation, effect, caplog):
    fault = Fault(lambda o: o.name == operation and "probe-" in o.path, effect=effect)
    events = []
    with auto(tmp_path, FaultyStore(Store(str(tmp_path)), [fault]), [events.append]) as manager:
        save_all(manager, range(3), zeros())
        assert len(manager.steps()) == 3
    (event,) = chosen_of(events)
    assert event.detail.startswith("compression: none; it could not be measured (")
    assert event.detail in [r.message for r in caplog.records if r.levelname == "WARNING"]
    assert [compression_of(tmp_path, step) for step in range(3)] == [None] * 3


def test_a_step_that_is_gone_before_it_is_measured_fails_no_save(tmp_path):
    hold = Hold(lambda operation: "probe-" in operation.path)
    events = []
    with auto(tmp_path, FaultyStore(Store(str(tmp_path)), [hold]), [events.append]) as manager:
        manager.save(0, zeros()).result(LIMIT)
        assert hold.reached.wait(LIMIT)
        trees_gone = tmp_path / "0"
        trees_gone.rename(tmp_path / "elsewhere")
        hold.release()
        manager.wait()
        save_all(manager, [1], zeros())
    assert "could not be measured" in chosen_of(events)[0].detail
    assert compression_of(tmp_path, 1) is None


def test_what_has_no_data_and_what_is_waited_for_is_not_measured(tmp_path):
    events = []
    with auto(tmp_path, SlowStore(tmp_path, 2e6), [events.append]) as manager:
        save_all(manager, [0], {"text": "no arrays"})
        save_all(manager, [1], zeros(), sync=True)
        assert not chosen_of(events)
        save_all(manager, [2, 3], zeros())
    assert [event.step for event in chosen_of(events)] == [2]
    assert [compression_of(tmp_path, step) for step in range(4)][:3] == [None] * 3
    assert compression_of(tmp_path, 3) in CODECS


def test_auto_measures_heartbeats_where_every_save_is_one(tmp_path):
    beats = ckptmgr.Heartbeat(every_saves=1)
    with auto(tmp_path, SlowStore(tmp_path, 2e6), heartbeat=beats) as manager:
        save_all(manager, range(2), tokens())
        assert manager.verify(1) == ()
    assert compression_of(tmp_path, 1) == "blosc_bitshuffle"


def test_auto_changes_over_in_all_items_and_structures(tmp_path):
    def items(kind):
        return ckptmgr.Items(first=tokens(), second=kind())

    with auto(tmp_path, SlowStore(tmp_path, 2e6)) as manager:
        save_all(manager, [0], items(tokens))
        save_all(manager, [1], items(tokens))
        save_all(manager, [2], items(zeros))
    for step, wanted in ((0, {None}), (1, {"blosc_bitshuffle"}), (2, {"blosc_bitshuffle"})):
        opened = open_path(tmp_path, step)
        assert {item.tree.compression for item in opened.items.values()} == wanted
        assert ckptmgr.verify(tmp_path, step).good
