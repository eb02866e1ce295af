"""Who makes an attempt, and whether they still live: what a clean-up must know before it removes."""

from __future__ import annotations

import os
import socket
from typing import Any

LIVE: set[str] = set()
"""Attempts under way in this process."""


def me() -> dict[str, Any]:
    """Who this process is, so that another can tell whether it still lives."""
    pid = os.getpid()
    return {
        "host": socket.gethostname(),
        "boot": _read_text("/proc/sys/kernel/random/boot_id"),
        "pid_ns": _link("/proc/self/ns/pid"),
        "pid": pid,
        "started": _start_time(pid),
    }


def is_dead(unique: str, owner: dict[str, Any]) -> bool:
    """Whether the owner ran on this very system and does so no more, or gave the attempt up."""
    mine = me()
    if owner.get("host") != mine["host"]:
        return False
    if owner.get("boot") != mine["boot"]:
        return True
    if owner.get("pid_ns") != mine["pid_ns"]:
        return False
    if (owner.get("pid"), owner.get("started")) == (mine["pid"], mine["started"]):
        return unique not in LIVE
    return _start_time(owner.get("pid", 0)) != owner.get("started")


def _start_time(pid: int) -> str:
    """Clock ticks since boot when a process started: with its number, unique until reboot.

    "" for a process that is no more; a zombie is none.
    """
    text = _read_text(f"/proc/{pid}/stat")
    fields = text.rpartition(")")[2].split()
    return fields[19] if len(fields) > 19 and fields[0] not in "ZX" else ""


def _read_text(path: str) -> str:
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:
        return ""


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""
