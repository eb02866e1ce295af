"""Places in a leaf node are those that TensorStore tells; no other bytes than a node's do harm."""

import os
import re
import struct
import time
import tracemalloc
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorstore as ts
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptmgr.core import ocdbt
from ckptmgr.core.ocdbt import Place
from ckptmgr.engine import arrays
from ckptmgr.errors import StoreError

PLAIN = {"compression": None, "max_decoded_node_bytes": 100_000_000}
LOCATION = re.compile(r"(?:btreenode|value):(.*?):(.*?):(\d+):(\d+)")


class Node(NamedTuple):
    """The root of a database, and what TensorStore says of its entries."""

    data: bytes
    base: str
    entries: Any
    height: int


def spec(path, **config):
    base = {"driver": "file", "path": f"{os.fspath(path)}/"}
    return {"driver": "ocdbt", "base": base, "config": {**PLAIN, **config}}


def write(database, values):
    """All in one transaction, so that they lie in one tree of nodes and one data file."""
    transaction = ts.Transaction()
    into = ts.KvStore.open(database, context=arrays.context()).result()
    into = into.with_transaction(transaction)
    for key, value in values.items():
        into.write(key, value)
    transaction.commit_sync()


def root_of(path):
    base = ts.KvStore.open({"driver": "file", "path": f"{os.fspath(path)}/"}).result()
    location = ts.ocdbt.dump(base).result()["versions"][-1]["root"]["location"]
    where = LOCATION.fullmatch(location)
    with open(os.path.join(path, where[1] + where[2]), "rb") as file:
        file.seek(int(where[3]))
        data = file.read(int(where[4]))
    told = ts.ocdbt.dump(base, location).result()
    return Node(data, where[1], told["entries"], told["height"])


def as_told(node):
    """The entries as `ocdbt.leaf_node` gives them."""
    found = {}
    for entry in node.entries:
        key = entry["key"].decode()
        if "inline_value" in entry:
            found[key] = entry["inline_value"]
        else:
            base, file, offset, length = LOCATION.fullmatch(entry["indirect_value"]).groups()
            assert base.startswith(node.base)
            found[key] = Place(base[len(node.base) :] + file, int(offset), int(length))
    return found


def assert_as_told(path, values):
    """Every place is as TensorStore tells, and the values are there."""
    node = root_of(path)
    assert node.height == 0
    found = ocdbt.leaf_node(node.data)
    assert found == as_told(node)
    assert found.keys() == values.keys()
    for key, place in found.items():
        if isinstance(place, Place):
            with open(os.path.join(path, node.base + place.file), "rb") as file:
                file.seek(place.offset)
                place = file.read(place.length)
        assert place == values[key], key


