"""A step opens on any mesh, on any number of devices, with and without a target."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import ckptmgr
from tests.support import run_python, trees

RNG = np.random.default_rng(5)
HOST = {
    "w": RNG.standard_normal((16, 8)).astype(np.float32),
    "both": RNG.integers(0, 2**16, (16, 3), np.uint16).view(jnp.bfloat16.dtype),
    "b": RNG.integers(-100, 100, 8).astype(np.int8),
    "r": RNG.standard_normal((5, 7)).astype(np.float32),
    "zero": np.zeros((0, 8), np.float32),
    "scalar": np.float32(3),
}
SPECS = {
    "w": P("data", "model"),
    "both": P(("data", "model")),
    "b": P("model"),
    "r": P(),
    "zero": P(None, "data"),
    "scalar": P(),
}


def grid(*size, names=("data", "model"), first=0):
    count = int(np.prod(size))
    return Mesh(np.array(jax.devices()[first : first + count]).reshape(size), names)


def placed(mesh, specs=SPECS):
    tree = {name: jax.device_put(HOST[name], NamedSharding(mesh, specs[name])) for name in HOST}
    keys = jax.random.wrap_key_data(np.arange(32, dtype=np.uint32).reshape(16, 2))
    tree["key"] = jax.device_put(
        keys, NamedSharding(mesh, P(specs["w"][0] if specs["w"] else None))
    )
    return tree


@pytest.fixture(params=[None, 100], ids=["whole", "cut"])
def root(tmp_path, mesh42, request):
    """A step saved on 4x2 devices, in few chunks or in many."""
    storage = ckptmgr.Storage(chunk_bytes=request.param) if request.param else ckptmgr.Storage()
    trees.save(tmp_path, placed(mesh42), storage=storage)
    return tmp_path


@pytest.mark.parametrize(
    "size",
    [(4, 2), (2, 4), (8, 1), (1, 8), (2, 2), (1, 1), (1, 2)],
    ids=lambda s: "x".join(map(str, s)),
)
def test_a_step_of_4x2_devices_opens_on_another_mesh(root, size):
    mesh = grid(*size)
    wanted = placed(mesh)
    back = ckptmgr.restore(root, trees.abstract(wanted))
    trees.assert_same_tree(back, wanted)
    trees.assert_same_placement(back, wanted)
    for name, host in HOST.items():
        for shard in back[name].addressable_shards:
            trees.assert_same_values(np.asarray(shard.data), np.asarray(host[shard.index]))


def test_a_step_opens_with_other_partitions_and_on_other_devices(root, mesh8):
    swapped = {
        "w": P("model", "data"),
        "both": P("model"),
        "b": P(("model", "data")),
        "r": P(),
        "zero": P(),
        "scalar": P(),
    }
    everywhere = dict.fromkeys(SPECS, P())
    for mesh, specs in (
        (grid(2, 4), swapped),
        (grid(4, 2), everywhere),
        (grid(2, 2, first=4), SPECS),
    ):
        wanted = placed(mesh, specs)
        back = ckptmgr.restore(root, trees.abstract(wanted))
        trees.assert_same_tree(back, wanted)
        trees.assert_same_placement(back, wanted)
    single = SingleDeviceSharding(jax.devices()[7])
    like = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=single) for name, x in wanted.items()
    }
    back = ckptmgr.restore(root, like)
    trees.assert_same_leaves(back, wanted)
    assert all(leaf.sharding == single for leaf in back.values())


@pytest.mark.parametrize(
    "size", [(4, 2), (2, 4), (8, 1), (2, 2)], ids=lambda s: "x".join(map(str, s))
)
def test_a_mesh_alone_brings_the_saved_axes_onto_it(root, size):
    mesh = grid(*size)
    back = ckptmgr.restore(root, mesh=mesh)
    wanted = placed(mesh)
    trees.assert_same_leaves(back, wanted)
    for name, leaf in back.items():
        assert leaf.sharding.is_equivalent_to(wanted[name].sharding, leaf.ndim), name
        assert leaf.sharding.mesh == mesh
    assert ckptmgr.plan_restore(root, mesh=mesh).notes == ()


def test_an_axis_that_is_missing_or_does_not_divide_is_replicated_and_told(tmp_path, mesh42):
    tree = {
        "w": jax.device_put(
            np.arange(32.0, dtype=np.float32).reshape(4, 8),
            NamedSharding(mesh42, P("data", "model")),
        ),
        "six": jax.device_put(np.arange(4.0, dtype=np.float32), NamedSharding(mesh42, P("data"))),
        "both": jax.device_put(
            np.arange(8, dtype=np.int32), NamedSharding(mesh42, P(("data", "model")))
        ),
        "key": jax.device_put(
            jax.random.wrap_key_data(np.zeros((4, 2), np.uint32)), NamedSharding(mesh42, P("data"))
        ),
        "np": np.arange(3),
        "s": "text",
    }
    trees.save(tmp_path, tree)
    lacks = Mesh(np.array(jax.devices()), ("data",))
    back = ckptmgr.restore(tmp_path, mesh=lacks)
    trees.assert_same_leaves(back, tree)
    assert back["w"].sharding.is_equivalent_to(NamedSharding(lacks, P()), 2)
    assert back["both"].sharding.is_equivalent_to(NamedSharding(lacks, P("data")), 1)
    assert type(back["np"]) is np.ndarray and back["s"] == "text"
    assert ckptmgr.plan_restore(tmp_path, mesh=lacks).notes == (
        "mesh axis 'model' is not in the new mesh, replicated: both, w",
        "mesh axis 'data' of size 8 does not divide 4, replicated: key, six, w",
    )


def test_plan_restore_counts_as_a_hand_count_does(tmp_path, mesh42):
    # w: 64x16 f32 = 4096 bytes, 1/8 a device, in chunks of a shard: 16x8 f32 = 512 bytes.
    # r: 16 f32 = 64 bytes on every device. k: 8 bytes of key words. n: 24 bytes. s: nothing.
    tree = {
        "w": jax.device_put(
            np.zeros((64, 16), np.float32), NamedSharding(mesh42, P("data", "model"))
        ),
        "r": jax.device_put(np.zeros(16, np.float32), NamedSharding(mesh42, P())),
        "k": jax.device_put(jax.random.key(0), NamedSharding(mesh42, P())),
        "n": np.zeros(3),
        "s": "text",
    }
    trees.save(tmp_path, tree, storage=ckptmgr.Storage(chunk_bytes=512))
    chunks = {leaf.dotted: leaf.chunk for leaf in ckptmgr.describe(tmp_path).leaves["default"]}
    assert chunks["w"] == (16, 8) and chunks["r"] == (16,)
    plan = ckptmgr.plan_restore(tmp_path, tree)
    assert plan.wanted_bytes == plan.read_bytes == 4096 + 64 + 8 + 24
    assert plan.target_bytes == 4096 + 8 * 64 + 8 * 8 + 24
    assert plan.over_read == 1.0 and plan.notes == ()
    assert len(plan.units) == 8 + 1 + 1 + 1
    half = {
        "w": jax.ShapeDtypeStruct((64, 16), jnp.float32, sharding=NamedSharding(mesh42, P("data")))
    }
    plan = ckptmgr.plan_restore(tmp_path, half, partial=True)
    assert (plan.wanted_bytes, plan.read_bytes, plan.target_bytes) == (4096, 4096, 2 * 4096)
    plan = ckptmgr.plan_restore(tmp_path)
    assert plan.wanted_bytes == plan.target_bytes == 4096 + 64 + 8 + 24


def test_a_leaf_large_enough_to_be_read_per_shard_is_read_once_and_right(tmp_path, mesh42):
    wide = np.arange(2**19, dtype=np.float32).reshape(512, 1024)  # 2 MiB: above the limit
    tree = {"w": jax.device_put(wide, NamedSharding(mesh42, P("data", "model")))}
    trees.save(tmp_path, tree, storage=ckptmgr.Storage(chunk_bytes=2**17))
    for mesh, spec in (
        (grid(2, 4), P("model", "data")),
        (grid(4, 2), P()),
        (grid(8, 1), P(None, "data")),
    ):
        sharding = NamedSharding(mesh, spec)
        like = {"w": jax.ShapeDtypeStruct(wide.shape, wide.dtype, sharding=sharding)}
        plan = ckptmgr.plan_restore(tmp_path, like)
        assert plan.wanted_bytes == plan.read_bytes == wide.nbytes
        copies = 8 * np.prod(sharding.shard_shape(wide.shape)) * 4
        assert plan.target_bytes == copies
        back = ckptmgr.restore(tmp_path, like)["w"]
        for shard in back.addressable_shards:
            assert np.array_equal(shard.data, wide[shard.index])


def test_a_step_of_eight_devices_opens_on_one_device_without_knowing_the_mesh(tmp_path, mesh42):
    tree = placed(mesh42)
    trees.save(tmp_path, tree)
    host = {name: trees.bits(leaf).tolist() for name, leaf in tree.items()}
    run_python(
        """
        import json, sys
        import jax, numpy as np
        import ckptmgr
        from tests.support import trees

        root, host = sys.argv[1], json.loads(sys.argv[2])
        assert len(jax.devices()) == 1
        plain = ckptmgr.restore(root)
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), plain)
        one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        there = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=one), plain)
        mesh = jax.make_mesh((1, 1), ("data", "model"))
        ways = [plain, ckptmgr.restore(root, like), ckptmgr.restore(root, there),
                ckptmgr.restore(root, mesh=mesh)]
        for tree in ways:
            assert {name: trees.bits(leaf).tolist() for name, leaf in tree.items()} == host
        assert all(type(leaf) is np.ndarray for name, leaf in plain.items() if name != "key")
        assert all(leaf.devices() == {jax.devices()[0]} for leaf in ways[1].values())
        """,
        tmp_path,
        json.dumps(host),
        env={"XLA_FLAGS": "--xla_force_host_platform_device_count=1"},
    )
