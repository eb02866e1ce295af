"""From a call of `save()` to a `SaveJob`: what happens on the caller's thread.

`survey` looks at everything and refuses what cannot be stored, without copying; `job` says what
is to be done; ordering its snapshot then captures the values. Between the first two the caller
may wait for a save in flight.

Trees that are saved again and again have one structure: what there is to know of it (leaves,
plan, recipe of the copies) is worked out once and looked up by JAX's own description of it.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from ckptmgr.core import layout, values
from ckptmgr.core.info import Items, is_stateful
from ckptmgr.core.plan import SavePlan, plan_save
from ckptmgr.engine import leaves, pipeline, shardings
from ckptmgr.engine.documents import Documents
from ckptmgr.engine.leaves import Source
from ckptmgr.engine.recipe import Recipe
from ckptmgr.engine.snapshot import Ordering, Stager
from ckptmgr.engine.staged import Work
from ckptmgr.engine.writing import StateItem, TreeItem
from ckptmgr.errors import InvalidOption, UnsupportedLeaf
from ckptmgr.events import Clock
from ckptmgr.options import Storage

STRUCTURES = 8
"""How many structures of trees are remembered."""


@dataclass(slots=True)
class _Structure:
    """What all trees of one structure have in common.

    Attributes:
      plan: what this process writes.
      keep: numbers of the leaves that are stored, None for all.
      nbytes: bytes of its arrays.
      documents: its metadata files.
      recipes: mode -> how to copy it.
    """

    plan: SavePlan
    keep: tuple[int, ...] | None
    nbytes: int
    documents: Documents
    recipes: dict[str, Recipe] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Tree:
    """One pytree to save: its structure and where its values come from."""

    structure: _Structure
    sources: tuple[Source, ...]


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """A checked call of `save()`: trees surveyed, everything else encoded by value."""

    step: int
    created: float
    called: float
    overwrite: bool
    items: tuple[tuple[str, _Tree | Any], ...]
    metrics: Any
    extra: Any


class Preparer:
    """Prepares the saves of one manager.

    Args:
      storage: how leaves are to be stored.
      stager: takes the snapshots.
      clock: for the time of the call.
      rank, world: this process's number, and how many there are that save together.
    """

    def __init__(
        self, storage: Storage, stager: Stager, clock: Clock, rank: int, world: int = 1
    ) -> None:
        self._storage = storage
        self._stager = stager
        self._clock = clock
        self._rank = rank
        self._alone = world == 1
        self._structures: dict[Hashable, _Structure] = {}

    def compress(self, compression: str | None) -> None:
        """From now on trees are stored so; the structures that are known say otherwise."""
        if compression != self._storage.compression:
            self._storage = replace(self._storage, compression=compression)  # type: ignore[arg-type]
            self._structures.clear()

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

    def _item(self, step: int, name: str, item: Any) -> _Tree | Any:
        if not layout.is_item_name(name):
            raise InvalidOption(f"{name!r} cannot be the name of an item")
        if is_stateful(item):
            return _encoded(f"the state of item {name!r}", item.get_state())
        key, found = _key(item)
        known = self._structures.get(key) if key is not None else None
        if known is not None:
            kept = found if known.keep is None else [found[i] for i in known.keep]
            return _Tree(known, leaves.sources_of(known.plan.tree.leaves, kept, step))
        survey = leaves.survey(item, self._storage, self._stager.places, step)
        if self._alone:
            _refuse_arrays_of_several(survey)
        plan = plan_save(survey.stored, survey.shards, self._rank)
        nbytes = sum(leaf.nbytes for leaf in plan.tree.leaves)
        documents = Documents(replace(survey.flat, leaves=()), plan.tree)
        structure = _Structure(plan, survey.keep, nbytes, documents)
        if key is not None:
            while len(self._structures) >= STRUCTURES:
                del self._structures[next(iter(self._structures))]
            self._structures[key] = structure
        return _Tree(structure, survey.sources)

    def job(
        self,
        request: SaveRequest,
        *,
        name: str,
        old: tuple[str, ...],
        kind: str,
        mode: str,
        since_heartbeat: int,
        audit_mode: str | None,
    ) -> pipeline.SaveJob:
        """What is to be done. Raises InvalidOption where the mode cannot be kept strictly.

        The copies are not ordered yet. `name` and `old` are as in `SaveJob`. With `audit_mode`
        values are read directly, and staged in that mode besides.
        """
        trees = [(label, item) for label, item in request.items if isinstance(item, _Tree)]
        ordering = self._order(request.step, "direct" if audit_mode else mode, trees)
        staged = dict(zip((label for label, _ in trees), ordering.staged, strict=True))
        items: list[TreeItem | StateItem] = []
        for label, item in request.items:
            if isinstance(item, _Tree):
                items.append(TreeItem(label, staged[label], item.structure.documents))
            else:
                items.append(StateItem(label, item))
        stored = [item.structure.plan.tree for _, item in trees]
        topology = shardings.topology([tree.shardings for tree in stored])
        return pipeline.SaveJob(
            step=request.step,
            name=name,
            old=old,
            kind=kind,
            created=request.created,
            overwrite=request.overwrite,
            items=tuple(items),
            ordering=ordering,
            audit=self._order(request.step, audit_mode, trees, True) if audit_mode else None,
            metrics=request.metrics,
            extra=request.extra,
            topology={**topology, "versions": pipeline.versions()},
            nbytes=sum(item.structure.nbytes for _, item in trees),
            mode=mode,
            called=request.called,
            since_heartbeat=since_heartbeat,
        )

    def _order(
        self, step: int, mode: str, trees: Sequence[tuple[str, _Tree]], audit: bool = False
    ) -> Ordering:
        works = []
        for _, item in trees:
            recipes = item.structure.recipes
            if mode not in recipes:
                plan, sources = item.structure.plan, item.sources
                recipes[mode] = self._stager.recipe(mode, plan, sources, self._rank)
            works.append(Work(recipes[mode], item.sources))
        return self._stager.order(step, works, audit)


def _refuse_arrays_of_several(survey: leaves.Survey) -> None:
    """Raises UnsupportedLeaf for an array of which others hold parts: nobody would write those."""
    for leaf, source in zip(survey.stored.leaves, survey.sources, strict=True):
        if isinstance(source, jax.Array) and not source.is_fully_addressable:
            raise UnsupportedLeaf(
                leaf.dotted,
                "an array of several processes, which a manager with Coordination(alone=True) "
                "does not save; a manager that all of them make does",
            )


def _key(item: Any) -> tuple[Hashable | None, list[Any]]:
    """A key that trees of one structure share, None where there is none, and the leaves."""
    try:
        found, treedef = jax.tree_util.tree_flatten(item)
        # equal definitions may have keys of other types: 1, True and 1.0 are equal
        key = (treedef, str(treedef), tuple(map(leaves.signature, found)))
        hash(key)
    except Exception:  # `survey` says what is wrong, if something is
        return None, []
    return key, found


def _encoded(what: str, value: Any) -> Any:
    """Plain data captured by value. Raises InvalidOption naming the place of what cannot be."""
    try:
        return values.encode(value, what)
    except TypeError as exc:
        raise InvalidOption(str(exc)) from exc
