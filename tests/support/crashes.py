"""What a crash of the machine may leave on disk, from a recording of system calls.

The model is weaker than any journalling file system. After each call, of all that came before:

- What was written to a file survives for certain only once that file was synced afterwards. Until
  then each write may be lost, cut short, or there as zeros.
- A name in a directory (made, renamed, linked, unlinked) survives for certain only once that
  directory was synced afterwards. Until then each change may be there or not, whatever others do.
  Syncing a file says nothing about its name.
- A rename or an exchange happens as one: on both sides or on neither. A sync of either side
  keeps it.

`Disk` works that out for one recording; `Disk.states` gives directories to try.
"""

import bisect
import os
import pathlib
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tests.support.syscalls import (
    Call,
    Link,
    MakeDir,
    Mark,
    NotUnderstood,
    Open,
    Recording,
    Rename,
    Resize,
    Sync,
    Unlink,
    Write,
)

BASE = 0  # the number of the base directory


@dataclass(frozen=True, slots=True)
class Names:
    """Names that change together: (directory, name, file or directory or None)."""

    changes: tuple[tuple[int, str, int | None], ...]


@dataclass(frozen=True, slots=True)
class Data:
    """A file's content: bytes at an offset, or where there are none, a new size."""

    file: int
    offset: int
    data: bytes | None


@dataclass(frozen=True, slots=True)
class Choice:
    """Which effects a crash left: bit n of each is about effect n."""

    there: int
    cut: int = 0
    zeros: int = 0


Tree = Mapping[str, bytes | None]
"""Path below the base -> content; None for a directory."""


@dataclass(frozen=True, slots=True)
class State:
    """One directory that a crash may leave.

    Attributes:
      after: the last call that had ended.
      how: in words, what became of what was not synced.
    """

    after: Call
    how: str
    choice: Choice
    tree: Tree


@dataclass(slots=True)
class Disk:
    """The effects of a recording, and from when on each is safe."""

    calls: Sequence[Call]
    effects: list[Names | Data] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    safe: dict[int, int] = field(default_factory=dict)
    _dirs: dict[int, dict[str, int]] = field(default_factory=lambda: {BASE: {}})
    _unnamed: dict[str, int] = field(default_factory=dict)
    _next: int = BASE + 1
    _base: str = ""

    @classmethod
    def of(cls, recording: Recording) -> "Disk":
        disk = cls(recording.operations, _base=recording.base)
        for call in recording.operations:
            disk._take(call)
        return disk

    # -- what the calls did -------------------------------------------------------------------

    def _take(self, call: Call) -> None:
        if isinstance(call, Mark):
            return
        if isinstance(call, Sync):
            self._sync(call)
        elif isinstance(call, Open):
            self._open(call)
        elif isinstance(call, Write):
            self._effect(call, Data(self._number(call.path), call.offset, call.data))
        elif isinstance(call, Resize):
            self._effect(call, Data(self._number(call.path), call.size, None))
        elif isinstance(call, Link):
            number = self._number(call.old)
            self._effect(call, Names(((*self._place(call.new), number),)))
        elif isinstance(call, Unlink):
            self._effect(call, Names(((*self._place(call.path), None),)))
        elif isinstance(call, MakeDir):
            number = self._new()
            self._dirs[number] = {}
            self._effect(call, Names(((*self._place(call.path), number),)))
        elif isinstance(call, Rename):
            old, new = self._number(call.old), self._place(call.new)
            back = self._number(call.new) if call.exchange else None
            self._effect(call, Names(((*self._place(call.old), back), (*new, old))))
        else:
            raise NotUnderstood(str(call))

    def _open(self, call: Open) -> None:
        if call.unnamed:
            self._unnamed[call.path] = self._new()
            return
        where, name = self._place(call.path)
        number = self._dirs[where].get(name)
        if number is None:
            self._effect(call, Names(((where, name, self._new()),)))
        elif call.truncate:
            self._effect(call, Data(number, 0, None))

    def _effect(self, call: Call, effect: Names | Data) -> None:
        if isinstance(effect, Names):
            for where, name, number in effect.changes:
                _put(self._dirs[where], name, number)
        self.effects.append(effect)
        self.ends.append(call.end)

    def _sync(self, call: Sync) -> None:
        number = self._number(call.path)
        for index, effect in enumerate(self.effects):
            if self.ends[index] < call.begin and number in _about(effect):
                self.safe.setdefault(index, call.end)

    def _new(self) -> int:
        self._next += 1
        return self._next

    def _parts(self, path: str) -> list[str]:
        below = os.path.relpath(path, self._base)
        return [] if below == "." else below.split("/")

    def _number(self, path: str) -> int:
        if path in self._unnamed:
            return self._unnamed[path]
        number = BASE
        for part in self._parts(path):
            number = self._dirs[number][part]
        return number

    def _place(self, path: str) -> tuple[int, str]:
        return self._number(os.path.dirname(path)), os.path.basename(path)

    # -- what a crash leaves ------------------------------------------------------------------

    def tree(self, choice: Choice) -> Tree:
        """The directory where exactly the effects of a choice are there."""
        dirs: dict[int, dict[str, int]] = {number: {} for number in self._dirs}
        files: dict[int, bytearray] = {}
        places: dict[int, tuple[int, str]] = {}
        for index, effect in enumerate(self.effects):
            if not choice.there >> index & 1:
                continue
            if isinstance(effect, Names):
                _rename(dirs, places, effect)
            else:
                cut, zeros = choice.cut >> index & 1, choice.zeros >> index & 1
                _fill(files.setdefault(effect.file, bytearray()), effect, bool(cut), bool(zeros))
        return dict(_walk(BASE, "", dirs, files))

    def everything(self, after: int | None = None) -> Tree:
        """The directory as the system showed it when the call that ended at `after` had."""
        count = len(self.effects) if after is None else bisect.bisect_right(self.ends, after)
        return self.tree(Choice((1 << count) - 1))

    def states(self, start: int, seed: int = 0, subsets: int = 2) -> Iterator[State]:
        """States that a crash may leave after each call from place `start` on.

        Of what is not safe yet: all is there; nothing; all but one; only one; all names and no
        data, or data cut short, or zeros, of all files and of each; and random choices.
        """
        rng = random.Random(seed)
        trees: dict[Choice, Tree] = {}
        for call in self.calls:
            if call.end < start:
                continue
            seen: set[Choice] = set()
            for how, choice in self._choices(call.end, rng, subsets):
                if choice in seen:
                    continue
                seen.add(choice)
                if choice not in trees:
                    trees[choice] = self.tree(choice)
                yield State(call, how, choice, trees[choice])

    def _choices(self, now: int, rng: random.Random, subsets: int) -> Iterator[tuple[str, Choice]]:
        count = bisect.bisect_right(self.ends, now)
        every = (1 << count) - 1
        open_ones = [i for i in range(count) if self.safe.get(i, now + 1) > now]
        open_all = sum(1 << i for i in open_ones)
        data = [i for i in open_ones if isinstance(self.effects[i], Data)]
        data_all = sum(1 << i for i in data)
        yield "everything is there", Choice(every)
        yield "only what was synced", Choice(every & ~open_all)
        yield "names without data", Choice(every & ~data_all)
        yield "all data cut short", Choice(every, cut=data_all)
        yield "all data zeros", Choice(every, zeros=data_all)
        for i in open_ones:
            yield f"without {self.effects[i]!r:.90}", Choice(every & ~(1 << i))
            yield f"only with {self.effects[i]!r:.90}", Choice(every & ~open_all | 1 << i)
        for i in data:
            yield f"cut short: {self.effects[i]!r:.90}", Choice(every, cut=1 << i)
            yield f"zeros: {self.effects[i]!r:.90}", Choice(every, zeros=1 << i)
        for number in range(subsets if len(open_ones) > 1 else 0):
            kept = sum(1 << i for i in open_ones if rng.random() < 0.5)
            yield f"random choice {number}", Choice(every & ~open_all | kept)


