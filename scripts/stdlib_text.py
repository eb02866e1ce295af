"""Text to train on that every machine has: the sources of Python's own standard library."""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import ConfigDict

SUFFIXES = {".py", ".rst", ".txt"}
NOT_THE_LIBRARY = {"site-packages", "dist-packages", "__pycache__"}
HELD_OUT_EVERY = 20  # every 20th file is kept for evaluation


def load(max_bytes: int) -> tuple[np.ndarray, np.ndarray]:
    """Training and held-out text as bytes, the same on every run of one Python installation."""
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    room = max_bytes
    for number, path in enumerate(_files(Path(os.__file__).parent)):
        content = path.read_bytes()[:room]
        parts[number % HELD_OUT_EVERY == 0].append(content)
        room -= len(content)
        if room == 0:
            break
    train, held_out = (np.frombuffer(b"".join(part), np.uint8) for part in parts)
    return train, held_out


def _files(library: Path) -> Iterator[Path]:
    """The library's text files in an order that depends on their names alone."""
    for folder, folders, names in os.walk(library):
        folders[:] = sorted(set(folders) - NOT_THE_LIBRARY)
        for name in sorted(names):
            if Path(name).suffix in SUFFIXES:
                yield Path(folder, name)


class Batches:
    """Endless batches of windows of text, in a new random order each epoch.

    Where it stands is two numbers, the seed and how many batches it has given, so a resumed run
    continues with the very batch that comes next. `get_state` and `set_state` are the methods that
    Grain's iterators have, and ckptmgr saves any object that has them.
    """

    def __init__(self, text: np.ndarray, *, batch: int, length: int, seed: int):
        # One byte more than `length`: inputs and targets are the window without its ends.
        windows = text.size // (length + 1)
        if windows < batch:
            raise ValueError(f"{text.size} bytes of text do not fill one batch of {batch}")
        self._windows = text[: windows * (length + 1)].reshape(windows, length + 1)
        self._text = hashlib.sha256(self._windows).hexdigest()
        self._batch = batch
        self._seed = seed
        self._given = 0

    def __iter__(self) -> Iterator[np.ndarray]:
        return self

    def __next__(self) -> np.ndarray:
        epoch, index = divmod(self._given, len(self._windows) // self._batch)
        order = np.random.default_rng((self._seed, epoch)).permutation(len(self._windows))
        self._given += 1
        chosen = order[index * self._batch : (index + 1) * self._batch]
        return self._windows[chosen].astype(np.int32)

    def get_state(self) -> dict[str, Any]:
        return {"seed": self._seed, "given": self._given, "text": self._text}

    def set_state(self, state: dict[str, Any]) -> None:
        if state["text"] != self._text:
            raise ValueError(
                "the text differs from the one of the checkpoint: another Python, or other"
                " data options; start a new checkpoint directory or use what was used before"
            )
        self._seed, self._given = state["seed"], state["given"]


def batches(text: np.ndarray, config: ConfigDict) -> Batches:
    data = config.data
    return Batches(text, batch=data.batch, length=data.length, seed=config.seed)
