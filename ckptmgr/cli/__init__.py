"""The command line: parse, call the public API, print text or JSON.

Exit status: 0 all is well; 1 something is damaged or was not found, with one line on stderr that
says what; 2 the call was wrong; 3 the directory is there and holds no step (of `verify`: there is
no such step).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import metadata

import jax

from ckptmgr.cli import advising, chaos, listing, pruning, showing, verifying
from ckptmgr.cli.answer import FAILED, USAGE, Answer
from ckptmgr.errors import CheckpointError, InvalidOption


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status. A wrong call raises SystemExit(2)."""
    arguments = _parser().parse_args(argv)
    _use_no_accelerator()
    try:
        answer: Answer = arguments.run(arguments)
    except InvalidOption as exc:
        answer = Answer("", USAGE, str(exc))
    except (CheckpointError, OSError) as exc:
        answer = Answer("", FAILED, str(exc))
    if answer.message:
        print(f"ckptmgr: {_one_line(answer.message)}", file=sys.stderr)
    _write(answer.text)
    return answer.status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ckptmgr",
        description="Looks at checkpoints of ckptmgr and of Orbax; only prune deletes anything.",
        epilog="Exit status: 0 well, 1 damaged or not found, 2 wrong call, 3 no step there.",
    )
    parser.add_argument("--version", action="version", version=f"ckptmgr {_version()}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    advising.add_to(commands)
    listing.add_to(commands)
    pruning.add_to(commands)
    chaos.add_to(commands)
    showing.add_to(commands)
    verifying.add_to(commands)
    return parser


def _version() -> str:
    try:
        return metadata.version("ckptmgr")
    except metadata.PackageNotFoundError:  # run from a source tree
        return "(not installed)"


def _use_no_accelerator() -> None:
    """Looking at a checkpoint must not take the devices of the training beside it.

    JAX chooses its backends at their first use, so this is in time although it is imported.
    """
    if not os.environ.get("JAX_PLATFORMS"):
        jax.config.update("jax_platforms", "cpu")


def _one_line(message: str) -> str:
    return "; ".join(line.strip() for line in message.splitlines() if line.strip())


def _write(text: str) -> None:
    """Prints; a reader that went away (`| head`) is no failure."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
        sys.stdout.flush()
    except BrokenPipeError:
        # What is still buffered would raise again when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