def write_tree(tree: Tree, base: pathlib.Path) -> None:
    """Makes a state real below an empty directory."""
    for path in sorted(tree):
        content = tree[path]
        if content is None:
            (base / path).mkdir()
        else:
            (base / path).write_bytes(content)


def without(recording: Recording, dropped: Sequence[Call]) -> Recording:
    """The recording as it would be if some of its calls had not been made."""
    gone = set(dropped)
    assert gone <= set(recording.operations)
    kept = tuple(call for call in recording.operations if call not in gone)
    return Recording(recording.base, kept)


def _about(effect: Names | Data) -> set[int]:
    """What must be synced for an effect to be safe."""
    if isinstance(effect, Data):
        return {effect.file}
    return {where for where, _, _ in effect.changes}


def _put(names: dict[str, int], name: str, number: int | None) -> None:
    if number is None:
        names.pop(name, None)
    else:
        names[name] = number


def _rename(
    dirs: dict[int, dict[str, int]], places: dict[int, tuple[int, str]], effect: Names
) -> None:
    """Sets names; a directory that gets one loses the one it had, which `places` tells."""
    for _, _, number in effect.changes:
        if number in places:
            where, name = places.pop(number)
            if dirs[where].get(name) == number:
                del dirs[where][name]
    for where, name, number in effect.changes:
        _put(dirs[where], name, number)
        if number in dirs:
            places[number] = where, name


def _fill(content: bytearray, effect: Data, cut: bool, zeros: bool) -> None:
    if effect.data is None:
        del content[effect.offset :]
        content.extend(bytes(effect.offset - len(content)))
        return
    data = bytes(len(effect.data)) if zeros else effect.data
    data = data[: len(data) // 2] if cut else data
    if data:
        content.extend(bytes(max(0, effect.offset - len(content))))
        content[effect.offset : effect.offset + len(data)] = data


def _walk(
    number: int, prefix: str, dirs: Mapping[int, Mapping[str, int]], files: Mapping[int, bytearray]
) -> Iterator[tuple[str, bytes | None]]:
    for name, found in dirs[number].items():
        if found in dirs:
            yield prefix + name, None
            yield from _walk(found, f"{prefix}{name}/", dirs, files)
        else:
            yield prefix + name, bytes(files.get(found, b""))