def some(count, seed, name="params.layer_{0}.kernel/{1}.{2}"):
    """Values of which some lie in the node and some do not, empty ones among them."""
    rng = np.random.default_rng(seed)
    sizes = rng.choice([0, 1, 4, 100, 101, 127, 128, 300, 5000], count)
    return {name.format(i // 7, i % 7, i): rng.bytes(size) for i, size in enumerate(sizes)}


# -- what TensorStore writes ------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 127, 128, 129, 3000])
def test_every_key_lies_where_tensorstore_says(count, tmp_path):
    values = some(count, count)
    write(spec(tmp_path, max_inline_value_bytes=100), values)
    assert_as_told(tmp_path, values)


@pytest.mark.parametrize("most", [0, 1024])
def test_values_that_all_lie_in_the_node_or_all_outside_are_found(most, tmp_path):
    values = {f"k{i}": bytes([i]) * (i + 1) for i in range(200)}
    write(spec(tmp_path, max_inline_value_bytes=most), values)
    kinds = {type(place) for place in ocdbt.leaf_node(root_of(tmp_path).data).values()}
    assert kinds == {bytes if most else Place}
    assert_as_told(tmp_path, values)


def test_values_in_several_data_files_are_found(tmp_path):
    values = {}
    for turn in range(5):
        new = some(50, turn, f"t{turn}/{{1}}/{{2}}")
        write(spec(tmp_path, max_inline_value_bytes=100), new)
        values |= new
    small = {**spec(tmp_path, max_inline_value_bytes=100), "target_data_file_size": 10_000}
    new = some(50, 9, "small/{2}")
    write(small, new)
    values |= new
    places = ocdbt.leaf_node(root_of(tmp_path).data).values()
    assert len({place.file for place in places if isinstance(place, Place)}) > 6
    assert_as_told(tmp_path, values)


def test_values_of_merged_databases_are_found_below_the_paths_of_theirs(tmp_path):
    values = {}
    names = ["ocdbt.process_0", "ocdbt.process_1", "ocdbt.process_10"]
    for number, name in enumerate(names):
        rng = np.random.default_rng(number)
        new = {f"leaf{i}/{number}.0": rng.bytes(i * 40) for i in range(60)}
        (tmp_path / name).mkdir()
        write(arrays.database(f"{tmp_path}/{name}"), new)
        values |= new
    arrays.merge(str(tmp_path), names, len(values))
    node = root_of(tmp_path)
    places = [p for p in ocdbt.leaf_node(node.data).values() if isinstance(p, Place)]
    found = {(node.base + place.file).split("/")[0] for place in places}
    assert found == set(names)
    assert_as_told(tmp_path, values)


def test_values_of_one_merged_database_are_found_too(tmp_path):
    values = some(300, 4)
    (tmp_path / "ocdbt.process_0").mkdir()
    write(arrays.database(f"{tmp_path}/ocdbt.process_0"), values)
    arrays.merge(str(tmp_path), ["ocdbt.process_0"], len(values))
    assert_as_told(tmp_path, values)


@pytest.mark.parametrize("more", [-1, 1])
def test_a_merge_that_has_other_than_the_keys_that_were_written_is_refused(tmp_path, more):
    values = some(300, 4)
    (tmp_path / "ocdbt.process_0").mkdir()
    write(arrays.database(f"{tmp_path}/ocdbt.process_0"), values)
    with pytest.raises(
        StoreError, match=f"{len(values) + more} keys were written and {len(values)}"
    ):
        arrays.merge(str(tmp_path), ["ocdbt.process_0"], len(values) + more)


def test_long_keys_and_those_of_any_alphabet_are_found(tmp_path):
    letters = "a.é/ü漢😀\x00\x7f"
    keys = {letters[i % 9] * (i * 37 % 700 + 1) + str(i) for i in range(150)}
    keys |= {"x" * 20_000, "x" * 20_000 + "y", "x" * 19_999 + "é"}
    values = {key: key.encode()[:150] for key in keys}
    write(spec(tmp_path, max_inline_value_bytes=100), values)
    assert_as_told(tmp_path, values)


@settings(max_examples=40, deadline=None)
@given(
    values=st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=40), st.binary(max_size=40)
    ).filter(bool),
    most=st.integers(0, 40),
    turns=st.integers(1, 3),
)
def test_any_keys_and_values_are_found(tmp_path_factory, values, most, turns):
    path = tmp_path_factory.mktemp("any")
    keys = list(values)
    for turn in range(turns):
        part = {key: values[key] for key in keys[turn::turns]}
        if part:
            write(spec(path, max_inline_value_bytes=most), part)
    assert_as_told(path, values)


def test_keys_that_are_no_text_are_refused(tmp_path):
    write(spec(tmp_path), {b"\xff\xfe": b"1", b"a": b"2"})
    with pytest.raises(ValueError):
        ocdbt.leaf_node(root_of(tmp_path).data)


def test_a_compressed_node_is_refused(tmp_path):
    write(spec(tmp_path, compression={"id": "zstd", "level": 0}), some(100, 1))
    with pytest.raises(ValueError, match="compression"):
        ocdbt.leaf_node(root_of(tmp_path).data)


def test_an_interior_node_is_refused(tmp_path):
    write(spec(tmp_path, max_decoded_node_bytes=1000), some(200, 1))
    node = root_of(tmp_path)
    assert node.height > 0
    with pytest.raises(ValueError, match="height"):
        ocdbt.leaf_node(node.data)


# -- what nobody wrote ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    """Small nodes, and one of 3,000 keys."""
    found = []
    for count in (1, 3, 40, 3000):
        path = tmp_path_factory.mktemp("nodes")
        write(spec(path, max_inline_value_bytes=100), some(count, count))
        found.append(root_of(path).data)
    path = tmp_path_factory.mktemp("merged")
    for name in ("ocdbt.process_0", "ocdbt.process_1"):
        (path / name).mkdir()
        write(arrays.database(f"{path}/{name}"), {f"{name}/{i}": b"v" * 2000 for i in range(20)})
    arrays.merge(str(path), ["ocdbt.process_0", "ocdbt.process_1"], 40)
    found.append(root_of(path).data)
    return found


