"""Ways to damage the files of a step, and every kind of file that a step has."""

import fnmatch
import pathlib
import random

KINDS = {
    "manifest _CKPTMGR": "_CKPTMGR",
    "_CHECKPOINT_METADATA": "_CHECKPOINT_METADATA",
    "commit_success.txt of the step": "commit_success.txt",
    "metrics": "metrics/metrics",
    "_METADATA": "*/_METADATA",
    "_sharding": "*/_sharding",
    "array_metadatas": "*/array_metadatas/*",
    "_strings.json": "*/_strings.json",
    "commit_success.txt of an item": "*/commit_success.txt",
    "tree.json": "*/ckptmgr/tree.json",
    "receipt": "*/ckptmgr/receipt.process_*.json",
    "state of an iterator, ours": "*/ckptmgr/state.process_*.json",
    "state of an iterator, Orbax's copy": "*/metadata",
    "manifest.ocdbt, merged": "*/manifest.ocdbt",
    "d/ of the merged database": "*/d/*",
    "manifest.ocdbt of a process": "*/ocdbt.process_*/manifest.ocdbt",
    "d/ of a process": "*/ocdbt.process_*/d/*",
}
"""Kind -> pattern of its paths below a step; the last that fits counts."""


def kind_of(path):
    """The kind of a file, by its path below the step."""
    fits = [kind for kind, pattern in KINDS.items() if fnmatch.fnmatch(path, pattern)]
    assert fits, f"a file of no known kind: {path}"
    return fits[-1]


def files_of(step):
    """Path below the step -> kind, of every file."""
    step = pathlib.Path(step)
    found = sorted(str(p.relative_to(step)) for p in step.rglob("*") if p.is_file())
    return {name: kind_of(name) for name in found}


def positions(data, count, seed, marks=()):
    """Byte positions of a file: all if there are at most `count`, else its first and last bytes,
    those around each of `marks`, and a sample of the rest."""
    size = len(data)
    if size <= count:
        return list(range(size))
    chosen = {*range(min(24, size)), *range(size - 24, size), size // 2}
    for mark in marks:
        chosen |= {at for at in range(mark - 2, mark + 3) if 0 <= at < size}
    rest = [at for at in range(size) if at not in chosen]
    random.Random(seed).shuffle(rest)
    return sorted(chosen | set(rest[: max(0, count - len(chosen))]))


def flipped(data, at, bit):
    """The same bytes, but for one bit."""
    return data[:at] + bytes([data[at] ^ (1 << bit)]) + data[at + 1 :]


def edges(data, values):
    """Where in a file the bytes of each of `values` begin and end."""
    found = []
    for raw in values:
        start = data.find(raw)
        if start >= 0:
            found += [start, start + len(raw)]
    return found
