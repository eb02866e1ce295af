"""The same values have the same leaf digest on every mesh, in every mode, with every chunk size."""

import json

import jax
import numpy as np
import pytest

import ckptmgr
from ckptmgr import Heartbeat, Integrity, Options, Snapshot, Storage
from ckptmgr.cli import main
from ckptmgr.core import leafdigest
from ckptmgr.core.boxes import whole

VALUES = {
    "w": np.arange(64 * 96, dtype=np.float32).reshape(64, 96),
    "b": np.arange(40, dtype=np.int8),
    "s": np.float32(2.5),
    "none": np.zeros((0, 8), np.float32),
}
SPECS = {"w": ("x", "y"), "b": ("x",)}


def on_mesh(shape, names):
    mesh = jax.make_mesh(shape, names)

    def place(name, value):
        spec = jax.P(*(axis for axis in SPECS.get(name, ()) if axis in names))
        return jax.device_put(value, jax.NamedSharding(mesh, spec))

    return {name: place(name, value) for name, value in VALUES.items()}


def digests(root, state, mode="copy_on_write", chunk_bytes=2**20, driver="zarr"):
    options = Options(
        snapshot=Snapshot(mode=mode),
        heartbeat=None,
        integrity=Integrity(leaf_digests=True),
        storage=Storage(chunk_bytes=chunk_bytes, driver=driver),
    )
    with ckptmgr.CheckpointManager(root, options) as manager:
        manager.save(1, state)
    return ckptmgr.describe(root).leaf_digests["default"]


def reference():
    found = {}
    for name, value in VALUES.items():
        array = np.asarray(value)
        sums = leafdigest.partial(array, whole(array.shape), array.shape)
        found[name] = leafdigest.finish(sums, array.dtype.name, array.shape)
    return found


def test_values_have_one_digest_whatever_mesh_mode_chunks_and_driver(tmp_path):
    cases = [
        (on_mesh((8,), ("x",)), {}),
        (on_mesh((2, 4), ("x", "y")), {"mode": "double_buffer"}),
        (on_mesh((1, 8), ("x", "y")), {"mode": "sync", "chunk_bytes": 1024}),
        (VALUES, {"driver": "zarr3", "chunk_bytes": 512}),
    ]
    for number, (state, how) in enumerate(cases):
        assert digests(tmp_path / str(number), state, **how) == reference(), how


def test_heartbeats_have_them_and_other_saves_only_on_request(tmp_path):
    options = Options(heartbeat=Heartbeat(every_saves=2))
    with ckptmgr.CheckpointManager(tmp_path, options) as manager:
        manager.save(1, VALUES)
        manager.save(2, VALUES)
    assert ckptmgr.describe(tmp_path, 1).leaf_digests == {}
    assert ckptmgr.describe(tmp_path, 2).leaf_digests == {"default": reference()}


def test_verify_takes_them_and_compares_them_where_they_were_recorded(tmp_path, capsys):
    digests(tmp_path, VALUES)
    assert ckptmgr.verify(tmp_path, leaf_digests=True).leaf_digests == {"default": reference()}
    assert ckptmgr.verify(tmp_path).leaf_digests == {}
    assert main(["verify", str(tmp_path), "--leaf-digests"]) == 0
    assert f"{reference()['w']}  default  w" in capsys.readouterr().out
    with ckptmgr.CheckpointManager(tmp_path, Options(heartbeat=None)) as manager:
        manager.save(2, VALUES)
        assert manager.verify(2, leaf_digests=True) == ()


def test_a_recorded_digest_that_does_not_fit_the_values_is_told(tmp_path, monkeypatch):
    digests(tmp_path, VALUES)
    real = leafdigest.finish
    monkeypatch.setattr(
        "ckptmgr.core.receipts.leafdigest.finish",
        lambda sums, dtype, shape: "0" * 32 if dtype == "int8" else real(sums, dtype, shape),
    )
    monkeypatch.setattr("ckptmgr.engine.readback.finish", real)
    (problem,) = ckptmgr.verify(tmp_path, leaf_digests=True).problems
    assert problem.leaf == "b" and "leaf digest" in problem.message and "0" * 32 in problem.message


def test_receipts_say_what_each_part_adds(tmp_path):
    digests(tmp_path, VALUES)
    receipt = json.loads((tmp_path / "1/default/ckptmgr/receipt.process_0.json").read_text())
    sums = {leaf: tuple(four) for leaf, four in receipt["sums"]}
    names = sorted(VALUES)
    array = np.asarray(VALUES["w"])
    assert sums[names.index("w")] == leafdigest.partial(array, whole(array.shape), array.shape)
    assert names.index("none") not in sums


@pytest.mark.parametrize("mode", ["copy_on_write", "double_buffer"])
def test_a_save_under_disable_jit_is_right_and_costs_no_program(tmp_path, mode):
    mesh = jax.make_mesh((8,), ("x",))
    rows = jax.NamedSharding(mesh, jax.P("x"))

    def tree(k):
        return {f"a{i}": jax.device_put(np.full(8, k + i, "f4"), rows) for i in range(60)}

    with ckptmgr.CheckpointManager(
        tmp_path, Options(snapshot=Snapshot(mode=mode), heartbeat=None)
    ) as manager:
        programs = manager._saves._stager.programs
        for k in range(5):
            with jax.disable_jit(k % 2 == 1):
                manager.save(k, tree(k))
            manager.wait()
            programs.wait()
        for k in range(5):
            found = manager.restore(step=k)
            assert all(np.array_equal(found[name], value) for name, value in tree(k).items())
        assert None not in programs._compiled.values()
