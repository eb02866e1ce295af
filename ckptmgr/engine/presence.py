"""Which files of a step are there: missing ones, short ones, and those that are nobody's."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from ckptmgr.core import layout
from ckptmgr.engine.store import Store
from ckptmgr.errors import Problem, StoreError

_NO_UNDERSCORES = (
    "missing, and so is every other file whose name begins with '_': the step was copied by "
    "something that leaves those out; copy it again"
)


def size(store: Store, name: str) -> int | None:
    """Bytes of a file, None where it is not there."""
    try:
        return os.stat(store.path(name)).st_size
    except OSError:
        return None


def is_ours(store: Store) -> bool:
    """Whether ckptmgr wrote a step, by its files: Orbax's has none of these."""
    return store.exists(layout.MANIFEST) or any(
        store.is_dir(layout.own_dir(name)) for name in store.names()
    )


def why_missing(store: Store) -> str:
    """Says so where a copy left out all names that begin with an underscore."""
    own = [name for name in store.names() if store.is_dir(layout.own_dir(name))]
    there = [*store.names(), *(name for item in own for name in store.names(item))]
    copied = bool(own) and not any(name.startswith("_") for name in there)
    return _NO_UNDERSCORES if copied else "missing"


def items(store: Store) -> tuple[Mapping[str, str], dict[str, bytes]]:
    """Items of a step without a manifest, and their files of ours, which nothing vouches for."""
    kinds: dict[str, str] = {}
    texts: dict[str, bytes] = {}
    for item in sorted(store.names()):
        below = layout.own_dir(item)
        for name in sorted(store.names(below)):
            try:
                texts[f"{below}/{name}"] = store.read_file(f"{below}/{name}")
            except StoreError:
                continue  # a directory, or a problem of its item
        if store.is_dir(below):
            is_state = layout.state_file(item, 0) in texts
            kinds[item] = "state" if is_state else "tree"
    return kinds, texts


def short(store: Store, sizes: Mapping[str, int]) -> list[Problem]:
    """Says so where so much is missing that it looks like a copy that did not finish."""
    lost = [name for name, wanted in sizes.items() if (size(store, name) or 0) < wanted]
    if len(lost) < 2:
        return []
    text = f"{len(lost)} of {len(sizes)} files are missing or cut short"
    return [Problem("", f"{text}: was the step copied only in part?")]


def unknown(store: Store, expected: Iterable[str]) -> list[str]:
    """Files that nothing names; of a directory that holds nothing else only its name."""
    named = {layout.MANIFEST, *expected}
    dirs = {name.rpartition("/")[0] for name in named}
    dirs |= {parent for name in dirs for parent in _parents(name)}
    names = []
    for base, below, files in os.walk(store.root):
        here = os.path.relpath(base, store.root)
        prefix = "" if here == "." else here + "/"
        names += [f"{prefix}{file}" for file in files if f"{prefix}{file}" not in named]
        names += [f"{prefix}{name}/" for name in below if f"{prefix}{name}" not in dirs]
        below[:] = [name for name in below if f"{prefix}{name}" in dirs]
    return sorted(names)


def _parents(name: str) -> Iterable[str]:
    while name:
        yield name
        name = name.rpartition("/")[0]
