"""What is written in blocks is, key for key and byte for byte, what TensorStore's arrays write."""

import itertools
import os
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ckptmgr
from ckptmgr import Heartbeat, Integrity, LeafRule, Options, Snapshot, Storage
from ckptmgr.core import layout, plan
from ckptmgr.core.manifest import StoredLeaf, StoredTree
from ckptmgr.engine import arrays, blocks, snapshot, staged, writing
from ckptmgr.testing import _trees
from tests.support import finish, start_python, trees

MODES = ["copy_on_write", "double_buffer", "sync"]
SAVES = 3
"""The first has nothing compiled; in the modes that compile the later ones have."""

LIMIT = blocks.PLAIN_BYTES


def alike(devices, each=2):
    """Rows of leaves that are alike, 128 in all, so that they are gathered and written together."""
    places = dict(itertools.islice(_trees.placements(devices).items(), 8))
    found = []
    for row, (name, (shape, sharding)) in enumerate(places.items()):
        for turn in range(8):
            dtype = _trees.DTYPES[(row + turn * 3) % len(_trees.DTYPES)]
            wide = (shape[0], shape[1] * (1 + turn % 2))
            found += [
                _trees.Kind(f"{name}{turn}{dtype}{i}", wide, dtype, sharding) for i in range(each)
            ]
    return found


