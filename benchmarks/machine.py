"""The facts of the machine that belong beside every number."""

import contextlib
import importlib.metadata
import os
import platform
import shutil
from pathlib import Path

PACKAGES = ("ckptmgr", "orbax-checkpoint", "jax", "jaxlib", "tensorstore", "numpy")
PEERS = ("torch", "safetensors")  # named only where they are installed


def facts(directory: Path) -> dict:
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "load_at_start": round(os.getloadavg()[0], 1),  # by others: above 1, expect noise
        "ram_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "file_system": file_system(directory),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": {
            package: _version(package) for package in PACKAGES + tuple(filter(_is_installed, PEERS))
        },
    }


def describe(found: dict) -> str:
    versions = ", ".join(f"{package} {version}" for package, version in found["versions"].items())
    return (
        f"{found['cores']} cores ({found['cpu']}), {found['ram_gib']} GiB RAM, "
        f"load {found['load_at_start']}, writing to {found['file_system']}, "
        f"Linux {found['kernel']}\n"
        f"Python {found['python']}, {versions}"
    )


def file_system(directory: Path) -> str:
    """The type of the file system that holds the directory: ext4, xfs, tmpfs, ..."""
    target = directory.resolve()
    best, kind = -1, "unknown"
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, point, fs_type, *_ = line.split()
        mount = Path(point.replace("\\040", " "))
        if target.is_relative_to(mount) and len(mount.parts) >= best:
            best, kind = len(mount.parts), fs_type
    return kind


def default_directory() -> Path:
    """A place for temporary files that is on a disk, where there is one."""
    usual = Path(os.environ.get("TMPDIR", "/tmp"))
    return Path("/var/tmp") if file_system(usual) == "tmpfs" else usual


def free_bytes(directory: Path) -> int:
    return shutil.disk_usage(directory).free


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _version(package: str) -> str:
    return importlib.metadata.version(package) if _is_installed(package) else "(not installed)"


def _is_installed(package: str) -> bool:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return bool(importlib.metadata.version(package))
    return False
