"""What a directory of many steps costs: who reads which of them, and on which thread."""

import json
import shutil
import threading
from dataclasses import replace

import numpy as np
import pytest

from ckptmgr import CheckpointManager, Heartbeat, KeepLast, Options
from ckptmgr.core import layout
from ckptmgr.core.manifest import Manifest
from ckptmgr.engine.catalog import Catalog
from ckptmgr.engine.overview import LAST_WRITTEN, SETTLED_SECONDS, Overview, last_saved
from ckptmgr.engine.store import Store
from ckptmgr.errors import StoreError
from ckptmgr.events import Clock
from ckptmgr.reading import catalog_of

COUNT = 30
STATE = {"w": np.arange(4.0)}


class Later(Clock):
    """By which all files have settled."""

    def time(self) -> float:
        return super().time() + 2 * SETTLED_SECONDS


class Noting(Store):
    """Notes what is read, by thread."""

    def __init__(self, root):
        super().__init__(str(root))
        self.read: list[tuple[str, str]] = []

    def read_file(self, name):
        self.read.append((threading.current_thread().name, name))
        return super().read_file(name)

    def is_dir(self, name):
        self.read.append((threading.current_thread().name, name))
        return super().is_dir(name)

    def steps_read(self, thread=None):
        """The steps of which anything was read, in any thread or in this one."""
        names = (name for by, name in self.read if thread in (None, by))
        return {int(step) for name in names if (step := name.partition("/")[0]).isdecimal()}

    def manifests(self):
        """The steps whose manifests were read, in order."""
        names = (name.partition("/") for _, name in self.read)
        return [int(step) for step, _, file in names if file == layout.MANIFEST]


@pytest.fixture
def root(tmp_path):
    """Steps 1 to `COUNT`: one that was saved, and copies of it with their own numbers."""
    with CheckpointManager(tmp_path, Options(heartbeat=None)) as manager:
        manager.save(1, STATE)
    document = Manifest.from_json((tmp_path / "1" / layout.MANIFEST).read_bytes())
    for step in range(2, COUNT + 1):
        shutil.copytree(tmp_path / "1", tmp_path / str(step))
        write(tmp_path, replace(document, step=step, attempt=f"{step:016x}"))
    return tmp_path


def write(root, document):
    (root / str(document.step) / layout.MANIFEST).write_text(document.to_json())


def manifest(root, step):
    return Manifest.from_json((root / str(step) / layout.MANIFEST).read_bytes())


