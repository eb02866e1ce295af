"""`ckptmgr chaos`: does everything that ckptmgr promises hold on this file system?"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from typing import Any

from ckptmgr.cli import answer
from ckptmgr.cli.answer import Answer
from ckptmgr.errors import InvalidOption


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "chaos",
        help="try everything that can go wrong, in a directory of its own",
        description="Runs the store, snapshot and fault contracts below DIR, in a directory that is "
        "removed afterwards, and prints a verdict for each sentence.",
    )
    parser.add_argument("directory", metavar="DIR", help="a directory on the file system to try")
    parser.add_argument("--kills", type=int, default=10, help="processes to kill (default: 10)")
    parser.add_argument(
        "--parts",
        default="store,snapshot,faults",
        help="what to run, separated by commas (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> Answer:
    parts = arguments.parts.split(",")
    if unknown := set(parts) - set(_PARTS):
        raise InvalidOption(f"there is no part {sorted(unknown)[0]!r}; there are {list(_PARTS)}")
    if arguments.kills < 0:
        raise InvalidOption(f"--kills must not be negative, got {arguments.kills}")
    os.makedirs(arguments.directory, exist_ok=True)
    logger = logging.getLogger("ckptmgr")
    before, logger.disabled = logger.disabled, True  # it would tell of every fault
    try:
        rows = _run(parts, arguments)
    finally:
        logger.disabled = before
    failed = [outcome for _, outcome in rows if not outcome.passed]
    message = f"{len(failed)} of {len(rows)} did not hold" if failed else ""
    text = _json(rows) if arguments.json else _text(rows)
    return Answer(text, answer.FAILED if failed else answer.GOOD, message)


def _run(parts: list[str], arguments: argparse.Namespace) -> list[tuple[str, Any]]:
    rows = []
    with tempfile.TemporaryDirectory(prefix="ckptmgr-chaos-", dir=arguments.directory) as own:
        for part in parts:
            for name, outcome in _PARTS[part](own, arguments):
                rows.append((name, outcome))
                if sys.stderr.isatty():
                    print(f"{name}: {outcome}", file=sys.stderr)
    return rows


def _store(own: str, arguments: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    from ckptmgr.testing import store_contract

    yield from _named("store", store_contract.run(own))


def _snapshot(own: str, arguments: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    from ckptmgr.testing import snapshot_contract

    for mode in snapshot_contract.MODES:
        yield from _named(f"snapshot, {mode}", snapshot_contract.run(own, mode))


def _faults(own: str, arguments: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    from ckptmgr.testing import fault_contract

    yield from _named("faults", fault_contract.run(own, arguments.kills))


_PARTS = {"store": _store, "snapshot": _snapshot, "faults": _faults}


def _named(name: str, outcomes: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    return ((name, outcome) for outcome in outcomes)


def _text(rows: list[tuple[str, Any]]) -> str:
    lines = [
        (
            "holds" if outcome.passed else "FAILS",
            f"{outcome.seconds:.1f} s",
            name,
            outcome.check + (f": {outcome.detail}" if outcome.detail else ""),
        )
        for name, outcome in rows
    ]
    return answer.table(("VERDICT", "TIME", "PART", "SENTENCE"), lines, right=("TIME",))


def _json(rows: list[tuple[str, Any]]) -> str:
    return answer.as_json(
        [
            {
                "part": name,
                "check": outcome.check,
                "passed": outcome.passed,
                "detail": outcome.detail,
                "seconds": outcome.seconds,
            }
            for name, outcome in rows
        ]
    )
