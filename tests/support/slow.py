"""A store on a disk that takes so long to sync as one of a given rate would, without anybody waiting:
the manager's clock goes on instead."""

import os
import threading
from collections.abc import Callable

from ckptmgr.engine.store import Store
from ckptmgr.events import Clock


class SlowStore(Store):
    """Attributes: clock: the time there; give it to the manager."""

    def __init__(self, root: str, bytes_per_second: float) -> None:
        super().__init__(str(root), durable=True)
        self.clock = _Clock()
        self._rate = bytes_per_second

    def sync_tree(
        self, name: str, skip: Callable[[str], bool] = lambda path: False
    ) -> dict[str, int]:
        sizes = super().sync_tree(name, skip)
        self.clock.go_on(sum(sizes.values()) / self._rate)
        return sizes

    def sync_path(self, name: str) -> None:
        super().sync_path(name)
        if os.path.isfile(self.path(name)):
            self.clock.go_on(os.path.getsize(self.path(name)) / self._rate)


class _Clock(Clock):
    def __init__(self) -> None:
        self._ahead = 0.0
        self._lock = threading.Lock()

    def go_on(self, seconds: float) -> None:
        with self._lock:
            self._ahead += seconds

    def time(self) -> float:
        return super().time() + self._ahead

    def monotonic(self) -> float:
        return super().monotonic() + self._ahead
