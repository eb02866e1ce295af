"""From a call of `save()` to a `SaveJob`: what happens on the caller's thread.

`survey` looks at everything and refuses what cannot be stored, without copying; `order` then
captures the values. Between the two the caller may wait for a save in flight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ckptmgr.core import layout, values
from ckptmgr.core.info import Items, is_stateful
from ckptmgr.core.manifest import itemsize
from ckptmgr.core.plan import SavePlan, plan_save
from ckptmgr.engine import leaves, pipeline, shardings, snapshot
from ckptmgr.errors import InvalidOption
from ckptmgr.events import Clock
from ckptmgr.options import Storage


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """A checked call of `save()`: trees surveyed, everything else encoded by value."""

    step: int
    created: float
    called: float
    overwrite: bool
    items: tuple[tuple[str, leaves.Survey | Any], ...]
    metrics: Any
    extra: Any


class Preparer:
    """Prepares the saves of one manager.

    Args:
      storage: how leaves are to be stored.
      clock: for the time of the call.
      rank: this process's number.
    """

    def __init__(self, storage: Storage, clock: Clock, rank: int) -> None:
        self._storage = storage
        self._clock = clock
        self._rank = rank
        self._places = shardings.PlacesCache()

    def survey(
        self,
        step: int,
        state: Any,
        metrics: Mapping[str, Any] | None,
        extra: Any,
        overwrite: bool,
        called: float | None = None,
    ) -> SaveRequest:
        """Looks at every item; `called` is the monotonic time of the call, None for now.

        Raises UnsupportedLeaf, SnapshotLost or InvalidOption.
        """
        created = self._clock.time()
        if metrics is not None and not isinstance(metrics, Mapping):
            raise InvalidOption(f"metrics must be a dict of numbers, got {type(metrics).__name__}")
        named = state if isinstance(state, Items) else {layout.DEFAULT_ITEM: state}
        if not named:
            raise InvalidOption("Items() holds no item")
        return SaveRequest(
            step,
            created,
            self._clock.monotonic() if called is None else called,
            overwrite,
            tuple((name, self._item(step, name, item)) for name, item in named.items()),
            _encoded("metrics", dict(metrics or {})),
            _encoded("extra", extra),
        )

    def _item(self, step: int, name: str, item: Any) -> leaves.Survey | Any:
        if not layout.is_item_name(name):
            raise InvalidOption(f"{name!r} cannot be the name of an item")
        if is_stateful(item):
            return _encoded(f"the state of item {name!r}", item.get_state())
        return leaves.survey(item, self._storage, self._places, step)

    def order(self, request: SaveRequest, mode: str) -> pipeline.SaveJob:
        """Orders the copies: from here on the values are those of the call."""
        items: list[pipeline.TreeItem | pipeline.StateItem] = []
        tables = []
        nbytes = staging_bytes = 0
        for name, survey in request.items:
            if not isinstance(survey, leaves.Survey):
                items.append(pipeline.StateItem(name, survey))
                continue
            plan = plan_save(survey.stored, survey.shards, self._rank)
            staged = snapshot.order(mode, request.step, plan, survey.sources, self._places)
            items.append(pipeline.TreeItem(name, survey.flat, plan, staged))
            tables.append(survey.stored.shardings)
            nbytes += sum(leaf.nbytes for leaf in survey.stored.leaves)
            staging_bytes += _staging_bytes(mode, plan, survey.sources)
        return pipeline.SaveJob(
            step=request.step,
            kind="sync" if mode == "sync" else "async",
            created=request.created,
            overwrite=request.overwrite,
            items=tuple(items),
            metrics=request.metrics,
            extra=request.extra,
            topology={**shardings.topology(tables), "versions": pipeline.versions()},
            nbytes=nbytes,
            mode=mode,
            staging_bytes=staging_bytes,
            called=request.called,
            ordered=self._clock.monotonic(),
        )


def _staging_bytes(mode: str, plan: SavePlan, sources: Sequence[leaves.Source]) -> int:
    """Host memory that the copies of a snapshot take; `sync` copies numpy arrays alone."""
    return sum(
        part.box.size * itemsize(plan.tree.leaves[part.leaf].stored_dtype)
        for part in plan.parts
        if mode != "sync" or isinstance(sources[part.leaf], np.ndarray)
    )


def _encoded(what: str, value: Any) -> Any:
    """Plain data captured by value. Raises InvalidOption naming the place of what cannot be."""
    try:
        return values.encode(value, what)
    except TypeError as exc:
        raise InvalidOption(str(exc)) from exc