def outcome(data):
    """What comes of the bytes: a mapping or None for ValueError; anything else is raised."""
    try:
        found = ocdbt.leaf_node(data)
    except ValueError:
        return None
    assert isinstance(found, Mapping)
    for key, place in found.items():
        assert isinstance(key, str) and isinstance(place, (bytes, Place))
    return found


def relength(data):
    """The same bytes as a node that is as long as it says, so that what follows is looked at."""
    return data[:4] + struct.pack("<Q", len(data)) + data[12:]


def test_a_node_that_is_cut_off_anywhere_is_refused(nodes):
    for data in (*nodes[:3], nodes[4]):
        for size in range(len(data)):
            with pytest.raises(ValueError):
                ocdbt.leaf_node(data[:size])
    large = nodes[3]
    for size in range(0, len(large), 997):
        with pytest.raises(ValueError):
            ocdbt.leaf_node(large[:size])


def test_a_node_that_is_cut_off_and_says_so_is_a_mapping_or_refused(nodes):
    for data in (*nodes[:3], nodes[4]):
        for size in range(12, len(data)):
            outcome(relength(data[:size]))


def test_any_altered_byte_gives_a_mapping_or_is_refused(nodes):
    for data in (*nodes[:3], nodes[4]):
        for at in range(len(data)):
            for flip in (0x01, 0x80, 0xFF):
                outcome(data[:at] + bytes([data[at] ^ flip]) + data[at + 1 :])


def test_an_altered_byte_of_a_large_node_takes_little_time_and_memory(nodes):
    data = nodes[3]
    tracemalloc.start()
    started = time.process_time()
    for at in range(12, len(data), len(data) // 60):
        outcome(data[:at] + b"\xff" + data[at + 1 :])
    took = time.process_time() - started
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 64 * 2**20
    assert took < 30


@st.composite
def changes(draw):
    """What happens to a node's bytes, as places (fractions of it) and what comes there."""
    place = st.floats(0, 1, exclude_max=True)
    runs = st.builds(
        lambda byte, n: bytes([byte]) * n,
        st.sampled_from([0, 1, 0x7F, 0x80, 0xFF]),
        st.integers(1, 300),
    )
    one = st.tuples(
        st.sampled_from(["set", "insert", "delete", "repeat"]),
        place,
        st.binary(min_size=1, max_size=12) | runs,
    )
    return draw(st.lists(one, min_size=1, max_size=6)), draw(st.booleans())


def changed(data, how, says_so):
    for what, where, piece in how:
        at = int(where * len(data))
        if what == "set":
            data = data[:at] + piece + data[at + len(piece) :]
        elif what == "insert":
            data = data[:at] + piece + data[at:]
        elif what == "delete":
            data = data[:at] + data[at + len(piece) :]
        else:
            data = data[:at] + data[max(0, at - 50) : at] * len(piece) + data[at:]
    return relength(data) if says_so and len(data) > 12 else data


@settings(max_examples=400, deadline=None)
@given(which=st.sampled_from([0, 1, 2, 2, 4]), change=changes())
def test_whatever_happens_to_a_node_it_gives_a_mapping_or_is_refused(nodes, which, change):
    outcome(changed(nodes[which], *change))


@settings(max_examples=300, deadline=None)
@given(body=st.binary(max_size=300), height=st.booleans())
def test_any_bytes_behind_a_header_give_a_mapping_or_are_refused(body, height):
    head = ocdbt._MAGIC + bytes(8) + (b"\0\0\0" if height else b"")
    outcome(relength(head + body))


@pytest.mark.parametrize("byte", [0x80, 0xFF])
def test_a_number_without_an_end_is_refused_at_once(byte):
    for where in range(8):
        # as the number of files, of keys, and within the lists that follow
        data = ocdbt._MAGIC + bytes(8 + 3) + b"\1" * where + bytes([byte]) * 2**18 + b"\1" * 50
        started = time.process_time()
        with pytest.raises(ValueError):
            ocdbt.leaf_node(relength(data))
        assert time.process_time() - started < 1


def test_counts_larger_than_a_node_are_refused_without_room_for_them():
    many = b"\xff" * 8 + b"\x7f"  # 2**63 - 1
    tracemalloc.start()
    for files in (b"\0", many):
        for count in (many, b"\1" + many, b"\2\1" + many):
            with pytest.raises(ValueError):
                ocdbt.leaf_node(relength(ocdbt._MAGIC + bytes(8 + 3) + files + count + bytes(200)))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**20
