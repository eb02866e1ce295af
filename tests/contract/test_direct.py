"""Chunks read straight from data files have the values that TensorStore reads, or are left to it."""

import contextlib
import errno
import functools
import math
import os
import pathlib
import re
import shutil
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import ckptmgr
from ckptmgr import Integrity, Options, Restore, Storage
from ckptmgr.core.ocdbt import Place
from ckptmgr.engine import arrays, direct, reader
from tests.support import goldens, run_python, trees

FIND = direct.find_places
PLAIN_DTYPES = (
    ["bool", "int2", "int4", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64"]
    + ["float16", "bfloat16", "float32", "float64", "complex64", "complex128"]
    + ["float8_e4m3fn", "float8_e5m2", "float8_e3m4", "float8_e8m0fnu", "float4_e2m1fn"]
)  # fmt: skip


def random(shape, dtype, seed=0):
    """Any bits, but of types that are smaller than a byte only those that count."""
    rng = np.random.default_rng(seed)
    kind = jnp.dtype(dtype)
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    if dtype in ("int2", "int4"):
        return rng.integers(-2, 2, shape, np.int8).astype(kind)
    raw = rng.integers(
        0, 16 if dtype.startswith("float4") else 256, math.prod(shape) * kind.itemsize
    )
    return raw.astype(np.uint8).view(kind).reshape(shape)


class Seen:
    """What was read straight from files, what of that failed, what TensorStore was asked, and
    which threads and open files the reading left behind."""

    def __init__(self):
        self.pieces, self.failed, self.asked, self.left = [], [], [], []


def open_things():
    """The threads of the process, and its files by number."""
    found = set(threading.enumerate())
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # what listing them has opened
            found.add((number, os.readlink(f"/proc/self/fd/{number}")))
    return found


@contextlib.contextmanager
def seen(find=FIND):
    """Watches restores, whose places `find` finds."""
    found = Seen()
    ask = reader.Reader.ask

    class Watched(direct.DirectReader):
        def start(self, pieces):
            found.pieces += pieces
            finish = super().start(pieces)

            def finished():
                failed = finish()
                found.failed += failed
                return failed

            return finished

        def close(self):
            left = set(self._files._files.values())
            with pytest.MonkeyPatch.context() as inner:
                close = os.close
                inner.setattr(os, "close", lambda number: (left.discard(number), close(number)))
                super().close()
            readers = (t for t in threading.enumerate() if t.name.startswith("ckptmgr-read"))
            found.left += [*left, *readers]

    def spied_ask(self, unit, *args):
        found.asked.append(unit)
        return ask(self, unit, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(direct, "find_places", find)
        patch.setattr(direct, "DirectReader", Watched)
        patch.setattr(reader.Reader, "ask", spied_ask)
        yield found


def nowhere(*args):
    return {}


def both_ways(path, like=None, **how):
    """Restores with and without; the values, and what was seen of the first."""
    with seen() as found:
        got = ckptmgr.restore(path, like, **how)
    assert not found.left
    with seen(nowhere) as other:
        wanted = ckptmgr.restore(path, like, **how)
    assert not other.pieces
    as_tree = dict if isinstance(got, ckptmgr.Items) else lambda tree: tree
    trees.assert_same_tree(as_tree(got), as_tree(wanted))
    trees.assert_same_placement(as_tree(got), as_tree(wanted))
    return got, found


def assert_all_direct(found):
    assert not found.left
    assert found.pieces and not found.failed and not found.asked


def grid(*size, names=("data", "model")):
    count = int(np.prod(size))
    return Mesh(np.array(jax.devices()[:count]).reshape(size), names)


def placed(tree, mesh, specs):
    return {
        name: jax.device_put(value, NamedSharding(mesh, specs.get(name, P())))
        for name, value in tree.items()
    }


# -- the same values --------------------------------------------------------------------------


@pytest.mark.parametrize("driver", ["zarr", "zarr3"])
@pytest.mark.parametrize("chunk_bytes", [None, 64, 5000])
def test_every_dtype_and_shape_comes_from_files_as_from_tensorstore(tmp_path, driver, chunk_bytes):
    tree = {dtype: random((12, 11), dtype, i) for i, dtype in enumerate(PLAIN_DTYPES)}
    tree |= {f"{dtype} 0-d": random((), dtype) for dtype in ("float32", "bfloat16", "bool")}
    tree |= {
        "one": random((1,), "float32"),
        "empty": np.zeros((0, 3), np.float32),
        "row": random((1, 1, 3000), "float32"),
        "deep": random((3, 1, 7, 5), "uint16"),
        "number": 7,
        "real": 0.1,
        "text": "text",
        "bytes": b"some bytes",
        "none": None,
    }
    path = trees.save(tmp_path, tree, storage=Storage(driver=driver, chunk_bytes=chunk_bytes))
    got, found = both_ways(path)
    trees.assert_same_leaves(got, tree)
    assert found.pieces and not found.failed
    leaves = [leaf for leaf in ckptmgr.describe(path).leaves["default"] if leaf.has_array]
    padded = {leaf.dotted for leaf in leaves if is_padded_inside(leaf)}
    assert len(padded) < len(leaves) / 2
    names = [leaf.dotted for leaf in ckptmgr.describe(path).leaves["default"]]
    assert {names[unit.leaf] for unit in found.asked} == padded


def is_padded_inside(leaf):
    """Whether there are chunks that reach beyond the array along another axis than the first."""
    return any(size % of for size, of in zip(leaf.stored_shape[1:], leaf.chunk[1:], strict=True))


@pytest.mark.parametrize("driver", ["zarr", "zarr3"])
def test_the_shorter_last_chunks_come_from_files_but_for_those_that_are_padded_inside(
    tmp_path, driver
):
    tree = {
        "rows": random((2003, 7), "float32", 1),  # the last chunk is shorter along the first axis
        "line": random((70_001,), "uint8", 2),
        "far": random((2, 70_001), "uint8", 3),  # rows are cut: padding lies inside
        "large": random((263, 1000), "float32", 4),
    }
    storage = Storage(driver=driver, chunk_bytes=30_000)
    path = trees.save(tmp_path, tree, storage=storage)
    got, found = both_ways(path)
    trees.assert_same_leaves(got, tree)
    chunks = {leaf.dotted: leaf.chunk for leaf in ckptmgr.describe(path).leaves["default"]}
    assert 2003 % chunks["rows"][0] and 70_001 % chunks["line"][0] and 70_001 % chunks["far"][1]
    assert found.pieces and not found.failed
    padded = {unit.box.shape for unit in found.asked}
    assert padded == {(1, 70_001 % chunks["far"][1])}


def test_chunks_below_and_above_the_size_that_is_read_alone_come_from_files(tmp_path):
    tree = {
        f"n{size}": random((size,), "uint8", size)
        for size in (1, 1024, 1025, 2**17 - 1, 2**18 - 1, 2**18, 2**18 + 1, 2**20 + 1, 5 * 2**20)
    }
    tree |= {f"many{i}": random((2**16 + i,), "uint8", i) for i in range(150)}  # more than a span
    path = trees.save(tmp_path, tree)
    got, found = both_ways(path)
    trees.assert_same_leaves(got, tree)
    assert_all_direct(found)


SPECS = {
    "w": P("data", "model"),
    "rows": P("data"),
    "columns": P(None, "model"),
    "half": P(("data", "model")),
}
HOST = {
    "w": random((64, 48), "float32", 1),
    "rows": random((128, 33), "bfloat16", 2),
    "columns": random((31, 64), "int8", 3),
    "half": random((64,), "uint16", 4),
    "replicated": random((9, 5), "float32", 5),
    "scalar": np.float32(3),
    "wide": random((512, 1032), "float32", 6),
}


@pytest.mark.parametrize("chunk_bytes", [None, 700])
@pytest.mark.parametrize(
    "size", [(4, 2), (2, 4), (8, 1), (1, 8), (1, 1)], ids=lambda s: "x".join(map(str, s))
)
def test_a_step_of_4x2_devices_comes_from_files_onto_any_mesh(tmp_path, mesh42, size, chunk_bytes):
    tree = placed(HOST, mesh42, {**SPECS, "wide": P("data", "model")})
    keys = jax.random.wrap_key_data(np.arange(32, dtype=np.uint32).reshape(16, 2))
    tree["keys"] = jax.device_put(keys, NamedSharding(mesh42, P("data")))
    path = trees.save(tmp_path, tree, storage=Storage(chunk_bytes=chunk_bytes))
    like = placed(HOST, grid(*size), {**SPECS, "wide": P("model", "data")})
    like["keys"] = jax.device_put(keys, NamedSharding(grid(*size), P("data")))
    got, found = both_ways(path, trees.abstract(like))
    trees.assert_same_tree(got, like)
    trees.assert_same_placement(got, like)
    assert_all_direct(found)
    got, found = both_ways(path, mesh=grid(*size))
    trees.assert_same_leaves(got, tree)
    assert_all_direct(found)
    got, found = both_ways(path)
    trees.assert_same_leaves(got, tree)
    assert_all_direct(found)


def test_parts_casts_several_items_and_small_waves_come_from_files(tmp_path):
    model = {"a": random((40, 9), "uint16", 1), "b": np.linspace(0, 9, 5000, dtype=np.float32)}
    items = ckptmgr.Items(model=model, rng={"key": jax.random.key(3)}, n={"n": 5, "t": "x"})
    path = trees.save(tmp_path, items, storage=Storage(chunk_bytes=256))
    got, found = both_ways(path)
    trees.assert_same_leaves(dict(got), dict(items))
    assert_all_direct(found)
    one = SingleDeviceSharding(jax.devices()[5])
    like = {"b": jax.ShapeDtypeStruct((5000,), jnp.bfloat16, sharding=one)}
    got, found = both_ways(path, like, item="model", cast=True, partial=True)
    trees.assert_same_leaves(got, {"b": model["b"].astype(jnp.bfloat16)})
    assert_all_direct(found)
    got, found = both_ways(path, item="model", options=Options(restore=Restore(host_bytes=500)))
    trees.assert_same_leaves(got, model)
    assert_all_direct(found)


def test_a_manager_restores_from_files_and_without_digests_too(tmp_path):
    tree = {"a": random((300, 40), "float32"), "b": jnp.arange(7), "n": 3}
    trees.save(tmp_path, tree, storage=Storage(chunk_bytes=4096))
    for verify in (True, False):
        options = Options(integrity=Integrity(verify_on_restore=verify), read_only=True)
        with ckptmgr.CheckpointManager(tmp_path, options) as manager, seen() as found:
            got = manager.restore()
            trees.assert_same_leaves(got, tree)
            assert_all_direct(found)
            assert all(bool(piece.digest) == verify for piece in found.pieces)
            again = manager.restore_latest(trees.abstract(tree))
            trees.assert_same_tree(again.state, tree)
            assert again.skipped == () and not found.asked


def test_what_many_small_reads_bring_is_put_together(tmp_path, monkeypatch):
    tree = {"small": random((999,), "uint8"), "large": random((700, 1000), "float32")}
    path = trees.save(tmp_path, tree, storage=Storage(chunk_bytes=2**20))
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda f, to, at: preadv(f, [to[0][:65_537]], at))
    with seen() as found:
        trees.assert_same_leaves(ckptmgr.restore(path), tree)
    assert_all_direct(found)


def test_neighbouring_small_chunks_are_read_straight_to_their_places_in_one_call(
    tmp_path, monkeypatch
):
    count = direct.SPAN_PIECES + 100  # more than one call of the system takes
    tree = {f"w{n:04d}": random((400,), "float32", n) for n in range(count)}
    path = trees.save(tmp_path, tree)
    calls = []
    preadv = os.preadv

    def counted(file, into, offset):
        calls.append(len(into))
        return preadv(file, into, offset)

    monkeypatch.setattr(os, "preadv", counted)
    monkeypatch.setattr(direct._Files, "_memory", None)  # nothing goes by way of other memory
    with seen() as found:
        trees.assert_same_leaves(ckptmgr.restore(path), tree)
    assert_all_direct(found)
    assert sum(calls) == count and len(calls) < 20


def test_where_a_call_brings_less_than_all_neighbours_each_is_read_alone(tmp_path, monkeypatch):
    tree = {f"w{n:02d}": random((400,), "float32", n) for n in range(40)}
    path = trees.save(tmp_path, tree)
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda f, to, at: preadv(f, to[: max(1, len(to) // 2)], at))
    with seen() as found:
        trees.assert_same_leaves(ckptmgr.restore(path), tree)
    assert_all_direct(found)


# -- what is not read so ----------------------------------------------------------------------


@pytest.mark.parametrize("driver", ["zarr", "zarr3"])
@pytest.mark.parametrize("compression", ["zstd", "blosc", "blosc_bitshuffle"])
def test_compressed_chunks_are_left_to_tensorstore(tmp_path, driver, compression):
    tree = {"a": random((300, 40), "float32"), "b": np.zeros(5000), "n": 3}
    storage = Storage(driver=driver, compression=compression, chunk_bytes=4096)
    path = trees.save(tmp_path, tree, storage=storage)
    got, found = both_ways(path)
    trees.assert_same_leaves(got, tree)
    assert not found.pieces and found.asked


@pytest.mark.parametrize(
    "config",
    [
        {"max_inline_value_bytes": 1024, "max_decoded_node_bytes": 100_000_000},
        {"max_inline_value_bytes": 100, "max_decoded_node_bytes": 2000, "compression": None},
        {"compression": {"id": "zstd", "level": 3}},
    ],
    ids=["as before", "several levels", "other compression"],
)
def test_a_tree_of_keys_that_is_no_plain_leaf_node_is_left_to_tensorstore(
    tmp_path, monkeypatch, config
):
    monkeypatch.setattr(arrays, "_OCDBT_CONFIG", config)
    tree = {f"leaf{i}": random((30 + i,), "float32", i) for i in range(60)}
    tree["large"] = random((300, 1000), "float32")
    path = trees.save(tmp_path, tree)
    monkeypatch.undo()
    got, found = both_ways(path)
    trees.assert_same_leaves(got, tree)
    assert not found.pieces and len(found.asked) == len(tree)


@pytest.mark.parametrize("version", ["0.4.8", "0.5.16", "0.6.4", "0.11.13", "0.12.8"])
def test_what_orbax_wrote_is_read_by_tensorstore_with_the_same_values(tmp_path, version):
    root = goldens.unpack(f"orbax-{version}", tmp_path)
    read = 0
    items = sorted({path.parent for path in root.rglob("*") if path.name == "_METADATA"})
    for number, item in enumerate(items):
        run = tmp_path / "runs" / str(number) / "0"
        run.mkdir(parents=True)
        os.symlink(item, run / "default")
        try:
            with seen(nowhere):
                wanted = ckptmgr.restore(run.parent)
        except ckptmgr.CheckpointError:
            continue  # which of them are refused, and how, has tests of its own
        with seen() as found:
            trees.assert_same_tree(ckptmgr.restore(run.parent), wanted)
        assert found.asked and not found.pieces
        read += 1
    assert read


def test_of_a_tree_of_many_keys_places_are_looked_up_for_a_good_part_of_it(step, monkeypatch):
    path, tree = step
    monkeypatch.setattr(direct, "FEW_KEYS", 10)
    with seen() as found:
        got = ckptmgr.restore(path, {"small3": tree["small3"]}, partial=True)
    assert not found.pieces and found.asked
    trees.assert_same_leaves(got, {"small3": tree["small3"]})
    with seen() as found:
        trees.assert_same_leaves(ckptmgr.restore(path), tree)
    assert_all_direct(found)


def test_a_restore_while_the_interpreter_ends_is_right(tmp_path):
    tree = {"a": np.arange(5000, dtype=np.float32), "b": random((999, 1000), "float32")}
    path = trees.save(tmp_path, tree)
    done = run_python(
        f"""
        import atexit
        import numpy as np
        import ckptmgr

        def last():
            found = ckptmgr.restore({path!r})
            print(found["a"].sum(), found["b"].tobytes().hex()[:8], found["b"].nbytes)

        atexit.register(last)
        """
    )
    wanted = tree["a"].sum(), tree["b"].tobytes().hex()[:8], tree["b"].nbytes
    assert done.stdout.split() == [str(value) for value in wanted]


def test_whatever_a_manifest_of_a_database_holds_places_are_found_or_none(tmp_path):
    """Such a step is refused when it is opened; this is what a file that changes then may give."""
    tree = {f"a{i}": random((60, 7), "float32", i) for i in range(5)}
    item = pathlib.Path(trees.save(tmp_path, tree)) / "default"
    manifest = item / "manifest.ocdbt"
    kept = manifest.read_bytes()
    database = arrays.database(str(item))
    del database["config"]

    def find():
        return FIND(str(item), database, arrays.context(), 5)

    wanted = find()
    assert len(wanted) >= 10
    for at in range(len(kept)):
        for data in (kept[:at], kept[:at] + bytes([kept[at] ^ 0x41]) + kept[at + 1 :]):
            manifest.write_bytes(data)
            assert find() in ({}, wanted)
    manifest.unlink()
    assert find() == {}
    manifest.mkdir()
    assert find() == {}


# -- wrong places -----------------------------------------------------------------------------


def altered(how):
    """`find_places` whose places, by sorted key, are what `how` makes of them."""

    def find(*args):
        found = dict(FIND(*args))
        assert found
        how(found)
        return found

    return find


def apart(places):
    return sorted(key for key, place in places.items() if isinstance(place, Place))


def each(change):
    def how(places):
        for key in apart(places):
            places[key] = change(places[key])

    return how


def swap(places):
    """Chunks of the same length change places."""
    by_length = {}
    for key in apart(places):
        by_length.setdefault(places[key].length, []).append(key)
    for keys in by_length.values():
        old = [places[key] for key in keys]
        for key, place in zip(keys, old[1:] + old[:1], strict=True):
            places[key] = place


def inline(places):
    for key, place in places.items():
        if isinstance(place, bytes) and "zarray" not in key and place:
            places[key] = bytes([place[0] ^ 1]) + place[1:]


def moved_inside(places):
    for key, place in places.items():
        if isinstance(place, bytes):
            places[key] = place[:-1]


def copied(tmp_path, change, place):
    """The same place in a copy of the file to which `change` was done."""
    copy = tmp_path / "copy"
    if not copy.exists():
        shutil.copy(place.file, copy)
        change(copy)
    return place._replace(file=str(copy))


WRONG = {
    "of each other": lambda tmp: swap,
    "one byte on": lambda tmp: each(lambda p: p._replace(offset=p.offset + 1)),
    "one byte before": lambda tmp: each(lambda p: p._replace(offset=max(0, p.offset - 1))),
    "past the end": lambda tmp: each(lambda p: p._replace(offset=2**40)),
    "past what a file can have": lambda tmp: each(lambda p: p._replace(offset=2**62 + 1)),
    "past what the system takes": lambda tmp: each(lambda p: p._replace(offset=2**63)),
    "past all": lambda tmp: each(lambda p: p._replace(offset=2**100)),
    "in a file of another kind": lambda tmp: each(lambda p: p._replace(file=__file__)),
    "in a file that is none": lambda tmp: each(lambda p: p._replace(file=f"{tmp}/none")),
    "in a directory": lambda tmp: each(lambda p: p._replace(file=str(tmp))),
    "in a file whose name is none": lambda tmp: each(lambda p: p._replace(file="a\0b")),
    "of another length": lambda tmp: each(lambda p: p._replace(length=p.length - 1)),
    "all one": lambda tmp: each(lambda p: p._replace(offset=0)),
    "in a file that was cut": lambda tmp: each(
        functools.partial(copied, tmp, lambda f: os.truncate(f, f.stat().st_size // 2))
    ),
    "in a file that is empty": lambda tmp: each(
        functools.partial(copied, tmp, lambda f: os.truncate(f, 0))
    ),
    "nowhere": lambda tmp: lambda places: places.clear(),
    "in the node, other bytes": lambda tmp: inline,
    "in the node, too few": lambda tmp: moved_inside,
}


def some_tree():
    """Inline, small, adjoining, padded and large chunks; some alike in length."""
    tree = {f"tiny{i}": random((i + 1,), "float32", i) for i in range(10)}
    rng = np.random.default_rng(9)
    tree |= {f"small{i}": rng.standard_normal((50, 11), np.float32) for i in range(10)}
    tree["cut"] = random((1009, 200), "float32", 100)
    tree["large"] = random((700, 1000), "float32", 101)
    return tree


@pytest.fixture(scope="module")
def step(tmp_path_factory):
    """A step that must not be changed, and its tree."""
    tree = some_tree()
    root = tmp_path_factory.mktemp("step")
    return trees.save(root, tree, storage=Storage(chunk_bytes=2**19)), tree


@pytest.mark.parametrize("where", WRONG)
def test_values_are_right_where_places_are_wrong(step, tmp_path, where):
    path, tree = step
    with seen(altered(WRONG[where](tmp_path))) as found:
        got = ckptmgr.restore(path)
    trees.assert_same_leaves(got, tree)
    assert found.asked
    assert not found.left


@pytest.mark.parametrize("where", ["of each other", "one byte on", "past the end"])
def test_values_are_right_on_devices_and_cast_where_places_are_wrong(step, tmp_path, mesh42, where):
    path, tree = step
    specs = {"cut": P(None, "data"), "large": P("data", "model")}
    like = placed(tree, mesh42, specs)
    like["small3"] = jax.ShapeDtypeStruct((50, 11), jnp.float64.dtype)
    with jax.enable_x64(True), seen(altered(WRONG[where](tmp_path))) as found:
        got = ckptmgr.restore(path, trees.abstract(like), cast=True)
    assert found.failed
    like["small3"] = tree["small3"].astype(np.float64)
    trees.assert_same_leaves(got, like)


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.EINVAL, errno.EAGAIN])
def test_values_are_right_where_files_cannot_be_read(step, monkeypatch, code):
    path, tree = step

    def broken(file, into, offset):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "preadv", broken)
    with seen() as found:
        got = ckptmgr.restore(path)
    trees.assert_same_leaves(got, tree)
    assert len(found.failed) == len(found.asked) > 5
    assert not found.left


def test_values_are_right_where_reading_fails_halfway(step, monkeypatch):
    path, tree = step
    preadv = os.preadv
    calls = []

    def sometimes(file, into, offset):
        calls.append(offset)
        if len(calls) % 3 == 2:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        found = preadv(file, into, offset)
        if len(calls) % 3 == 0:
            into[0][0] ^= 1
        return found

    monkeypatch.setattr(os, "preadv", sometimes)
    with seen() as found:
        got = ckptmgr.restore(path)
    trees.assert_same_leaves(got, tree)
    assert 0 < len(found.failed) < len(found.pieces)


def test_values_are_right_where_no_more_files_can_be_opened(step, monkeypatch):
    path, tree = step
    opened = os.open

    def full(name, flags, *args, **how):
        if threading.current_thread().name.startswith("ckptmgr-read"):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return opened(name, flags, *args, **how)

    monkeypatch.setattr(os, "open", full)
    with seen() as found:
        trees.assert_same_leaves(ckptmgr.restore(path), tree)
    assert found.failed


@pytest.mark.parametrize("allowed", [0, 1])
def test_values_are_right_where_no_more_threads_start(step, monkeypatch, allowed):
    path, tree = step
    start = threading.Thread.start
    started = []

    def limited(self):
        if self.name.startswith("ckptmgr-read"):
            if len(started) >= allowed:
                raise RuntimeError("can't start new thread")
            started.append(self)
        start(self)

    monkeypatch.setattr(threading.Thread, "start", limited)
    with seen() as found:
        trees.assert_same_leaves(ckptmgr.restore(path), tree)
    assert_all_direct(found)
    assert not found.left


# -- damage -----------------------------------------------------------------------------------


def data_file_with(step, raw):
    """The data file that holds these bytes, and where."""
    for file in sorted(pathlib.Path(step).rglob("d/*")):
        at = file.read_bytes().find(raw)
        if at >= 0:
            return file, at
    raise AssertionError("no file has them")


def refusal(path, find=FIND, **how):
    with seen(find) as found, pytest.raises(ckptmgr.CorruptCheckpoint) as caught:
        ckptmgr.restore(path, **how)
    assert not found.left
    return caught.value.problems, str(caught.value), found


@pytest.fixture
def own_step(tmp_path):
    tree = some_tree()
    return trees.save(tmp_path / "run", tree, storage=Storage(chunk_bytes=2**19)), tree


@pytest.mark.parametrize("name", ["tiny9", "small4", "cut", "large"])
@pytest.mark.parametrize("last", [False, True], ids=["first", "last"])
def test_a_flipped_bit_is_the_same_problem_as_without_and_names_the_leaf(own_step, name, last):
    path, tree = own_step
    raw = tree[name].tobytes()[-1000:] if last else tree[name].tobytes()[:1000]
    file, at = data_file_with(path, raw)
    at += len(raw) - 1 if last else 0
    with open(file, "r+b") as change:
        change.seek(at)
        byte = change.read(1)[0]
        change.seek(at)
        change.write(bytes([byte ^ 4]))
    problems, text, found = refusal(path)
    assert (problems, text) == refusal(path, nowhere)[:2]
    if name != "tiny9":  # which lies in the tree of keys, all of which is damaged by this
        assert [problem.leaf for problem in problems] == [name]
        assert found.failed and len(found.asked) == 1
    else:
        assert problems


@pytest.mark.parametrize("how", ["removed", "cut", "emptied", "replaced by a directory"])
def test_a_file_that_goes_after_the_look_up_is_the_same_problem_as_without(own_step, how):
    path, tree = own_step
    file, _ = data_file_with(path, tree["large"].tobytes()[:32])

    def harm():
        if how == "cut":
            os.truncate(file, 200_000)
        elif how == "emptied":
            os.truncate(file, 0)
        else:
            file.unlink()
            if how.startswith("replaced"):
                file.mkdir()

    kept = file.read_bytes()

    def find_and_harm(find, *args):
        found = find(*args)
        harm()
        return found

    def repair():
        if file.is_dir():
            file.rmdir()
        file.write_bytes(kept)

    problems, text, found = refusal(path, functools.partial(find_and_harm, FIND))
    assert found.failed
    repair()
    told = refusal(path, functools.partial(find_and_harm, nowhere))[:2]
    assert (problems, text) == told
    assert problems[0].leaf in tree
    repair()
    trees.assert_same_leaves(ckptmgr.restore(path), tree)


def root_node(path):
    """File and extent of the root of the tree of keys of an item."""
    ts = arrays.ts
    base = {"driver": "file", "path": f"{path}/"}
    opened = ts.KvStore.open(base).result()
    location = ts.ocdbt.dump(opened).result()["versions"][-1]["root"]["location"]
    below, file, offset, length = re.fullmatch(
        r"btreenode:(.*?):(.*?):(\d+):(\d+)", location
    ).groups()
    return pathlib.Path(path) / (below + file), int(offset), int(length)


@pytest.mark.parametrize("verify", [True, False], ids=["compared", "not compared"])
def test_a_damaged_tree_of_keys_gives_right_values_or_an_error(tmp_path, verify):
    tree = {f"a{i}": random((600, 2 + i % 2), "float32", i) for i in range(12)}
    path = pathlib.Path(trees.save(tmp_path, tree))
    options = Options(integrity=Integrity(verify_on_restore=verify))
    file, offset, length = root_node(path / "default")
    kept = file.read_bytes()
    wrong = []
    for number, at in enumerate(range(offset, offset + length, max(1, length // 300))):
        byte = [0, kept[at] ^ 0x11, kept[at] ^ 0x80][number % 3]
        file.write_bytes(kept[:at] + bytes([byte]) + kept[at + 1 :])
        try:
            got = ckptmgr.restore(path, options=options)
        except ckptmgr.CorruptCheckpoint:
            continue
        try:
            trees.assert_same_leaves(got, tree)
        except AssertionError:
            wrong.append(at - offset)
    assert wrong == []


# -- threads ----------------------------------------------------------------------------------


def pieces_of(path, count, put):
    """Pieces of one byte each, none beside another."""
    path.write_bytes(bytes(range(2 * count)))
    places = [Place(str(path), 2 * number, 1) for number in range(count)]
    return [direct.Piece(n, place, 1, "", None, put) for n, place in enumerate(places)]


def test_all_is_read_before_the_end_where_only_some_threads_start(tmp_path, monkeypatch):
    seen_by, held = [], threading.Event()

    def put(found):
        if threading.current_thread() is not threading.main_thread():
            assert held.wait(30)
        seen_by.append(int(found[0]))
        if len(seen_by) == 19:  # all but the one that the thread holds
            held.set()

    reading = direct.DirectReader()
    submit = reading._pool.submit
    begun = []

    def only_one(work):
        if begun:
            raise RuntimeError("can't start new thread")
        begun.append(submit(work))
        started.wait(30)

    started = threading.Event()
    span = reading._files.span
    monkeypatch.setattr(reading._files, "span", lambda *args: (started.set(), span(*args))[1])
    monkeypatch.setattr(reading._pool, "submit", only_one)
    with contextlib.closing(reading):
        assert reading.start(pieces_of(tmp_path / "data", 20, put))() == []
        assert sorted(seen_by) == list(range(0, 40, 2))


def test_what_one_piece_raises_is_raised_when_the_others_are_there(tmp_path):
    taken = []

    def put(found):
        if found[0] == 6:
            raise MemoryError("no room for it")
        taken.append(int(found[0]))

    with contextlib.closing(direct.DirectReader()) as reading:
        finish = reading.start(pieces_of(tmp_path / "data", 20, put))
        with pytest.raises(MemoryError, match="no room for it"):
            finish()
        assert sorted(taken) == [number for number in range(0, 40, 2) if number != 6]


# -- nothing is left --------------------------------------------------------------------------


def test_no_thread_and_no_file_is_left_after_restores(step, mesh42):
    path, tree = step
    like = trees.abstract(placed(tree, mesh42, {"large": P("data", "model")}))
    before = open_things()
    for _ in range(10):
        ckptmgr.restore(path, like)
        with seen() as found:
            ckptmgr.restore(path)
        assert_all_direct(found)
    # TensorStore may be about to close what it opened last
    assert len(open_things() - before) < 10


def test_no_thread_and_no_file_is_left_where_placing_a_chunk_fails(step, monkeypatch):
    path, _ = step

    def broken(*args):
        raise ZeroDivisionError("as a bug would")

    like = {"small2": np.zeros((50, 11), np.float64)}
    ckptmgr.restore(path, like, partial=True, cast=True)
    monkeypatch.setattr(reader, "_scatter", broken)
    with seen() as found, pytest.raises(ZeroDivisionError):
        ckptmgr.restore(path, like, partial=True, cast=True)
    assert found.pieces and not found.left
