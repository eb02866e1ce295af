"""Dropping files from the page cache, and finding out whether they have gone from it."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Sequence

import numpy as np

from ckptmgr.errors import Problem


def evict(path: str, below: Sequence[str] = ("",)) -> tuple[bool, list[Problem]]:
    """Drops files below `path` from the page cache: all, or those that `below` leads to.

    Returns whether they are known to be gone from it, and files whose writing failed late.
    """
    seen, gone = False, True
    problems = []
    for top in (os.path.join(path, name) if name else path for name in below):
        alone: list[tuple[str, list[str], list[str]]]
        alone = [(os.path.dirname(top), [], [os.path.basename(top)])]
        for base, dirs, names in alone if os.path.isfile(top) else os.walk(top):
            gone &= not any(os.path.islink(os.path.join(base, name)) for name in dirs)
            for file in (os.path.join(base, name) for name in names):
                if not os.path.isfile(file):
                    continue
                seen = True
                try:
                    gone &= _evict_file(file)
                except OSError as exc:
                    gone = False
                    if exc.errno in (errno.EIO, errno.ENOSPC, errno.EDQUOT):
                        name = os.path.relpath(file, path)
                        text = f"cannot be synced ({exc.strerror})"
                        problems.append(Problem(name, text, transient=True))
    return seen and gone, problems


def _evict_file(file: str) -> bool:
    """Drops one file's pages; whether it is known that the cache holds none now."""
    if not hasattr(os, "posix_fadvise"):
        return False
    fd = os.open(file, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        if not _may_be_cached(fd):
            return True
        os.fsync(fd)  # a page that is not written yet stays
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        return not _may_be_cached(fd)
    finally:
        os.close(fd)


_WINDOW_BYTES = 2**30


def _may_be_cached(fd: int) -> bool:
    """Whether mincore(2) finds a page of the file in memory, or cannot tell.

    It tells only those who own the file or may write it, and says "in memory" to others. Trying
    with RWF_NOWAIT would start a read-ahead, and overlay and tmpfs do not have it.
    """
    mincore = getattr(ctypes.CDLL(None), "mincore", None)
    if mincore is None:
        return True
    size = os.fstat(fd).st_size
    for start in range(0, size, _WINDOW_BYTES):
        length = min(_WINDOW_BYTES, size - start)
        try:
            view = mmap.mmap(fd, length, prot=mmap.PROT_READ, offset=start)
        except (OSError, ValueError):  # not every file system can map
            return True
        with view:
            pages = np.frombuffer(view, np.uint8)
            found = np.ones(-(-length // mmap.PAGESIZE), np.uint8)
            failed = mincore(
                ctypes.c_void_p(pages.ctypes.data),
                ctypes.c_size_t(length),
                ctypes.c_void_p(found.ctypes.data),
            )
            del pages  # nothing may point into a mapping that ends
        if failed or (found & 1).any():
            return True
    return False
