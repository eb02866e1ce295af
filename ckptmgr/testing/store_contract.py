"""What ckptmgr asks of a file system, as checks that run on anybody's.

    for outcome in store_contract.run("/mnt/checkpoints"):
        print(outcome)

What a crash of the machine leaves cannot be tried from a program; what can is whether renames
replace, refuse and exchange as the commit needs them, what others see meanwhile, and whether what
was written comes back.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType

from ckptmgr.engine.store import Store
from ckptmgr.errors import StoreError
from ckptmgr.testing.outcome import Broken, Outcome, outcome_of

Check = Callable[[Store], None]
_checks: dict[str, Check] = {}

CHECKS: Mapping[str, Check] = MappingProxyType(_checks)
"""Each check by the sentence it proves; it raises `AssertionError`, or what the store raises."""

_RACERS = 8


def run(
    directory: str | os.PathLike[str], make_store: Callable[[str], Store] = Store
) -> tuple[Outcome, ...]:
    """Runs the checks; a check that fails is an outcome, not an exception.

    Args:
      directory: created if it is not there; what the checks write is removed.
      make_store: what is tested, called with the absolute path of its root.
    """
    root = os.path.abspath(directory)
    os.makedirs(root, exist_ok=True)
    return tuple(
        outcome_of(sentence, root, functools.partial(_in_store, check, make_store))  # type: ignore[misc]
        for sentence, check in CHECKS.items()
    )


def _in_store(check: Check, make_store: Callable[[str], Store], own: str) -> None:
    check(make_store(own))


def _proves(sentence: str) -> Callable[[Check], Check]:
    def add(check: Check) -> Check:
        _checks[sentence] = check
        return check

    return add


def _expect(holds: bool, what: str) -> None:
    if not holds:
        raise Broken(what)


def _make(store: Store, name: str, text: bytes) -> None:
    store.make_dir(name)
    store.write_file(f"{name}/file", text)


@_proves("what was written is read back, byte for byte, and has its size")
def _write_and_read(store: Store) -> None:
    data = bytes(range(256)) * 1000
    store.make_dir("a/b")
    for name, text in (("a/b/whole", data), ("a/b/empty", b"")):
        store.write_file(name, text)
        _expect(store.read_file(name) == text, f"{name} reads otherwise")
    store.put_file("a/b/put", data)
    _expect(store.read_file("a/b/put") == data, "a put file reads otherwise")
    sizes = store.sizes("a")
    wanted = {"b/whole": len(data), "b/empty": 0, "b/put": len(data)}
    _expect(sizes == wanted, f"sizes are {sizes}, not {wanted}")


@_proves("files and directories can be synced, and are listed with their sizes")
def _sync(store: Store) -> None:
    _make(store, "a/b", b"12345")
    found = store.sync_tree("a")
    _expect(found == {"b/file": 5}, f"sync_tree says {found}")
    store.sync_path("a/b/file")
    store.sync_path("a")
    store.sync_path("")


@_proves("a rename moves a directory with all that is in it")
def _rename(store: Store) -> None:
    _make(store, "old", b"x")
    _expect(store.rename("old", "new"), "the rename said no")
    _expect(store.read_file("new/file") == b"x", "the file is another one")
    _expect(not store.exists("old"), "the old name is still there")
    _expect(store.names() == ["new"], f"there is {store.names()}")


@_proves("a rename onto a directory that holds something is refused and changes nothing")
def _rename_refused(store: Store) -> None:
    _make(store, "old", b"mine")
    _make(store, "new", b"theirs")
    _expect(not store.rename("old", "new"), "it was not refused")
    _expect(store.read_file("new/file") == b"theirs", "the target was changed")
    _expect(store.read_file("old/file") == b"mine", "the source was changed")


@_proves("of several renames to one name exactly one wins")
def _rename_race(store: Store) -> None:
    for number in range(_RACERS):
        _make(store, f"attempt-{number}", str(number).encode())
    start = threading.Barrier(_RACERS)

    def race(number: int) -> bool:
        start.wait(30)
        return store.rename(f"attempt-{number}", "step")

    with ThreadPoolExecutor(_RACERS) as pool:
        won = list(pool.map(race, range(_RACERS)))
    _expect(sum(won) == 1, f"{sum(won)} of {_RACERS} won")
    _expect(store.read_file("step/file") == str(won.index(True)).encode(), "another one is there")


@_proves("two directories are exchanged in one step, or the file system says that it cannot")
def _exchange(store: Store) -> None:
    _make(store, "a", b"1")
    _make(store, "b", b"2")
    swapped = store.exchange("a", "b")
    found = store.read_file("a/file"), store.read_file("b/file")
    _expect(found == ((b"2", b"1") if swapped else (b"1", b"2")), f"there is {found}")


@_proves("while directories are exchanged a reader always finds one of the two")
def _exchange_seen(store: Store) -> None:
    _make(store, "a", b"1")
    _make(store, "b", b"1")
    if not store.exchange("a", "b"):
        return
    ended = threading.Event()
    missed: list[str] = []

    def look() -> None:
        while not ended.is_set():
            if not store.exists("a/file"):
                missed.append("a/file")

    reader = threading.Thread(target=look, name="store-contract-reader")
    reader.start()
    try:
        for _ in range(200):
            store.exchange("a", "b")
    finally:
        ended.set()
        reader.join()
    _expect(not missed, f"it was missed {len(missed)} times")


@_proves("a put file is whole whenever it is seen")
def _put_whole(store: Store) -> None:
    data = b"x" * 100_000
    seen: list[int] = []
    ended = threading.Event()

    def look() -> None:
        while not ended.is_set():
            for name in store.names("d"):
                seen.append(len(store.read_file(f"d/{name}")))

    store.make_dir("d")
    reader = threading.Thread(target=look, name="store-contract-reader")
    reader.start()
    try:
        for number in range(50):
            store.put_file(f"d/{number}", data)
    finally:
        ended.set()
        reader.join()
    short = [size for size in seen if size != len(data)]
    _expect(not short, f"{len(short)} of {len(seen)} looks found a part of one, {short[:3]}")


@_proves("removing takes a tree with all that is in it, and what is gone already is no error")
def _remove(store: Store) -> None:
    _make(store, "a/b/c", b"x")
    store.remove_file("a/b/c/file")
    store.remove_file("a/b/c/file")
    _make(store, "a/b/c", b"x")
    store.remove_tree("a")
    store.remove_tree("a")
    _expect(not store.exists("a"), "it is still there")
    _expect(store.names("a") == [], "a directory that is gone has names")


@_proves("what is not there is an error that names its path")
def _missing(store: Store) -> None:
    for call in (lambda: store.read_file("no/file"), lambda: store.rename("no", "else")):
        try:
            call()
        except StoreError as exc:
            _expect(store.root in str(exc), f"{exc} names no path")
        else:
            raise Broken("there was no error")


@_proves("names that differ in case only, with spaces or beyond ASCII are different names")
def _names(store: Store) -> None:
    names = ["step", "Step", "a b", "grün", "日本"]
    for name in names:
        _make(store, name, name.encode())
    _expect(sorted(store.names()) == sorted(names), f"there is {sorted(store.names())}")
    for name in names:
        found = store.read_file(f"{name}/file").decode()
        _expect(found == name, f"{name!r} holds {found!r}")
