"""What a child process changed on disk, call by call, as strace saw it.

    recording = record(SCRIPT, tmp_path)     # the script gets sys.argv[1:] = base, marks
    recording.operations                     # Open, Write, Rename, Sync, ... below the base

Every call has a `begin` and an `end`: places in the order in which calls were entered and left,
so that a sync covers only what had ended before it began. A script leaves marks among its calls
with `marker`. A way to change files that is not understood here is an error, never overlooked.
"""

import functools
import os
import pathlib
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tests.support import child

TRACED = (
    "open openat creat write writev pwrite64 pwritev pwritev2 truncate ftruncate fallocate lseek "
    "rename renameat renameat2 link linkat symlink symlinkat unlink unlinkat mkdir mkdirat rmdir "
    "fsync fdatasync sync_file_range sync syncfs sendfile copy_file_range splice mmap openat2 "
    "io_uring_setup"
)


@dataclass(frozen=True, slots=True)
class Call:
    """One call that succeeded; paths are absolute."""

    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Open(Call):
    """A file opened in a way that may change it. `unnamed`: O_TMPFILE."""

    path: str
    create: bool
    truncate: bool
    unnamed: bool = False


@dataclass(frozen=True, slots=True)
class Write(Call):
    path: str
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Resize(Call):
    path: str
    size: int


@dataclass(frozen=True, slots=True)
class Rename(Call):
    old: str
    new: str
    exchange: bool = False


@dataclass(frozen=True, slots=True)
class Link(Call):
    """`old` may be the path of a file that was opened without a name."""

    old: str
    new: str


@dataclass(frozen=True, slots=True)
class Unlink(Call):
    """Of a file or an empty directory."""

    path: str


@dataclass(frozen=True, slots=True)
class MakeDir(Call):
    path: str


@dataclass(frozen=True, slots=True)
class Sync(Call):
    path: str


@dataclass(frozen=True, slots=True)
class Mark(Call):
    """What the script said between its calls."""

    text: str


@dataclass(frozen=True, slots=True)
class Recording:
    base: str
    operations: tuple[Call, ...]

    def below(self, name: str) -> "Recording":
        """What happened below one directory of the base, and the marks `<name>|...`, without it."""
        base = os.path.join(self.base, name)
        found: list[Call] = []
        for call in self.operations:
            if isinstance(call, Mark):
                head, _, rest = call.text.partition("|")
                if head == name:
                    found.append(Mark(call.begin, call.end, rest))
            elif any(is_below(path, base) for path in paths_of(call)):
                if not (isinstance(call, MakeDir) and call.path == base):
                    found.append(call)
        return Recording(base, tuple(found))


class NotUnderstood(AssertionError):
    """A call that changes files in a way this module does not know."""


def paths_of(call: Call) -> tuple[str, ...]:
    """The paths that a call names."""
    names = ("path", "old", "new")
    return tuple(getattr(call, name) for name in names if hasattr(call, name))


def is_below(path: str, base: str) -> bool:
    return path == base or path.startswith(base + "/")


@functools.cache
def why_not() -> str:
    """Why system calls cannot be recorded here; "" where they can."""
    if shutil.which("strace") is None:
        return "strace is not installed (on Debian and Ubuntu: apt install strace)"
    done = subprocess.run(["strace", "-o", os.devnull, "true"], capture_output=True, text=True)
    said = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[0]
    return "" if done.returncode == 0 else f"strace may not trace processes here: {said}"


