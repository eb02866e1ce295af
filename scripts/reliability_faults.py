"""Alterations of what lies on disk, for scripts/reliability.py: each class gives its tally."""

import random
import shutil
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import tensorstore as ts

from reliability_systems import ITEM, same, state
from tests.fault.damages import files_of, flipped

INDEX = ("manifest.ocdbt", "d/ of the merged")


@dataclass
class Tally:
    """What came of the trials of one fault class."""

    tried: int = 0
    survived: int = 0
    lost: int = 0
    wrong: int = 0
    undetected: int = 0
    harmless: int = 0
    by_kind: Counter = field(default_factory=Counter)
    notes: Counter = field(default_factory=Counter)

    def add(self, survived: bool, lost=0, wrong=0, undetected=0, harmless="", note="") -> None:
        self.tried += 1
        self.survived += bool(survived)
        self.lost += lost
        self.wrong += wrong
        self.undetected += undetected
        self.harmless += bool(harmless)
        if harmless:
            self.by_kind[harmless] += 1
        if note:
            self.notes[note] += 1


@dataclass
class Place:
    """Where a fault class works, with what, and how much of it."""

    system: object
    root: str
    scale: int
    seed: int = 1

    def two_steps(self) -> Path:
        """A run with the steps 1 and 2; gives the directory of step 2."""
        manager = self.system.open(self.root)
        for step in (1, 2):
            self.system.save(manager, step, state(step))
            self.system.wait(manager)
        manager.close()
        return Path(self.root, "2")


# -- a step that is altered on disk ---------------------------------------------------------------


def judge(place: Place, tally: Tally, kind: str) -> None:
    """After step 2 was altered: what its restore says, what a resume gets, and what of step 1."""
    wrong = harmless = False
    try:
        found = place.system.restore(place.root, 2, state(2))
    except Exception:
        pass
    else:
        harmless = same(found, state(2))
        wrong = not harmless
    try:
        step, resumed = place.system.resume(place.root, state(2))
        survived = step in (1, 2) and same(resumed, state(step))
    except Exception:
        survived = False
    try:
        lost = not same(place.system.restore(place.root, 1, state(1)), state(1))
    except Exception:
        lost = True
    tally.add(
        survived,
        lost=lost,
        wrong=wrong,
        undetected=wrong,
        harmless=kind if harmless else "",
        note=f"wrong values: {kind}" if wrong else "",
    )


def group_of(kind: str) -> str:
    if kind == "d/ of a process":
        return "arrays"
    return "index" if kind.startswith(INDEX) else "metadata"


def bit_flips(place: Place, group: str) -> Tally:
    """One bit at a time, in the files of one group: the ends of each file, and places drawn from
    all their bytes alike."""
    step, tally, rng = place.two_steps(), Tally(), random.Random(place.seed)
    files = {name: kind for name, kind in files_of(step).items() if group_of(kind) == group}
    sizes = {name: (step / name).stat().st_size for name in files}
    ends = [(name, at) for name, size in sizes.items() for at in (0, size - 1)]
    count = (200 if group == "arrays" else 80) * place.scale
    drawn = rng.choices(list(sizes), weights=list(sizes.values()), k=count)
    for name, at in [*ends, *((name, rng.randrange(sizes[name])) for name in drawn)]:
        before = (step / name).read_bytes()
        (step / name).write_bytes(flipped(before, at, rng.randrange(8)))
        judge(place, tally, files[name])
        (step / name).write_bytes(before)
    return tally


