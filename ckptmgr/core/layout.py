"""Every file and directory name, built and parsed here and nowhere else.

```
<root>/<step>/                                  a committed step
<root>/<step>.orbax-checkpoint-tmp-<attempt>/   a save under way, or an abandoned one
<root>/_ckptmgr/intents/<attempt>.json          who is saving what, removed last
<root>/_ckptmgr/damaged/<step>.json             a restore found this step damaged
<root>/_ckptmgr/verified/<step>.json            all of this step was compared and is right
<root>/_ckptmgr/pins/<step>.json                retention must leave this step
<root>/_ckptmgr/leases/<step>.<unique>.json     somebody reads this step
<root>/_ckptmgr/pace.json                       what saves and failures were seen to cost
<root>/_ckptmgr/quarantine/<step>-<attempt>/    a damaged directory that stood in the way of a save
<root>/_ckptmgr/trash/<step>-<attempt>/         a deleted step whose bytes go next
```

Inside a step, paths are relative to it and use "/".
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence

MANIFEST = "_CKPTMGR"
CHECKPOINT_METADATA = "_CHECKPOINT_METADATA"
COMMIT_SUCCESS = "commit_success.txt"
PRIVATE = "_ckptmgr"
PACE = "_ckptmgr/pace.json"
"""What saves and failures were seen to cost."""
DEFAULT_ITEM = "default"
METRICS_ITEM = "metrics"
OCDBT_MANIFEST = "manifest.ocdbt"
OCDBT_DATA = "d"
LEAVES = "ckptmgr/leaves"
ROOT_ARRAY = "/"
"""Name of the array of a tree that is a single leaf: its keys have no prefix, as Orbax has it."""

_STEP = re.compile(r"(0|[1-9][0-9]*)")
_TMP = re.compile(r"(0|[1-9][0-9]*)\.orbax-checkpoint-tmp-([0-9a-f]+)")
_INTENT = re.compile(r"([0-9a-f]+)\.json")
_LEASE = re.compile(r"(0|[1-9][0-9]*)\.[0-9a-f]+\.json")
_ITEM = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_RECEIPT = re.compile(r"receipt\.process_(0|[1-9][0-9]*)\.json")


def step_name(step: int) -> str:
    return str(step)


def parse_step(name: str) -> int | None:
    """The step number, or None where the name is not exactly that of a step."""
    return int(name) if _STEP.fullmatch(name) else None


def tmp_name(step: int, attempt: str) -> str:
    return f"{step}.orbax-checkpoint-tmp-{attempt}"


def parse_tmp(name: str) -> tuple[int, str] | None:
    found = _TMP.fullmatch(name)
    return (int(found[1]), found[2]) if found else None


def intents_dir() -> str:
    return f"{PRIVATE}/intents"


def intent_name(attempt: str) -> str:
    return f"{PRIVATE}/intents/{attempt}.json"


def parse_intent(name: str) -> str | None:
    found = _INTENT.fullmatch(name)
    return found[1] if found else None


def damaged_name(step: int) -> str:
    """The record that a step was found damaged."""
    return f"{PRIVATE}/damaged/{step}.json"


def suspect_name(step: int) -> str:
    """The record that a step was saved by a staging path that an audit found torn."""
    return f"{PRIVATE}/suspect/{step}.json"


def verified_name(step: int) -> str:
    """The record that all of a step was compared with its digests."""
    return f"{PRIVATE}/verified/{step}.json"


def pin_name(step: int) -> str:
    """The record that retention must leave a step."""
    return f"{PRIVATE}/pins/{step}.json"


def leases_dir() -> str:
    return f"{PRIVATE}/leases"


def lease_name(step: int, unique: str) -> str:
    """The record that somebody reads a step."""
    return f"{PRIVATE}/leases/{step}.{unique}.json"


def parse_lease(name: str) -> int | None:
    """The step of a lease."""
    found = _LEASE.fullmatch(name)
    return int(found[1]) if found else None


def quarantine_name(step: int, attempt: str) -> str:
    return f"{PRIVATE}/quarantine/{step}-{attempt}"


def trash_dir() -> str:
    return f"{PRIVATE}/trash"


def trash_name(step: int, attempt: str) -> str:
    return f"{PRIVATE}/trash/{step}-{attempt}"


def probe_name(unique: str) -> str:
    """A file that is written to see what the disk does; one that is left behind is trash."""
    return f"{PRIVATE}/trash/probe-{unique}"


def is_item_name(name: str) -> bool:
    """Whether an item may have this name: a plain file name that no file of ours has."""
    reserved = (METRICS_ITEM, COMMIT_SUCCESS)
    return bool(_ITEM.fullmatch(name)) and name not in reserved and ".orbax-" not in name


def pytree_metadata(item: str) -> str:
    return f"{item}/_METADATA"


def sharding_file(item: str) -> str:
    return f"{item}/_sharding"


def strings_file(item: str) -> str:
    return f"{item}/_strings.json"


def array_metadatas_dir(item: str) -> str:
    return f"{item}/array_metadatas"


def array_metadatas(item: str, process: int) -> str:
    return f"{item}/array_metadatas/process_{process}"


def json_item_file(item: str) -> str:
    """Where Orbax's JSON handler keeps an item."""
    return f"{item}/metadata"