def marker(path: str) -> Callable[[str], None]:
    """For the script: a function that leaves a mark."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)

    def mark(text: str) -> None:
        os.write(fd, text.encode())

    return mark


def record(script: str, where: pathlib.Path, *args: object, timeout: float = 90) -> Recording:
    """Runs `script` with the arguments base, marks and `args`; both lie below `where`."""
    where = where.resolve()
    base, marks, log = where / "base", where / "marks", where / "log"
    base.mkdir(exist_ok=True)
    trace = f"trace={','.join(f'?{name}' for name in TRACED.split())}"
    # -y gives every descriptor its path, -xx every byte as hexadecimal digits
    command = [
        "strace",
        "-f",
        "--seccomp-bpf",
        "-y",
        "-xx",
        "-s",
        "4000000",
        "-o",
        log,
        "-e",
        trace,
    ]
    command += [sys.executable, child._write_script(script, timeout), base, marks, *args]
    started = subprocess.Popen(
        [str(part) for part in command],
        env=child._environment(None),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    child.finish(started, timeout=timeout)
    with open(log, encoding="ascii") as lines:
        found = _Parser(str(base), str(marks), str(where)).parse(lines)
    return Recording(str(base), tuple(sorted(found, key=lambda call: call.end)))


_LINE = re.compile(r"(\d+) +(.*)")
_RESUMED = re.compile(r"<\.\.\. \w+ resumed>(.*)")
_CALL = re.compile(r"(\w+)\((.*)\) += (-?\w+)(.*)", re.DOTALL)
_DESCRIPTOR = re.compile(r"(AT_FDCWD|-?\d+)<([^>]*)>")
_PART = re.compile(r'(?:[^,\[\]{}"]|"[^"]*"|\[[^\]]*\]|\{[^}]*\})+')
_STRING = re.compile(r'"((?:\\x[0-9a-f]{2})*)"(\.\.\.)?')
_UNFINISHED = " <unfinished ...>"
_READ_ONLY = "O_RDONLY"


def _calls(lines: Iterator[str]) -> Iterator[tuple[int, int, str]]:
    """(begin, end, text) of each call, the halves of interrupted lines put together."""
    waiting: dict[str, tuple[int, str]] = {}
    for number, line in enumerate(lines):
        found = _LINE.match(line)
        if found is None:
            raise NotUnderstood(line)
        pid, text = found.groups()
        resumed = _RESUMED.match(text)
        if text.endswith(_UNFINISHED):
            waiting[pid] = (number, text.removesuffix(_UNFINISHED))
        elif resumed is not None:
            begin, head = waiting.pop(pid)
            yield begin, number, head + resumed[1]
        elif not text.startswith(("+++", "---")):
            yield number, number, text


class _Parser:
    """Turns lines of strace into calls below a base."""

    def __init__(self, base: str, marks: str, where: str) -> None:
        self._base, self._marks = base, marks
        self._hint = "".join(f"\\x{byte:02x}" for byte in os.fsencode(where))
        self._at: dict[str, int] = {}  # descriptor -> where its next write goes
        self._appends: set[str] = set()
        self._opened: dict[str, str] = {}  # number of a descriptor -> path

    def parse(self, lines: Iterator[str]) -> list[Call]:
        found: list[Call] = []
        for begin, end, text in _calls(lines):
            if self._hint not in text:
                if text.startswith(("sync(", "io_uring_setup(")) and " = -1 " not in text:
                    raise NotUnderstood(text)
                continue
            match = _CALL.match(text)
            if match is None:
                raise NotUnderstood(_readable(text))
            name, inside, result, rest = match.groups()
            if result == "-1" or result == "?":
                continue
            call = self._call(begin, end, name, _PART.findall(inside), result, rest)
            if call is not None and self._counts(call):
                found.append(call)
        return found

    def _counts(self, call: Call) -> bool:
        if isinstance(call, Mark):
            return True
        inside = {is_below(path, self._base) for path in paths_of(call)}
        if len(inside) == 2:
            raise NotUnderstood(f"{call} crosses the edge of {self._base}")
        return inside == {True}

    def _call(
        self, begin: int, end: int, name: str, args: list[str], result: str, rest: str
    ) -> Call | None:
        args = [arg.strip() for arg in args]
        if name in ("open", "openat", "creat"):
            return self._open(begin, end, name, args, result, rest)
        if name in ("fsync", "fdatasync"):
            return Sync(begin, end, _path_of(args[0]))
        if name in ("write", "writev", "pwrite64", "pwritev", "pwritev2"):
            return self._write(begin, end, name, args, int(result))
        if name == "lseek":
            self._at[args[0]] = int(result)
            return None
        if name in ("ftruncate", "truncate"):
            path = _path_of(args[0]) if name == "ftruncate" else _text(args[0])
            return Resize(begin, end, path, int(args[1]))
        if name in ("mkdir", "mkdirat"):
            return MakeDir(begin, end, _at(args, name == "mkdirat")[0])
        if name in ("unlink", "unlinkat", "rmdir"):
            return Unlink(begin, end, _at(args, name == "unlinkat")[0])
        if name in ("rename", "renameat", "renameat2"):
            (old, new), flags = _two(args, name != "rename"), args[4:]
            if flags not in ([], ["0"], ["RENAME_EXCHANGE"]):
                raise NotUnderstood(f"{name}({args})")
            return Rename(begin, end, old, new, flags == ["RENAME_EXCHANGE"])
        if name in ("link", "linkat"):
            old, new = _two(args, name == "linkat")
            if old.startswith("/proc/self/fd/"):
                old = self._of_descriptor(old.rpartition("/")[2])
            return Link(begin, end, old, new)
        return _harmless(name, args)

    def _open(
        self, begin: int, end: int, name: str, args: list[str], result: str, rest: str
    ) -> Call | None:
        flags = (
            "O_CREAT|O_WRONLY|O_TRUNC" if name == "creat" else args[2 if name == "openat" else 1]
        )
        words = set(flags.split("|"))
        match = _DESCRIPTOR.match(result + rest)
        if match is None:
            raise NotUnderstood(f"{name}({args})")
        descriptor, path = match[0], _decode(match[2]).decode()
        self._at[descriptor] = 0
        self._opened[result] = path
        if words & {"O_SYNC", "O_DSYNC"}:
            raise NotUnderstood(f"{path} is opened with {flags}")
        if "O_APPEND" in words:
            self._appends.add(path)
        if _READ_ONLY in words and "O_CREAT" not in words:
            return None
        if "O_TMPFILE" in words:
            return Open(begin, end, path, False, False, unnamed=True)
        return Open(begin, end, path, "O_CREAT" in words, "O_TRUNC" in words)

    def _write(self, begin: int, end: int, name: str, args: list[str], count: int) -> Call:
        data = b"".join(_bytes(found) for found in _STRING.finditer(args[1]))[:count]
        if len(data) != count:
            raise NotUnderstood(f"{len(data)} of {count} bytes of {name}({args[0]})")
        path = _path_of(args[0])
        if path == self._marks:
            return Mark(begin, end, data.decode())
        if path in self._appends:
            raise NotUnderstood(f"{path} is appended to")
        if name.startswith("p"):
            return Write(begin, end, path, int(args[2 if name == "pwrite64" else 3]), data)
        match = _DESCRIPTOR.match(args[0])
        assert match is not None
        offset = self._at.get(match[0], 0)
        self._at[match[0]] = offset + count
        return Write(begin, end, path, offset, data)

    def _of_descriptor(self, number: str) -> str:
        return self._opened[number]


def _harmless(name: str, args: list[str]) -> None:
    """None for a call that changes no file, else an error."""
    if name == "mmap" and not ("PROT_WRITE" in args[2] and "MAP_SHARED" in args[3]):
        return
    if name == "sync_file_range":  # promises nothing
        return
    raise NotUnderstood(f"{name}({', '.join(map(_readable, args))})")


def _at(args: list[str], relative: bool) -> tuple[str, list[str]]:
    """A path, relative to a descriptor or not, and the arguments after it."""
    if not relative:
        return os.path.normpath(_text(args[0])), args[1:]
    return os.path.normpath(os.path.join(_path_of(args[0]), _text(args[1]))), args[2:]


def _two(args: list[str], relative: bool) -> tuple[str, str]:
    old, rest = _at(args, relative)
    return old, _at(rest, relative)[0]


def _path_of(descriptor: str) -> str:
    match = _DESCRIPTOR.match(descriptor)
    if match is None:
        raise NotUnderstood(descriptor)
    return _decode(match[2]).decode()


def _text(string: str) -> str:
    match = _STRING.fullmatch(string)
    if match is None:
        raise NotUnderstood(string)
    return os.fsdecode(_bytes(match))


def _bytes(match: re.Match[str]) -> bytes:
    if match[2]:
        raise NotUnderstood("strace cut a string short")
    return _decode(match[1])


def _decode(digits: str) -> bytes:
    return bytes.fromhex(digits.replace("\\x", ""))


def _readable(text: str) -> str:
    run = re.compile(r"(?:\\x[0-9a-f]{2})+")
    return run.sub(lambda match: _decode(match[0]).decode(errors="replace"), text)