HARMS = {
    "removed": lambda data, other: None,
    "emptied": lambda data, other: b"",
    "cut by a byte": lambda data, other: data[:-1],
    "cut in half": lambda data, other: data[: len(data) // 2],
    "longer by a byte": lambda data, other: data + b"\0",
    "zeros of its size": lambda data, other: bytes(len(data)),
    "zeros in its second half": lambda data, other: data[: len(data) // 2].ljust(len(data), b"\0"),
    "the other step's": lambda data, other: other,
}


def twin(name: str, kind: str, step: Path) -> bytes:
    """The file of step 1 of the same name, or of the same kind and the nearest size."""
    other = step.parent / "1"
    if (other / name).exists():
        return (other / name).read_bytes()
    size = (step / name).stat().st_size
    alike = [other / n for n, k in files_of(other).items() if k == kind]
    if not alike:
        return b""
    return min(alike, key=lambda path: abs(path.stat().st_size - size)).read_bytes()


def whole_files(place: Place, harms: tuple[str, ...]) -> Tally:
    """Every file of a step, one at a time."""
    step, tally = place.two_steps(), Tally()
    for name, kind in files_of(step).items():
        before = (step / name).read_bytes()
        for harm in harms:
            after = HARMS[harm](before, twin(name, kind, step))
            if after == before:
                continue
            if after is None:
                (step / name).unlink()
            else:
                (step / name).write_bytes(after)
            judge(place, tally, f"{kind}, {harm}")
            (step / name).write_bytes(before)
    return tally


def database(step: Path) -> ts.KvStore:
    path = f"{step / ITEM}/"
    base = {"driver": "file", "path": path}
    return ts.KvStore.open({"driver": "ocdbt", "base": base}).result()


def chunks(place: Place, how: str) -> Tally:
    """Chunks of arrays removed from the database, or two that change places."""
    step, tally = place.two_steps(), Tally()
    kept = Path(place.root).with_name("kept")
    shutil.copytree(step, kept)
    store = database(step)
    keys = [key.decode() for key in store.list().result()]
    keys = sorted(key for key in keys if not key.endswith((".zarray", "zarr.json")))
    held = {key: store.read(key).result().value for key in keys}
    pairs = [(a, b) for a in keys for b in keys if a < b and held[a] != held[b]]
    for pair in [(key,) for key in keys] if how == "removed" else pairs:
        shutil.rmtree(step)
        shutil.copytree(kept, step)
        store = database(step)
        if how == "removed":
            store.delete_range(ts.KvStore.KeyRange(pair[0], pair[0] + "\0")).result()
        else:
            store.write(pair[0], held[pair[1]]).result()
            store.write(pair[1], held[pair[0]]).result()
        judge(place, tally, f"chunk, {how}")
    return tally


def odd_directories(place: Place) -> Tally:
    """Things with a step's name that are no step, and are newer than every step."""
    tally = Tally()
    step = place.two_steps()
    for number, odd in enumerate(("an empty directory", "some data files", "a file")):
        path = Path(place.root, str(900 + number))
        if odd == "a file":
            path.write_text("mine")
        elif odd == "an empty directory":
            path.mkdir()
        else:
            shutil.copytree(step / ITEM / "d", path / ITEM / "d")
        judge_odd(place, tally, odd)
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return tally


def judge_odd(place: Place, tally: Tally, odd: str) -> None:
    try:
        step, found = place.system.resume(place.root, state(2))
        survived = step == 2 and same(found, state(2))
    except Exception:
        survived = False
    tally.add(survived, lost=not survived, note="" if survived else odd)


CATALOGUE = {
    "one bit flipped in a metadata file": lambda p: bit_flips(p, "metadata"),
    "one bit flipped in the database's index": lambda p: bit_flips(p, "index"),
    "one bit flipped in the files of array data": lambda p: bit_flips(p, "arrays"),
    "a file removed": lambda p: whole_files(p, ("removed",)),
    "a file cut short, emptied or longer": lambda p: whole_files(
        p, ("emptied", "cut by a byte", "cut in half", "longer by a byte")
    ),
    "a file with zeros in it": lambda p: whole_files(
        p, ("zeros of its size", "zeros in its second half")
    ),
    "a file of another step in its place": lambda p: whole_files(p, ("the other step's",)),
    "a chunk removed from the database": lambda p: chunks(p, "removed"),
    "two chunks that change places": lambda p: chunks(p, "exchanged"),
    "a step's name on what is no step": odd_directories,
}
