"""`ckptmgr show`: what one step holds."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ckptmgr import (
    CheckpointManager,
    Description,
    InvalidOption,
    Options,
    StepNotFound,
    describe,
)
from ckptmgr.checking import problems_of
from ckptmgr.cli import answer
from ckptmgr.cli.answer import Answer

_HEAD = ("LEAF", "SHAPE", "DTYPE", "KIND", "SHARDING", "SIZE")
_USUAL_MEMORY = (None, "device", "unpinned_host")


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "show",
        help="show what a step holds",
        description="Shows a step and its leaves. Reads metadata only, no array.",
    )
    parser.add_argument("path", metavar="PATH", help="a step's directory, or a run's")
    parser.add_argument(
        "--step", type=step_argument, metavar="N", help="of a run: this step instead of the latest"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def step_argument(text: str) -> int:
    """A step on the command line."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"a step is a whole number from 0, not {text!r}")
    return int(text)


def run(arguments: argparse.Namespace) -> Answer:
    try:
        found = describe(arguments.path, arguments.step)
    except StepNotFound as exc:
        empty = arguments.step is None and _is_empty_run(arguments.path)
        return Answer("", answer.EMPTY if empty else answer.FAILED, str(exc))
    text = _json(found) if arguments.json else _text(found)
    bad = [leaf.dotted for leaves in found.leaves.values() for leaf in leaves if _unreadable(leaf)]
    if bad:
        names = ", ".join(map(answer.printable, bad[:5])) + (", ..." if len(bad) > 5 else "")
        what = f"leaves of {found.path} that cannot be read ({len(bad)}): {names}"
        return Answer(text, answer.FAILED, what)
    return Answer(text)


def _is_empty_run(path: str) -> bool:
    """Whether this is a directory that no step was saved to yet."""
    try:
        with CheckpointManager(path, Options(read_only=True)) as manager:
            return os.path.isdir(manager.directory) and not problems_of(path)
    except InvalidOption:  # a step or an item
        return False


def _unreadable(leaf: Any) -> bool:
    return leaf.kind == "unreadable"


def _json(found: Description) -> str:
    items = {name: _item_json(found, name, leaves) for name, leaves in found.leaves.items()}
    return answer.as_json(
        {
            "path": found.path,
            "info": asdict(found.info),
            "nbytes": _total(found),
            "items": items,
        }
    )


def _item_json(found: Description, name: str, leaves: Sequence[Any]) -> dict[str, Any]:
    return {
        "nbytes": sum(leaf.nbytes for leaf in leaves),
        "leaves": [
            {
                "name": leaf.dotted,
                "path": leaf.path,
                "shape": leaf.shape,
                "dtype": _dtype(leaf),
                "kind": leaf.kind,
                "sharding": _sharding(found, name, leaf),
                "chunk": leaf.chunk,
                "nbytes": leaf.nbytes,
                **({} if leaf.value is None else {"value": leaf.value}),
            }
            for leaf in leaves
        ],
    }


def _total(found: Description) -> int:
    return sum(leaf.nbytes for leaves in found.leaves.values() for leaf in leaves)


def _text(found: Description) -> str:
    info = found.info
    count = sum(len(leaves) for leaves in found.leaves.values())
    lines = {
        "step": f"{info.step} ({info.kind}, {info.status}{', pinned' if info.pinned else ''})",
        "path": answer.printable(found.path),
        "created": answer.moment(info.created),
        "size": f"{answer.size(_total(found))} in {_leaves(count)}",
        "metrics": answer.pairs(info.metrics),
        "extra": "" if info.extra is None else json.dumps(answer.plain(info.extra)),
        "topology": _topology(info.topology),
        "versions": " ".join(f"{k} {v}" for k, v in info.topology.get("versions", {}).items()),
    }
    text = "".join(f"{name:<9} {line}\n" for name, line in lines.items() if line)
    for name, leaves in found.leaves.items():
        total = answer.size(sum(leaf.nbytes for leaf in leaves))
        text += f"\nitem {name}: {_leaves(len(leaves))}, {total}\n"
        if leaves:
            rows = [_row(found, name, leaf) for leaf in leaves]
            text += answer.table(_HEAD, rows, right=("SIZE",))
    if info.plain:
        text += "\ncontainers that come back in a plain form without a target:\n"
        text += "".join(
            f"  {answer.printable(where)}: {label}\n" for where, label in info.plain.items()
        )
    return text


def _leaves(count: int) -> str:
    return f"{count} leaf" if count == 1 else f"{count} leaves"


def _row(found: Description, item: str, leaf: Any) -> tuple[str, ...]:
    sharding = _sharding(found, item, leaf)
    return (
        answer.printable(leaf.dotted) or "(root)",
        "x".join(map(str, leaf.shape)) or "()",
        _dtype(leaf) or "-",
        leaf.kind,
        "-" if sharding is None else _sharding_text(sharding),
        answer.size(leaf.nbytes),
    )


def _dtype(leaf: Any) -> str:
    if leaf.kind == "key":
        return f"key<{leaf.impl}>"
    return leaf.dtype or leaf.pytype or ("str" if leaf.kind == "string" else "")


def _sharding(found: Description, item: str, leaf: Any) -> Mapping[str, Any] | None:
    return None if leaf.sharding is None else found.shardings[item][leaf.sharding]


def _sharding_text(entry: Mapping[str, Any]) -> str:
    if entry["type"] == "single":
        text = str(entry["device"])
    elif entry["type"] == "named":
        spec = ", ".join("+".join(axes) if axes else "None" for axes in entry["spec"])
        mesh = " ".join(f"{name}={size}" for name, size in entry["axes"])
        text = f"P({spec}) on {mesh}"
    else:
        text = str(entry.get("text", entry["type"]))
    memory = entry.get("memory_kind")
    return answer.printable(text if memory in _USUAL_MEMORY else f"{text} in {memory}")


def _topology(topology: Mapping[str, Any]) -> str:
    if "devices" not in topology:
        return ""
    parts = [f"processes {topology.get('processes')}"]
    parts.append(f"devices {topology['devices']} ({topology.get('device_kind')})")
    for mesh in topology.get("meshes", ()):
        parts.append("mesh " + " ".join(f"{name}={size}" for name, size in mesh["axes"]))
    return ", ".join(parts)
