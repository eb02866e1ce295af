"""Stock Orbax restores every compression, bit for bit, and what it read is what zarr says."""

import json
import warnings

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ckptmgr
from ckptmgr.core.compression import CODECS
from tests.support import trees

FORMATS = [
    (driver, name, chunk_bytes)
    for driver in ("zarr", "zarr3")
    for name in (None, *CODECS)
    for chunk_bytes in (200, 2**24)
]
IDS = [f"{driver} {name} {chunk_bytes}" for driver, name, chunk_bytes in FORMATS]


@pytest.fixture(autouse=True)
def quiet():
    """Orbax warns on each restore without a target that shardings come from a file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


def host():
    rng = np.random.default_rng(2)
    return {
        "f32": rng.standard_normal((16, 24), np.float32),
        "bf16": rng.integers(0, 2**16, (16, 24), np.uint16).view(ml_dtypes.bfloat16),
        "int8": rng.integers(-128, 128, (8, 33), np.int8),
        "bool": rng.integers(0, 2, (16, 5)).astype(bool),
        "zeros": np.zeros((64, 8), np.float32),
        "scalar": np.float32(0.1),
        "bf16 scalar": np.asarray(-0.5, ml_dtypes.bfloat16),
        "flag": np.asarray(True),
    }


def on(mesh):
    def put(value):
        spec = P("data") if value.ndim else P()
        return jax.device_put(value, NamedSharding(mesh, spec))

    return {name: put(value) for name, value in host().items()}


@pytest.mark.parametrize(("driver", "name", "chunk_bytes"), FORMATS, ids=IDS)
def test_orbax_restores_every_compression(tmp_path, mesh42, driver, name, chunk_bytes):
    tree = on(mesh42)
    storage = ckptmgr.Storage(driver=driver, compression=name, chunk_bytes=chunk_bytes)
    trees.save(tmp_path, tree, step=2, storage=storage)
    with ocp.CheckpointManager(tmp_path) as manager:
        trees.assert_same_tree(manager.restore(2), tree)
    with ocp.CheckpointManager(tmp_path) as manager:
        target = ocp.args.StandardRestore(trees.abstract(tree))
        trees.assert_same_tree(manager.restore(2, args=target), tree)


@pytest.mark.parametrize("name", CODECS)
def test_zarr_says_what_the_chunks_are_packed_with(tmp_path, name):
    tree = {"bf16": host()["bf16"]}
    storage = ckptmgr.Storage(compression=name)
    item = trees.save(tmp_path / "2", tree, storage=storage) + "/default"
    storage = ckptmgr.Storage(driver="zarr3", compression=name)
    item3 = trees.save(tmp_path / "3", tree, storage=storage) + "/default"
    assert metadata(item, "bf16/.zarray")["compressor"] == CODECS[name]
    bytes_codec, packed = metadata(item3, "bf16/zarr.json")["codecs"]
    assert (bytes_codec["name"], packed["name"]) == ("bytes", CODECS[name]["id"])
    for setting in ("level", "cname", "clevel"):
        assert packed["configuration"].get(setting) == CODECS[name].get(setting)
    if packed["name"] == "blosc":
        shuffle = {"blosc": "shuffle", "blosc_bitshuffle": "bitshuffle"}[name]
        assert packed["configuration"]["shuffle"] == shuffle
        assert packed["configuration"]["typesize"] == 2


def metadata(item, key):
    base = {"driver": "file", "path": item + "/"}
    database = ts.KvStore.open({"driver": "ocdbt", "base": base}).result()
    return json.loads(database.read(key).result().value)