def odd(devices):
    """What lies between them in the order of names, and what no block takes."""
    line = _trees.placements(devices)["sharded"][1]
    every = _trees.placements(devices)["replicated"][1]
    n = len(devices)
    shapes = {
        "a0-d": ((), "float32", every),
        "b0-d": ((), "int8", every),
        "columns3": ((8, 2 * n), "float32", line if n == 2 else every),
        "empty": ((0, 4), "float32", every),
        "replicated5b": ((3, 5), "bfloat16", every),
        "limit": ((LIMIT // 4,), "float32", every),
        "over": ((LIMIT // 4 + 8,), "float32", every),
        "sharded4": ((2 * n, 3000), "float32", line),
        "padded": ((n * 37, 11), "uint16", line),
        "prime": ((1009, 33), "float32", every),
    }
    # within a row of leaves that are alike, gathered with them, and too large for a block
    shapes["sharded0float320z"] = ((2 * n, 3 * LIMIT // 8), "float32", line)
    if n == 8:  # the same pieces, but on other devices
        _, _, mesh = _trees.meshes(tuple(devices))
        for i in range(10):
            spec = P(("a", "b")) if i % 2 else P(("b", "a"))
            shapes[f"order{i}"] = ((8, 8), "float32", NamedSharding(mesh, spec))
    return [_trees.Kind(name, *how) for name, how in shapes.items()]


def host(number):
    """Leaves that lie on no device, each of its kind."""
    found = _trees.Host(number).leaves
    return {f"host.{name}": value for name, value in found.items()}


def keys_of(step, item="default"):
    """Every key of an item's database with its value."""
    opened = ts.KvStore.open(arrays.database(f"{step}/{item}"), context=arrays.context()).result()
    listed = opened.list().result()
    values = [opened.read(key) for key in listed]
    return {key: value.result().value for key, value in zip(listed, values, strict=True)}


def assert_same_keys(got, wanted):
    assert got.keys() == wanted.keys()
    assert [key for key in got if got[key] != wanted[key]] == []


class Watch:
    """How many leaves were written in blocks, and how many with others in one operation."""

    def __init__(self, patch):
        self.parts = self.together = self.runs = 0
        values_of, run = blocks.values_of, staged.Staged.run

        def spied(block, tree, values):
            self.parts += len(block.parts)
            self.together += len(block.parts) if len(block.parts) > 1 else 0
            return values_of(block, tree, values)

        def spied_run(values, *args):
            found = run(values, *args)
            self.runs += found is not None
            return found

        patch.setattr(arrays, "values_of", spied)
        patch.setattr(staged.Staged, "run", spied_run)


def saved(root, devices, *, saves=SAVES, compiled=True, events=(), kinds=None, **options):
    """Saves a tree again and again, each time donating what was saved; the keys of each step."""
    options = {"heartbeat": None, "storage": Storage(durable=False), **options}
    kinds = kinds or [*alike(devices), *odd(devices)]
    leaves = _trees.build(kinds, 0)
    with ckptmgr.CheckpointManager(root, Options(**options), events=events) as manager:
        programs = manager._saves._stager.programs
        for number in range(saves):
            values = host(number)
            manager.save(number, {**leaves, **values})
            for value in values.values():
                if isinstance(value, np.ndarray) and value.flags.writeable:
                    value[...] = np.zeros((), value.dtype)
            leaves = _trees.donate(leaves, kinds, number + 1)
            manager.wait()
            if compiled:
                programs.wait()
        assert None not in programs._compiled.values()
    return [keys_of(os.path.join(root, str(number))) for number in range(saves)]


def waves_in(patch):
    """The numbers of the waves that are written from now on."""
    numbers = []
    write = arrays._Waves.write

    def counted(self, number):
        numbers.append(number)
        write(self, number)

    patch.setattr(arrays._Waves, "write", counted)
    return numbers


@pytest.fixture(scope="module")
def baseline(tmp_path_factory):
    """Gives the keys of each step as arrays alone write them, which no mode changes."""
    known = {}

    def find(devices, **options):
        del options["snapshot"]
        key = tuple(devices), repr(options)
        if key not in known:
            root = tmp_path_factory.mktemp("off")
            known[key] = without_blocks(root, devices, **options), root
        return known[key]

    return find


def without_blocks(root, devices, **options):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "PLAIN_BYTES", -1)
        watch = Watch(patch)
        found = saved(root, devices, compiled=False, snapshot=Snapshot(mode="sync"), **options)
        assert watch.parts == 0
    return found


# -- the same keys ----------------------------------------------------------------------------


def check(root, devices, mode, baseline, **options):
    """The steps that are written in blocks are those that are not; how they were written."""
    options["snapshot"] = Snapshot(mode=mode)
    wanted, _ = baseline(devices, **options)
    with pytest.MonkeyPatch.context() as patch:
        watch = Watch(patch)
        got = saved(root, devices, **options)
    assert watch.parts > SAVES * 100
    for found, keys in zip(got, wanted, strict=True):
        assert_same_keys(found, keys)
    return watch


@pytest.mark.parametrize("driver", ["zarr", "zarr3"])
@pytest.mark.parametrize("mode", MODES)
def test_on_eight_devices_blocks_write_what_arrays_write(tmp_path, mesh8, mode, driver, baseline):
    storage = Storage(durable=False, driver=driver)
    devices = list(mesh8.devices.flat)
    watch = check(tmp_path, devices, mode, baseline, storage=storage)
    wanted = {**_trees.build([*alike(devices), *odd(devices)], SAVES - 1), **host(SAVES - 1)}
    wanted["host.bytes"] = bytes(wanted["host.bytes"])  # which cannot be changed any more
    trees.assert_same_leaves(ckptmgr.restore(tmp_path), wanted)
    if mode != "sync":  # which views the values where they lie
        assert watch.together > SAVES * 40
        assert watch.runs > 40  # when the gathers are compiled


@pytest.mark.parametrize("mode", MODES)
def test_on_one_of_eight_devices_blocks_write_what_arrays_write(tmp_path, mode, baseline):
    watch = check(tmp_path, jax.devices()[3:4], mode, baseline)
    assert mode == "sync" or watch.runs


@pytest.mark.parametrize("mode", MODES)
def test_with_many_chunks_a_leaf_blocks_write_what_arrays_write(tmp_path, mesh8, mode, baseline):
    storage = Storage(durable=False, chunk_bytes=500)
    check(tmp_path, list(mesh8.devices.flat), mode, baseline, storage=storage)


@pytest.mark.parametrize("mode", MODES)
def test_with_rules_blocks_write_what_arrays_write(tmp_path, mesh8, mode, baseline):
    rules = (
        LeafRule("*3", cast="bfloat16"),
        LeafRule("*4", exclude=True),
        # a large leaf: cut as small as the rest it would be tens of thousands of chunks
        LeafRule("sharded0float320z", cast="float16", chunk_bytes=2**14),
        LeafRule("sharded*", cast="float16", chunk_bytes=64),
        LeafRule("columns*float32*", cast="float64"),
        LeafRule("host.*", cast="float8_e4m3fn"),
    )
    storage = Storage(durable=False, leaf_options=rules)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # NaNs that a narrower type does not have
        check(tmp_path, list(mesh8.devices.flat), mode, baseline, storage=storage)


@pytest.mark.parametrize("mode", MODES)
def test_in_waves_and_within_a_bound_blocks_write_what_arrays_write(
    tmp_path, mesh8, mode, baseline, monkeypatch
):
    monkeypatch.setattr(snapshot, "WAVE_BYTES", 2**17)
    devices = list(mesh8.devices.flat)
    check(tmp_path / "waves", devices, mode, baseline)
    bound = 2**21
    events = []
    how = Snapshot(mode=mode, host_bytes=bound, strict=True)
    got = saved(tmp_path / "bound", devices, events=[events.append], snapshot=how)
    for found, keys in zip(got, baseline(devices, snapshot=how)[0], strict=True):
        assert_same_keys(found, keys)
    assert max(event.host_bytes for event in events) <= bound
    assert mode == "sync" or any(event.host_bytes for event in events)


@pytest.mark.parametrize("mode", MODES)
def test_in_waves_of_few_parts_blocks_write_what_arrays_write(
    tmp_path, mesh8, mode, baseline, monkeypatch
):
    monkeypatch.setattr(plan, "WAVE_PARTS", 16)
    monkeypatch.setattr(layout, "INLINE_BYTES", 0)  # of the plan: the leaves here are very small
    waves = waves_in(monkeypatch)
    check(tmp_path, list(mesh8.devices.flat), mode, baseline)
    assert max(waves) + 1 >= plan.MOST_SMALL_WAVES


@pytest.mark.parametrize("mode", MODES)
def test_blocks_give_the_same_digests_of_leaves(tmp_path, mesh8, mode, baseline):
    devices = list(mesh8.devices.flat)
    integrity = Integrity(leaf_digests=True)
    check(tmp_path, devices, mode, baseline, integrity=integrity)
    _, root = baseline(devices, snapshot=None, integrity=integrity)
    for number in range(SAVES):
        on, off = (ckptmgr.describe(d, step=number).leaf_digests for d in (tmp_path, root))
        assert on == off and len(on["default"]) > 128


@pytest.mark.parametrize("mode", MODES)
def test_heartbeats_of_small_leaves_are_right_too(tmp_path, mesh8, mode, baseline, monkeypatch):
    watch = Watch(monkeypatch)
    devices = list(mesh8.devices.flat)
    options = {"snapshot": Snapshot(mode=mode), "heartbeat": Heartbeat(every_saves=2)}
    got = saved(tmp_path, devices, **options)
    assert watch.parts
    with ckptmgr.CheckpointManager(tmp_path, Options(read_only=True)) as manager:
        assert "heartbeat" in [info.kind for info in manager.steps()]
    for found, keys in zip(got, baseline(devices, snapshot=None)[0], strict=True):
        assert_same_keys(found, keys)


def test_blocks_in_a_process_with_one_device_write_what_arrays_write(tmp_path):
    child = start_python(
        f"""
        import jax
        from tests.contract import test_blocks

        def baseline(devices, snapshot):
            return test_blocks.without_blocks({str(tmp_path)!r} + "/off", devices), None

        (device,) = jax.devices()
        watch = test_blocks.check({str(tmp_path)!r}, [device], "double_buffer", baseline)
        assert watch.runs
        """,
        env={"XLA_FLAGS": "--xla_force_host_platform_device_count=1"},
        timeout=100,
    )
    finish(child, timeout=100)


def test_without_compiled_gathers_blocks_write_what_arrays_write(
    tmp_path, mesh8, monkeypatch, baseline
):
    monkeypatch.setattr(snapshot.Programs, "compile_wanted", lambda self: None)
    watch = check(tmp_path, list(mesh8.devices.flat), "copy_on_write", baseline)
    assert watch.together and not watch.runs


def test_compressed_leaves_are_left_to_arrays(tmp_path, mesh8, monkeypatch):
    watch = Watch(monkeypatch)
    kinds = alike(list(mesh8.devices.flat), each=1)
    storage = Storage(durable=False, compression="zstd")
    saved(tmp_path, list(mesh8.devices.flat), saves=1, kinds=kinds, storage=storage)
    assert watch.parts == 0


# -- others read it ---------------------------------------------------------------------------


@pytest.mark.parametrize("driver", ["zarr", "zarr3"])
def test_stock_orbax_restores_what_was_written_in_blocks(tmp_path, mesh8, driver):
    devices = list(mesh8.devices.flat)
    kinds = [kind for kind in alike(devices) if kind.sharding.memory_kind in (None, "device")]
    tree = {**_trees.build(kinds, 3), "n": 3, "f": 0.5, "a": np.arange(5), "b": jnp.float32(2)}
    trees.save(tmp_path, tree, storage=Storage(driver=driver))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        with ocp.CheckpointManager(tmp_path) as manager:
            got = manager.restore(1, args=ocp.args.StandardRestore(trees.abstract(tree)))
    trees.assert_same_leaves(got, tree)


@pytest.mark.parametrize("driver", ["zarr", "zarr3"])
def test_the_metadata_that_is_made_once_is_tensorstores_own(driver):
    rng = np.random.default_rng(1)
    for dtype in ["bool", "int4", "int8", "uint16", "int64", "bfloat16", "float32", "complex64"]:
        for rank in range(5):
            shape = tuple(int(n) for n in rng.integers(1, 9, rank))
            chunk = tuple(int(rng.integers(1, n + 1)) for n in shape)
            leaf = StoredLeaf((), "array", shape, dtype, "x.y", dtype, shape, chunk)
            spec = arrays.array_spec(
                StoredTree((leaf,), 0, driver=driver), leaf, {"driver": "memory"}
            )
            store = ts.open(spec, create=True).result().kvstore
            (key,) = store.list().result()
            assert layout.array_prefix("x.y") + key.decode() == layout.metadata_key(driver, "x.y")
            assert store[key] == arrays._metadata(driver, shape, chunk, dtype)


@pytest.mark.parametrize("driver", ["zarr", "zarr3"])
def test_a_tree_that_is_one_small_leaf_is_written_as_arrays_write_it(tmp_path, driver, monkeypatch):
    storage = Storage(driver=driver)
    for number, leaf in enumerate([jnp.arange(6.0).reshape(2, 3), np.float32(1), 5, True]):
        on = trees.save(tmp_path / f"on{number}", leaf, storage=storage)
        with monkeypatch.context() as patch:
            patch.setattr(blocks, "PLAIN_BYTES", -1)
            off = trees.save(tmp_path / f"off{number}", leaf, storage=storage)
        assert_same_keys(keys_of(on), keys_of(off))
        trees.assert_same_leaves(ckptmgr.restore(on), leaf)


def test_each_wave_leaves_one_data_file_whatever_it_holds(tmp_path, monkeypatch, mesh42):
    monkeypatch.setattr(snapshot, "WAVE_BYTES", 2**20)
    spread = NamedSharding(mesh42, P("data", "model"))
    tree = {
        f"w{n:02d}": jax.device_put(np.full((64 << n % 4, 256), n, np.float32), spread)
        for n in range(40)
    }
    waves = waves_in(monkeypatch)
    with ckptmgr.CheckpointManager(tmp_path, Options(heartbeat=None)) as manager:
        for step in range(6):
            waves.clear()
            manager.save(step, tree).result()
            data = tmp_path / str(step) / "default" / "ocdbt.process_0" / "d"
            assert len(list(data.iterdir())) == len(waves) > 5


@pytest.mark.parametrize(("rows", "gathered"), [(512, False), (32, True)])
def test_pieces_are_put_together_where_they_are_many_and_small(tmp_path, mesh8, rows, gathered):
    # of 1 MiB each they are as quick alone, and together leave twice the freed memory behind
    line = NamedSharding(mesh8, P(mesh8.axis_names))
    tree = {
        f"w{n}": jax.device_put(np.full((8 * rows, 512), n, np.float32), line) for n in range(8)
    }
    with ckptmgr.CheckpointManager(tmp_path, Options(heartbeat=None)) as manager:
        manager.save(0, tree).result()
        manager.wait()
        programs = manager._saves._stager.programs
        programs.wait()
        assert bool(programs._compiled) is gathered
    trees.assert_same_leaves(ckptmgr.restore(tmp_path), tree)


# -- what is done while the last wave is on its way ---------------------------------------------


def test_metadata_is_made_while_the_last_wave_is_being_committed(tmp_path, monkeypatch):
    order = []
    settle, meanwhile = arrays._Waves.settle, writing.Writing._meanwhile

    def settled(self):
        if self._committing is not None:
            order.append("settles")
        settle(self)

    def metadata(self, *args):
        order.append("metadata")
        meanwhile(self, *args)

    monkeypatch.setattr(arrays._Waves, "settle", settled)
    monkeypatch.setattr(writing.Writing, "_meanwhile", metadata)
    trees.save(tmp_path, {"w": jnp.ones((4, 4))})
    assert order == ["metadata", "settles"]


def test_a_save_whose_metadata_fails_ends_when_nobody_writes_any_more(tmp_path, monkeypatch):
    futures = []
    end = arrays._Waves.end

    def ended(self):
        futures.append(self._committing.future)
        end(self)
        assert futures[-1].done()

    def fail(self, item, wrote):
        raise OSError("by a test")

    monkeypatch.setattr(arrays._Waves, "end", ended)
    monkeypatch.setattr(writing.Writing, "_meanwhile", fail)
    with (
        ckptmgr.CheckpointManager(tmp_path) as manager,
        pytest.raises(ckptmgr.SaveFailed, match="by a test"),
    ):
        manager.save(1, {"w": jnp.ones((4, 4))}).result()
    assert futures and [path.name for path in tmp_path.iterdir()] == [layout.PRIVATE]