def break_manifest(root, step):
    """Another byte, the same size."""
    path = root / str(step) / layout.MANIFEST
    text = bytearray(path.read_bytes())
    text[len(text) // 2] ^= 1
    path.write_bytes(text)


def overview_of(store):
    return Overview(Catalog(store, Clock(), lambda: "a"), Later())


def shown(entries):
    return [
        (e.step, e.manifest and e.manifest.attempt, e.suspect, e.verified, e.pinned)
        for e in entries
    ]


def test_latest_step_reads_the_newest_step_only(root):
    store = Noting(root)
    with CheckpointManager(root, Options(read_only=True), store=store) as manager:
        assert manager.latest_step() == COUNT
    assert store.steps_read() == {COUNT}


def test_latest_step_reads_no_step_below_the_newest_good_one(root):
    break_manifest(root, COUNT)
    (root / str(COUNT - 1) / layout.MANIFEST).unlink()
    store = Noting(root)
    with CheckpointManager(root, Options(read_only=True), store=store) as manager:
        assert manager.latest_step() == COUNT - 2
    assert store.steps_read() == {COUNT, COUNT - 1, COUNT - 2}


def test_a_manager_that_only_reads_opens_without_reading_a_step(root):
    store = Noting(root)
    CheckpointManager(root, Options(read_only=True), store=store).close()
    assert store.read == []


def test_a_manager_that_saves_opens_reading_no_more_than_the_steps_written_last(root):
    store = Noting(root)
    CheckpointManager(root, store=store).close()
    assert store.manifests() == list(range(COUNT, COUNT - LAST_WRITTEN, -1))


def test_save_reads_no_other_step_on_the_thread_that_calls_it(root):
    store = Noting(root)
    options = Options(retention=KeepLast(2 * COUNT))
    with CheckpointManager(root, options, store=store) as manager:
        store.read.clear()
        manager.save(COUNT + 1, STATE)
        here = store.steps_read(threading.current_thread().name)
    assert here <= {COUNT + 1}


def test_retention_reads_each_manifest_once(root):
    store = Noting(root)
    options = Options(retention=KeepLast(2 * COUNT), heartbeat=None)
    with CheckpointManager(root, options, store=store, clock=Later()) as manager:
        manager.save(COUNT + 1, STATE)
        manager.wait()
        assert set(range(1, COUNT + 1)) <= set(store.manifests())
        store.read.clear()
        manager.save(COUNT + 2, STATE)
        manager.wait()
        assert set(store.manifests()) <= {COUNT + 1, COUNT + 2}


def test_an_overview_reads_only_what_has_changed(root):
    store = Noting(root)
    overview = overview_of(store)
    assert [entry.step for entry in overview.committed()] == list(range(COUNT, 0, -1))
    store.read.clear()
    overview.committed()
    assert store.read == []
    write(root, replace(manifest(root, 7), attempt="b" * 16))
    found = {entry.step: entry.manifest.attempt for entry in overview.committed()}
    assert found[7] == "b" * 16
    assert store.manifests() == [7]


def test_an_overview_reads_what_has_just_changed_again(root):
    store = Noting(root)
    overview = Overview(Catalog(store, Clock(), lambda: "a"), Clock())
    write(root, replace(manifest(root, 7), attempt="b" * 16))
    overview.committed()
    store.read.clear()
    overview.committed()
    assert 7 in store.manifests()


def damage_on_record(root, catalog):
    catalog.mark_damaged(catalog.entry(9), "broken")


def damage_of_another_attempt(root, catalog):
    damage_on_record(root, catalog)
    write(root, replace(manifest(root, 9), attempt="c" * 16))


def unreadable_doubt(root, catalog):
    place = root / layout.suspect_name(9)
    place.parent.mkdir(parents=True)
    place.write_text("not JSON")


def no_manifest(root, catalog):
    (root / "9" / layout.MANIFEST).unlink()


def another_step(root, catalog):
    shutil.rmtree(root / "9")
    shutil.copytree(root / "8", root / "9")


CHANGES = {
    "damage on record": damage_on_record,
    "damage on record, of another attempt": damage_of_another_attempt,
    "a suspect": lambda root, catalog: catalog.mark_suspects("torn"),
    "a doubt that cannot be read": unreadable_doubt,
    "verified": lambda root, catalog: catalog.record_verdict(9, manifest(root, 9).attempt, ()),
    "a pin": lambda root, catalog: catalog.records.put_pin(9, "the paper", 0.0),
    "a pin taken back": lambda root, catalog: (
        catalog.records.put_pin(9, "the paper", 0.0),
        catalog.records.remove_pin(9),
    ),
    "a broken manifest": lambda root, catalog: break_manifest(root, 9),
    "no manifest": no_manifest,
    "deleted": lambda root, catalog: shutil.rmtree(root / "9"),
    "the manifest of another step": another_step,
    "a copy under another number": lambda root, catalog: shutil.copytree(root / "9", root / "9999"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_an_overview_sees_what_the_catalog_sees(root, change):
    catalog = catalog_of(str(root))
    overview = Overview(catalog, Later())
    assert shown(overview.committed()) == shown(catalog.committed())
    before = shown(catalog.committed())
    change(root, catalog)
    assert shown(overview.committed()) == shown(catalog.committed())
    assert (shown(catalog.committed()) == before) == (
        change in (CHANGES["a pin taken back"], CHANGES["a copy under another number"])
    )


def test_a_pin_counts_where_its_directory_cannot_be_listed(root):
    class Unlisted(Store):
        def names(self, name=""):
            if name.endswith("pins"):
                raise StoreError("cannot list")
            return super().names(name)

    catalog_of(str(root)).records.put_pin(9, "the paper", 0.0)
    overview = overview_of(Unlisted(str(root)))
    for _ in range(2):
        assert [e.step for e in overview.committed() if e.pinned] == [9]


def test_an_overview_keeps_nothing_large_and_forgets_what_is_gone(root):
    write(root, replace(manifest(root, 9), extra="x" * 10_000))
    overview = overview_of(Store(str(root)))
    for entry in overview.committed():
        assert (entry.manifest.files, entry.manifest.topology, entry.manifest.extra) == (
            {},
            {},
            None,
        )
    shutil.rmtree(root / "9")
    overview.committed()
    assert 9 not in overview._known


def test_the_latest_save_is_found_by_its_time_and_not_its_number(root):
    write(root, replace(manifest(root, 12), created=manifest(root, 12).created + 100))
    assert last_saved(catalog_of(str(root))).step == 12


def test_the_latest_save_is_a_whole_one(root):
    write(root, replace(manifest(root, 12), created=manifest(root, 12).created + 100))
    write(root, replace(manifest(root, 13), created=manifest(root, 13).created + 200))
    break_manifest(root, 13)
    assert last_saved(catalog_of(str(root))).step == 12
    shutil.rmtree(root)
    root.mkdir()
    assert last_saved(catalog_of(str(root))) is None


def test_heartbeats_are_counted_on_from_the_latest_save_after_a_rollback(tmp_path):
    options = Options(heartbeat=Heartbeat(every_saves=4))
    with CheckpointManager(tmp_path, options) as manager:
        for step in (10, 20):
            manager.save(step, STATE)
    with CheckpointManager(tmp_path, options) as manager:
        manager.save(5, STATE)
    kinds = []
    for step in (6, 7):
        with CheckpointManager(tmp_path, options) as manager:
            manager.save(step, STATE)
            manager.wait()
            kinds.append(json.loads((tmp_path / str(step) / layout.MANIFEST).read_bytes()))
    assert [(k["body"]["kind"], k["body"]["since_heartbeat"]) for k in kinds] == [
        ("heartbeat", 0),
        ("async", 1),
    ]
