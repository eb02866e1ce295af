"""The audit of a heartbeat: does the asynchronous staging path give what the arrays hold?

The same arrays are staged as an asynchronous save would stage them, and digested; the heartbeat
itself writes what it reads directly and digests that. Both are compared chunk by chunk before
the step is published.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from ckptmgr.core.boxes import Shape
from ckptmgr.core.receipts import Chunk
from ckptmgr.engine import arrays, blocks
from ckptmgr.engine.snapshot import Ordering
from ckptmgr.engine.staged import Staged


class Audit:
    """Digests what was staged, on a thread of its own that ends with it.

    Where no thread can be started it works where it is asked for its result.
    """

    def __init__(self, ordering: Ordering) -> None:
        self._ordering = ordering
        self._found: list[dict[tuple[int, Shape], str]] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="ckptmgr-audit", daemon=True)
        try:
            self._thread.start()
            self._started = True
        except RuntimeError:
            self._started = False

    def differing(self, item: int, chunks: Iterable[Chunk]) -> list[int]:
        """Numbers of the leaves of an item of which a chunk has another digest than in `chunks`.

        Waits for the audit; raises what went wrong in it.
        """
        self._join()
        if self._error is not None:
            raise self._error
        staged = self._found[item]
        return sorted({c.leaf for c in chunks if staged.get((c.leaf, c.index)) != c.digest})

    def end(self) -> None:
        """Ends the thread; what it still had to do is dropped."""
        self._ordering.close()
        if self._started:
            self._thread.join()

    def _join(self) -> None:
        if self._started:
            self._thread.join()
        elif not self._found and self._error is None:
            self._run()

    def _run(self) -> None:
        try:
            self._found = [_digests(staged) for staged in self._ordering.staged]
        except BaseException as exc:
            self._error = exc


def _digests(staged: Staged) -> dict[tuple[int, Shape], str]:
    found: dict[tuple[int, Shape], str] = {}
    for number, wave in enumerate(staged.waves):
        if not staged.is_ready(number):
            staged.wait(number)
        for write in wave:
            leaf = staged.plan.tree.leaves[write.leaf]
            for part in write.parts:
                values = blocks.assemble(leaf, part, staged)
                for chunk in arrays.chunks_of(leaf, part, values):
                    found[chunk.leaf, chunk.index] = chunk.digest
                del values
        staged.free(number)
    return found
