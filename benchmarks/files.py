"""Whole arrays to a file and back, as plainly as the system allows."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np


def write_whole(path: Path, arrays: Iterable[np.ndarray]) -> None:
    """Their bytes to one file that is whole or absent, durable on return."""
    unfinished = path.with_name(f"{path.name}.tmp")
    with open(unfinished, "wb", buffering=0) as file:
        for array in arrays:
            rest = bytes_of(array)
            while rest:
                rest = rest[file.write(rest) :]
        os.fsync(file.fileno())
    unfinished.rename(path)
    directory = os.open(path.parent, os.O_RDONLY)
    os.fsync(directory)
    os.close(directory)


def read_into(file: Any, array: np.ndarray) -> None:
    """The next bytes of the file into an array that lies in one piece. Raises EOFError."""
    rest = bytes_of(array)
    while rest:
        count = file.readinto(rest)
        if not count:
            raise EOFError(f"{file.name}: {len(rest)} bytes are missing")
        rest = rest[count:]


def bytes_of(array: np.ndarray) -> memoryview:
    return memoryview(array.reshape(-1).view(np.uint8))