def metrics_file() -> str:
    """Where Orbax's manager keeps metrics."""
    return f"{METRICS_ITEM}/metrics"


def item_commit(item: str) -> str:
    return f"{item}/{COMMIT_SUCCESS}"


def own_dir(item: str) -> str:
    """The directory in an item that only ckptmgr makes."""
    return f"{item}/ckptmgr"


def tree_file(item: str) -> str:
    return f"{item}/ckptmgr/tree.json"


def receipt_file(item: str, process: int) -> str:
    return f"{item}/ckptmgr/receipt.process_{process}.json"


def parse_receipt(name: str) -> int | None:
    found = _RECEIPT.fullmatch(name)
    return int(found[1]) if found else None


def is_receipt(path: str, item: str) -> bool:
    """Whether a path below the step is that of a receipt of `item`."""
    directory, _, name = path.rpartition("/")
    return directory == own_dir(item) and parse_receipt(name) is not None


def state_file(item: str, process: int) -> str:
    return f"{item}/ckptmgr/state.process_{process}.json"


def container(process: int) -> str:
    """The OCDBT database that one process writes, below the item."""
    return f"ocdbt.process_{process}"


def array_names(paths: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """Where each leaf's array lies in the item's database: a different place for each.

    Usually the dotted path, as Orbax has it; `ROOT_ARRAY` for a tree that is a single leaf. Of leaves whose dotted names are equal the first
    keeps the name; it and every name that cannot be a key path go to `ckptmgr/leaves/<number>`.
    """
    if list(paths) == [()]:
        return (ROOT_ARRAY,)
    taken: set[str] = set()
    names = []
    for number, path in enumerate(paths):
        name = ".".join(path)
        if name in taken or not _is_key_path(name):
            name = f"{LEAVES}/{number}"
        taken.add(name)
        names.append(name)
    return tuple(names)


def _is_key_path(name: str) -> bool:
    return (
        bool(name)
        and not name.startswith(("/", LEAVES + "/"))
        and not name.endswith("/")
        and "//" not in name
        and "\0" not in name
        and name.isprintable()
    )


INLINE_BYTES = 1024
"""Values up to this size lie in the database's tree of keys, larger ones apart, in its data files."""


def array_prefix(name: str) -> str:
    """What the keys of an array begin with in the item's database."""
    return "" if name == ROOT_ARRAY else name + "/"


def chunk_key(driver: str, name: str, index: tuple[int, ...]) -> str:
    """The key of one chunk in the item's database."""
    return array_prefix(name) + chunk_suffix(driver, index)


@functools.lru_cache(maxsize=4096)
def chunk_suffix(driver: str, index: tuple[int, ...]) -> str:
    """What follows the array's prefix there, as the zarr and zarr3 drivers spell it."""
    if driver == "zarr":
        return ".".join(map(str, index)) or "0"
    return "/".join(["c", *map(str, index)])


def metadata_key(driver: str, name: str) -> str:
    """The key of an array's metadata in the item's database."""
    return array_prefix(name) + (".zarray" if driver == "zarr" else "zarr.json")


def orbax_name(name: str) -> str:
    """How Orbax calls the array in its files."""
    return "" if name == ROOT_ARRAY else name


def is_aside(array_name: str) -> bool:
    """Whether an array lies where Orbax does not look for it."""
    return array_name.startswith(LEAVES + "/")


_BY_PROCESS = re.compile(r"(?:[^/]+/)?ocdbt\.process_(0|[1-9][0-9]*)")
_FILE_OF_PROCESS = re.compile(r"[^/]+/ckptmgr/(?:receipt|state)\.process_(0|[1-9][0-9]*)\.json")


def is_by_process(path: str) -> bool:
    """Whether a path below an item is one of the processes' databases, or a directory of ours."""
    return bool(_BY_PROCESS.fullmatch(path)) or path in ("ckptmgr", "array_metadatas")


def is_of_another(path: str, process: int) -> bool:
    """Whether a path below the step is the database, or a file, of another process than `process`."""
    found = _BY_PROCESS.fullmatch(path) or _FILE_OF_PROCESS.fullmatch(path)
    return found is not None and int(found[1]) != process


def containers_prefix() -> str:
    """What the names of all processes' databases begin with."""
    return "ocdbt.process_"
