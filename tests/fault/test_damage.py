"""What is damaged is named, passed over and put aside; wrong values are never returned."""

import shutil

import pytest

import ckptmgr
from ckptmgr.core import layout
from tests.fault.common import (
    LIMIT,
    assert_state,
    contents,
    manager,
    numbers,
    reader,
    state,
    target,
)


@pytest.fixture
def root(tmp_path):
    """Steps 1, 2 and 3."""
    with manager(tmp_path) as found:
        for step in (1, 2, 3):
            found.save(step, state(step), metrics={"loss": 0.5}).result()
    return tmp_path


def flip(file, at=None):
    data = bytearray(file.read_bytes())
    data[len(data) // 2 if at is None else at] ^= 1
    file.write_bytes(data)


HARMS = {
    "missing": lambda file: file.unlink(),
    "empty": lambda file: file.write_bytes(b""),
    "cut short": lambda file: file.write_bytes(file.read_bytes()[:-2]),
    "longer": lambda file: file.write_bytes(file.read_bytes() + b"x"),
    "altered": flip,
}

# Every kind of file that a restore, by us or by Orbax, depends on.
KINDS = {
    "the manifest": layout.MANIFEST,
    "the tree": layout.tree_file("default"),
    "the receipt": layout.receipt_file("default", 0),
    "Orbax's tree": layout.pytree_metadata("default"),
    "Orbax's shardings": layout.sharding_file("default"),
    "Orbax's array metadata": layout.array_metadatas("default", 0),
    "Orbax's step metadata": layout.CHECKPOINT_METADATA,
    "the metrics": layout.metrics_file(),
    "the database": "default/" + layout.OCDBT_MANIFEST,
    "the database's nodes": "default/d/*",
}


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_metadata_file_is_named(kind, harm, root):
    (file,) = (root / "3").glob(KINDS[kind])
    HARMS[harm](file)
    name = str(file.relative_to(root / "3"))
    with reader(root) as found:
        with pytest.raises(ckptmgr.CorruptCheckpoint) as caught:
            found.restore(step=3)
        assert caught.value.step == 3
        assert name in {problem.file for problem in caught.value.problems}
        assert "step 3" in str(caught.value) and name in str(caught.value)
        latest = found.restore_latest(target())
        assert latest.step == 2
        assert_state(latest.state, 2)
        assert [skipped.step for skipped in latest.skipped] == [3]
        assert name in latest.skipped[0].reason


@pytest.mark.parametrize("harm", ["missing", "empty", "cut short", "longer"])
def test_a_data_file_of_another_size_is_named(harm, root):
    for file in (root / "3").glob("default/ocdbt.process_0/d/*"):
        name, before = str(file.relative_to(root / "3")), file.read_bytes()
        HARMS[harm](file)
        with pytest.raises(ckptmgr.CorruptCheckpoint) as caught:
            reader(root).restore(step=3)
        assert name in {problem.file for problem in caught.value.problems}
        file.write_bytes(before)
    assert_state(reader(root).restore(step=3), 3)


def test_one_flipped_bit_anywhere_in_a_step_is_an_error_or_harmless_never_other_values(root):
    noticed = set()
    for file in sorted(path for path in (root / "3").rglob("*") if path.is_file()):
        before = file.read_bytes()
        for at in sorted({0, len(before) // 3, len(before) // 2, len(before) - 1}):
            flip(file, at)
            try:
                found = reader(root).restore(step=3)
            except ckptmgr.CorruptCheckpoint:
                noticed.add(str(file.relative_to(root / "3")))
            else:
                assert_state(found, 3)
            file.write_bytes(before)
    assert_state(reader(root).restore(step=3), 3)
    assert len(noticed) >= len(KINDS)


def test_every_flipped_byte_of_the_manifest_is_noticed(root):
    file = root / "3" / layout.MANIFEST
    before = file.read_bytes()
    for at in range(len(before.rstrip())):
        flip(file, at)
        assert reader(root).latest_step() == 2, at
        file.write_bytes(before)
    assert reader(root).latest_step() == 3


def test_a_flipped_bit_in_array_data_names_the_leaf_and_gives_no_values(tmp_path):
    values = {"big": state(1)["w"].repeat(4000)}  # too long to be kept inside a tree node
    with manager(tmp_path) as found:
        found.save(1, values).result()
        files = list((tmp_path / "1").glob("default/ocdbt.process_0/d/*"))
        file = max(files, key=lambda path: path.stat().st_size)
        data = file.read_bytes()
        start = data.index(values["big"].tobytes()[:400])
        for at in (start, start + 40_000, start + values["big"].nbytes - 1):
            flip(file, at)
            with pytest.raises(ckptmgr.CorruptCheckpoint, match="leaf big") as caught:
                found.restore()
            assert [problem.leaf for problem in caught.value.problems] == ["big"]
            file.write_bytes(data)
        assert (found.restore()["big"] == values["big"]).all()


def test_values_are_not_checked_where_the_options_say_so_and_structure_is(tmp_path):
    values = {"big": state(1)["w"].repeat(4000)}
    integrity = ckptmgr.Integrity(verify_on_restore=False)
    with manager(tmp_path, integrity=integrity) as found:
        found.save(1, values).result()
        files = list((tmp_path / "1").glob("default/ocdbt.process_0/d/*"))
        file = max(files, key=lambda path: path.stat().st_size)
        flip(file, file.read_bytes().index(values["big"].tobytes()[:400]) + 40_000)
        assert (found.restore()["big"] != values["big"]).sum() == 1
        file.unlink()
        with pytest.raises(ckptmgr.CorruptCheckpoint, match="missing"):
            found.restore()


def test_restore_latest_says_what_it_passed_over_and_why(root):
    (root / "3" / layout.MANIFEST).unlink()
    flip(root / "2" / layout.tree_file("default"))
    with reader(root) as found:
        latest = found.restore_latest(target())
        assert latest.step == 1
        assert_state(latest.state, 1)
        assert [skipped.step for skipped in latest.skipped] == [3, 2]
        assert layout.MANIFEST in latest.skipped[0].reason
        assert layout.tree_file("default") in latest.skipped[1].reason


def test_restore_latest_raises_where_every_step_is_damaged(root):
    for step in (1, 2, 3):
        flip(root / str(step) / layout.tree_file("default"))
    with pytest.raises(ckptmgr.CorruptCheckpoint) as caught:
        reader(root).restore_latest(target())
    assert caught.value.step == 3
    assert len(caught.value.problems) == 3


def test_restore_latest_raises_where_every_step_lost_its_manifest(root):
    for step in (1, 2, 3):
        (root / str(step) / layout.MANIFEST).unlink()
    with pytest.raises(ckptmgr.CorruptCheckpoint, match="step 3"):
        reader(root).restore_latest(target())


def test_restore_latest_is_none_where_there_never_was_a_step(tmp_path):
    assert manager(tmp_path).restore_latest(target()) is None
    (tmp_path / "900").mkdir()
    assert manager(tmp_path).restore_latest(target()) is None


def test_restore_latest_of_a_target_that_does_not_fit_is_no_damage(root):
    with pytest.raises(ckptmgr.TreeMismatch) as caught:
        reader(root).restore_latest({**target(), "more": 1})
    assert caught.value.missing == ("more",)


def test_a_restore_of_a_damaged_latest_step_raises_and_does_not_fall_back(root):
    flip(root / "3" / layout.tree_file("default"))
    with pytest.raises(ckptmgr.CorruptCheckpoint, match="step 3"):
        reader(root).restore()


def test_a_step_of_ours_without_its_manifest_is_damaged_not_foreign(root):
    (root / "3" / layout.MANIFEST).unlink()
    with reader(root) as found:
        assert numbers(found) == (1, 2)
        with pytest.raises(ckptmgr.CorruptCheckpoint, match=layout.MANIFEST):
            found.restore(step=3)
        with pytest.raises(ckptmgr.CorruptCheckpoint, match=layout.MANIFEST):
            ckptmgr.restore(root / "3")


@pytest.mark.parametrize("also", ["default/_METADATA", "default", layout.CHECKPOINT_METADATA])
def test_a_step_of_ours_that_lost_more_than_its_manifest_is_not_taken_for_foreign(also, root):
    (root / "3" / layout.MANIFEST).unlink()
    path = root / "3" / also
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    with reader(root) as found:
        assert numbers(found) == (1, 2)
        assert found.restore_latest(target()).step == 2


class Iterator:
    """The least that counts as a data iterator."""

    def __init__(self):
        self.state = {"at": 0}

    def get_state(self):
        return dict(self.state)

    def set_state(self, found):
        self.state = dict(found)


def test_a_step_of_iterators_only_without_its_manifest_is_damaged_not_foreign(tmp_path):
    with manager(tmp_path) as found:
        found.save(1, ckptmgr.Items(data=Iterator())).result()
        found.save(2, ckptmgr.Items(data=Iterator())).result()
        (tmp_path / "2" / layout.MANIFEST).unlink()
        assert numbers(found) == (1,)
        with pytest.raises(ckptmgr.CorruptCheckpoint, match=layout.MANIFEST):
            found.restore(step=2)


def test_the_state_of_an_iterator_is_verified(tmp_path):
    with manager(tmp_path) as found:
        found.save(1, ckptmgr.Items(data=Iterator(), model=state(1))).result()
        flip(tmp_path / "1" / layout.state_file("data", 0))
        with pytest.raises(ckptmgr.CorruptCheckpoint, match="data/ckptmgr/state"):
            found.restore()


def test_all_that_is_wrong_is_told_at_once(root):
    names = [layout.tree_file("default"), layout.sharding_file("default"), layout.metrics_file()]
    for name in names:
        flip(root / "3" / name)
    with pytest.raises(ckptmgr.CorruptCheckpoint) as caught:
        reader(root).restore(step=3)
    assert sorted(problem.file for problem in caught.value.problems) == sorted(names)


def test_saving_over_a_damaged_step_moves_it_to_quarantine_untouched(root):
    (root / "3" / layout.MANIFEST).unlink()
    damaged = contents(root / "3")
    with manager(root) as found:
        found.save(3, state(30)).result(LIMIT)
        assert numbers(found) == (1, 2, 3)
        assert_state(found.restore(step=3), 30)
    (aside,) = (root / layout.quarantine_name(3, "")).parent.iterdir()
    assert contents(aside) == damaged


def test_a_step_copied_under_another_number_is_not_that_step(root):
    shutil.copytree(root / "3", root / "8")
    with reader(root) as found:
        assert numbers(found) == (1, 2, 3)
        with pytest.raises(ckptmgr.CorruptCheckpoint, match="manifest of step 3"):
            found.restore(step=8)


@pytest.mark.parametrize("version", ["999", '"abc"', "null", "0", "true"])
def test_an_unknown_format_version_is_refused(version, root):
    file = root / "3" / layout.MANIFEST
    file.write_text(file.read_text().replace('"format":1', f'"format":{version}'))
    with reader(root) as found:
        assert found.latest_step() == 2
        why = "upgrade ckptmgr" if version == "999" else "format version|digest"
        with pytest.raises(ckptmgr.CorruptCheckpoint, match=why):
            found.restore(step=3)
