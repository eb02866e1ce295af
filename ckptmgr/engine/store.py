"""Files and directories below one root: the only place that calls the operating system.

Every operation raises `StoreError` naming what was tried and the path. Each is one step that a
`ckptmgr.testing.FaultyStore` can make fail.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from ckptmgr.errors import InvalidOption, StoreError

_ADVICE = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "the quota is used up",
    errno.EACCES: "check the permissions",
    errno.EPERM: "check the permissions",
    errno.EROFS: "the file system is read-only",
    errno.ENAMETOOLONG: "choose a shorter path",
    errno.EFBIG: "a limit on file sizes is in force (ulimit -f)",
}


@contextlib.contextmanager
def _told(what: str, path: str) -> Iterator[None]:
    """Turns an OSError into a StoreError that says what was tried."""
    try:
        yield
    except OSError as exc:
        advice = _ADVICE.get(exc.errno or 0)
        text = f"{what} {path}: {exc.strerror or exc}" + (f" ({advice})" if advice else "")
        error = StoreError(text)
        error.errno = exc.errno
        raise error from exc


def local_path(directory: Any) -> str:
    """An absolute path from `str`, `os.PathLike` or epath; relative ones are fixed now.

    Raises InvalidOption for what is not a local path.
    """
    try:
        path = os.fspath(directory)
    except TypeError as exc:
        raise InvalidOption(f"a directory must be a path, got {directory!r}") from exc
    if isinstance(path, bytes):
        path = os.fsdecode(path)
    if path.startswith("file://"):
        path = path.removeprefix("file://")
    if "://" in path or path.startswith(("gs:/", "s3:/")):
        raise InvalidOption(f"{path!r} is not a local path; object stores are not supported yet")
    if not path or "\0" in path:
        raise InvalidOption(f"{path!r} is not a path")
    if "\\" in path:  # TensorStore takes it for a separator and would write elsewhere
        raise InvalidOption(f"{path!r} holds a backslash, which the storage library cannot keep")
    try:
        path.encode()
    except UnicodeEncodeError as exc:
        raise InvalidOption(f"{path!r} is not Unicode text") from exc
    return os.path.abspath(os.path.expanduser(path))


class Stamp(NamedTuple):
    """What tells that a file is still the same: when its bytes and its inode last changed, in
    nanoseconds, which inode that is, and its size."""

    modified: int
    changed: int
    inode: int
    size: int


class Store:
    """One directory tree; paths are relative to `root` and use "/".

    Args:
      root: absolute path.
      durable: whether `sync_*` really sync.
      exchange: whether to use renameat2(RENAME_EXCHANGE) where the system has it.
    """

    def __init__(self, root: str, *, durable: bool = True, exchange: bool = True) -> None:
        self.root = root
        self.durable = durable
        self._exchange = exchange

    def path(self, name: str) -> str:
        return os.path.join(self.root, name) if name else self.root

    def make_dir(self, name: str) -> None:
        """Creates a directory and its parents; existing ones are fine."""
        with _told("cannot create the directory", self.path(name)):
            os.makedirs(self.path(name), exist_ok=True)

    def keep_dir(self, name: str) -> None:
        """As `make_dir`, and the names of the directories that it creates are synced.

        One above that may not be opened is left to the system.
        """
        path, above = self.path(name), []
        while not os.path.isdir(path):
            path = os.path.dirname(path)
            above.append(os.path.relpath(path, self.root))
        self.make_dir(name)
        for parent in reversed(above):
            try:
                self.sync_path("" if parent == "." else parent)
            except StoreError as exc:
                if exc.errno not in (errno.EACCES, errno.EPERM):
                    raise

    def write_file(self, name: str, data: bytes) -> None:
        """Writes a new file; its directory must exist. Not synced."""
        with _told("cannot write", self.path(name)), open(self.path(name), "wb") as file:
            file.write(data)

    def put_file(self, name: str, data: bytes) -> None:
        """Makes a new small file, whole or not at all where the file system can; not synced."""
        path = self.path(name)
        try:
            fd = os.open(os.path.dirname(path), os.O_TMPFILE | os.O_WRONLY, 0o666)
        except OSError:  # NFS, for one, has no files without a name
            self.write_file(name, data)
            return
        with _told("cannot write", path):
            try:
                os.write(fd, data)
                # naming a directory makes Python use linkat(2), which follows the link in /proc
                os.link(f"/proc/self/fd/{fd}", path, src_dir_fd=fd)
            finally:
                os.close(fd)

    def read_file(self, name: str) -> bytes:
        with _told("cannot read", self.path(name)), open(self.path(name), "rb") as file:
            return file.read()

    def names(self, name: str = "") -> list[str]:
        """The names in a directory, none where it does not exist."""
        try:
            with _told("cannot list", self.path(name)):
                return os.listdir(self.path(name))
        except StoreError as exc:
            if exc.errno in (errno.ENOENT, errno.ENOTDIR):
                return []
            raise

    def is_dir(self, name: str) -> bool:
        return os.path.isdir(self.path(name))

    def is_own_dir(self, name: str) -> bool:
        """Whether it is a directory and not a link to one."""
        return self.is_dir(name) and not os.path.islink(self.path(name))

    def stamp(self, name: str) -> Stamp | None:
        """Another one whenever the file is written or replaced; None where that cannot be told."""
        try:
            found = os.stat(self.path(name))
        except OSError:
            return None
        return Stamp(found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_size)

    def modified(self, name: str) -> float:
        """When a file or directory, or anything below it, last changed; 0.0 if it is not there."""
        newest = 0.0
        top = self.path(name)
        below = (os.path.join(base, file) for base, _, files in os.walk(top) for file in files)
        bases = (base for base, _, _ in os.walk(top))
        for path in (top, *bases, *below):
            try:
                newest = max(newest, os.stat(path).st_mtime)
            except FileNotFoundError:
                continue
        return newest

    def exists(self, name: str) -> bool:
        return os.path.lexists(self.path(name))

    def rename(self, old: str, new: str) -> bool:
        """Renames; False, changing nothing, if `new` exists and is not an empty directory."""
        try:
            with _told("cannot rename to", self.path(new)):
                try:
                    os.rename(self.path(old), self.path(new))
                except PermissionError:  # a directory that was made read-only is ours to move
                    _make_writable(self.path(old))
                    os.rename(self.path(old), self.path(new))
        except StoreError as exc:
            if exc.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                return False
            raise
        return True

    def exchange(self, a: str, b: str) -> bool:
        """Swaps two directories in one step; False where the file system cannot."""
        if not self._exchange:
            return False
        with _told("cannot exchange", self.path(b)):
            return _rename_exchange(self.path(a), self.path(b))

    def remove_file(self, name: str) -> None:
        """Removes a file; one that is gone already is fine."""
        try:
            with _told("cannot remove", self.path(name)):
                os.unlink(self.path(name))
        except StoreError as exc:
            if exc.errno != errno.ENOENT:
                raise

    def remove_tree(self, name: str) -> None:
        """Removes a directory and what is in it, or a file or link; what others remove is fine."""
        top = self.path(name)
        if not self.is_own_dir(name):
            self.remove_file(name)
            return
        with _told("cannot remove", top):
            try:
                shutil.rmtree(top, **_RMTREE)
            except PermissionError:  # directories that were made read-only are ours to delete
                for base, _, _ in os.walk(top):
                    _make_writable(base)
                shutil.rmtree(top, **_RMTREE)

    def arrays(self, name: str) -> str:
        """The absolute path of a directory that TensorStore is about to write into."""
        return self.path(name)

    def sync_tree(
        self, name: str, skip: Callable[[str], bool] = lambda path: False
    ) -> dict[str, int]:
        """Syncs every file, then every directory bottom up; returns the files' sizes.

        The keys are paths relative to `name`. What `skip` says of such a path is left alone: a
        directory with all that is in it, a file but for its size.
        """
        sizes: dict[str, int] = {}
        top = self.path(name)
        with _told("cannot sync", top):
            for base, files in reversed(_walk(top, skip)):
                for file in files:
                    path = os.path.join(base, file)
                    below = os.path.relpath(path, top)
                    if skip(below):
                        sizes[below] = os.stat(path).st_size
                    else:
                        sizes[below] = _sync(path, self.durable)
                _sync(base, self.durable)
        return sizes

    def begin_sync(self, name: str, begun: set[str]) -> None:
        """Has the system start to write the files of a directory to the device, so that the sync
        that comes later finds little to do; what it cannot start is left to that.

        Files in `begun` are left alone, and those that were started are added to it.
        """
        if not self.durable or not hasattr(_LIBC, "sync_file_range"):
            return
        with contextlib.suppress(OSError), os.scandir(self.path(name)) as found:
            for entry in found:
                if entry.name not in begun:
                    begun.add(entry.name)
                    _start_writing(entry.path)

    def sync_path(self, name: str) -> None:
        """Syncs one file or directory."""
        with _told("cannot sync", self.path(name)):
            _sync(self.path(name), self.durable)

    def sizes(self, name: str, skip: Callable[[str], bool] = lambda path: False) -> dict[str, int]:
        """Sizes of all files below a directory, keys relative to it; without what `skip` says."""
        top = self.path(name)
        paths = (os.path.join(base, file) for base, files in _walk(top, skip) for file in files)
        below = ((path, os.path.relpath(path, top)) for path in paths)
        return {name: os.stat(path).st_size for path, name in below if not skip(name)}

    def appears(self, name: str, seconds: float) -> bool:
        """Whether something is there, or comes in time: a file system that several machines share
        may show a moment later what another has made."""
        until = time.monotonic() + seconds
        while not self.exists(name):
            if time.monotonic() >= until:
                return False
            time.sleep(_LOOK_AGAIN_SECONDS)
        return True

    def check_usable(self, create: bool) -> None:
        """Raises, naming the path, unless the root is a directory we can write (if `create`)."""
        if create:
            self.keep_dir("")
        if not os.path.isdir(self.root):
            state = "is not a directory" if os.path.lexists(self.root) else "does not exist"
            raise StoreError(f"{self.root} {state}")
        if create and not os.access(self.root, os.W_OK | os.X_OK):
            raise StoreError(f"cannot write in {self.root} (check the permissions)")


_LOOK_AGAIN_SECONDS = 0.05


def _walk(top: str, skip: Callable[[str], bool]) -> list[tuple[str, list[str]]]:
    """Every directory with its files, parents first, without those that `skip` says."""
    found = []
    for base, dirs, files in os.walk(top):
        dirs[:] = [name for name in dirs if not skip(os.path.relpath(f"{base}/{name}", top))]
        found.append((base, files))
    return found


def _make_writable(directory: str) -> None:
    os.chmod(directory, os.stat(directory).st_mode | stat.S_IRWXU)


def _forgive_missing(function: Any, path: str, error: Any) -> None:
    exc = error if isinstance(error, BaseException) else error[1]
    if not isinstance(exc, FileNotFoundError):
        raise exc


# rmtree's error argument was renamed in Python 3.12
_RMTREE: dict[str, Any] = {"onexc" if sys.version_info >= (3, 12) else "onerror": _forgive_missing}


def _sync(path: str, durable: bool) -> int:
    """Syncs one file or directory; returns its size."""
    fd = os.open(path, os.O_RDONLY)
    try:
        if durable:
            os.fsync(fd)
        return os.fstat(fd).st_size
    finally:
        os.close(fd)


_LIBC = ctypes.CDLL(None, use_errno=True)
_SYNC_FILE_RANGE_WRITE = 2


def _start_writing(path: str) -> None:
    """sync_file_range(2): it starts the writing of dirty pages, and promises nothing."""
    with contextlib.suppress(OSError):  # one that was renamed meanwhile comes again
        fd = os.open(path, os.O_RDONLY)
        try:
            _LIBC.sync_file_range(
                fd, ctypes.c_int64(0), ctypes.c_int64(0), ctypes.c_uint(_SYNC_FILE_RANGE_WRITE)
            )
        finally:
            os.close(fd)


_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def _rename_exchange(a: str, b: str) -> bool:
    """renameat2(2) with RENAME_EXCHANGE; False where libc or the file system lacks it."""
    if not hasattr(_LIBC, "renameat2"):
        return False
    if _LIBC.renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), b)
