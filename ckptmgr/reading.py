"""Opening steps and directories for reading: what the manager and the module's functions share."""

from __future__ import annotations

import logging
import operator
import os
import re
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from ckptmgr.core import layout
from ckptmgr.core.info import Items, PerProcess, StepInfo, is_stateful
from ckptmgr.core.plan import RestorePlan
from ckptmgr.engine import foreign, goals
from ckptmgr.engine import restore as engine_restore
from ckptmgr.engine.catalog import Catalog
from ckptmgr.engine.goals import Goals
from ckptmgr.engine.listing import Entry
from ckptmgr.engine.memory import no_collections
from ckptmgr.engine.steps import OpenItem, OpenStep, info_of, open_step
from ckptmgr.engine.store import Store, local_path
from ckptmgr.errors import (
    CorruptCheckpoint,
    InvalidOption,
    Problem,
    StepNotFound,
    TreeMismatch,
)
from ckptmgr.events import Clock
from ckptmgr.options import Options, Restore

logger = logging.getLogger("ckptmgr")


def open_entry(root: str, entry: Entry) -> OpenStep:
    """Opens a committed entry of the directory `root`."""
    path = os.path.join(root, layout.step_name(entry.step))
    if entry.manifest is None:
        return foreign.open_foreign(path, entry.step)
    opened = open_step(path, entry.step, entry.manifest)
    info = info_of(entry.manifest, entry.suspect, entry.verified, bool(entry.pinned))
    return replace(opened, info=replace(info, plain=opened.info.plain))


def info_of_entry(store: Store, entry: Entry) -> StepInfo:
    """About a committed step, without reading its trees."""
    if entry.manifest is not None:
        return info_of(entry.manifest, entry.suspect, entry.verified, bool(entry.pinned))
    found = foreign.foreign_info(entry.step, store.path(layout.step_name(entry.step)))
    return replace(found, pinned=bool(entry.pinned))


def refuse_inside_a_step(root: str) -> None:
    """Raises InvalidOption where `root` is a step or an item rather than a run's directory."""
    if looks_like_step(root):
        above = os.path.dirname(root)
        raise InvalidOption(f"{root} is a step; pass the directory above it: {above}")
    if os.path.exists(os.path.join(root, "_METADATA")):
        above = os.path.dirname(os.path.dirname(root))
        raise InvalidOption(
            f"{root} is an item inside a step, or the output of an Orbax Checkpointer; "
            f"a manager takes a run's directory, such as {above}"
        )


def step_number(step: Any) -> int:
    """A step by value. Raises InvalidOption for anything but a whole number from 0."""
    if isinstance(step, (bool, np.bool_)):
        raise InvalidOption(f"a step must be a whole number, got {step!r}")
    try:
        if getattr(step, "shape", ()) not in ((), None):
            raise TypeError
        number = operator.index(step)
    except TypeError:
        raise InvalidOption(f"a step must be a whole number, got {step!r}") from None
    if number < 0:
        raise InvalidOption(f"a step must not be negative, got {number}")
    return number


def looks_like_step(path: str) -> bool:
    """Whether a path is a step: by its files, or as old Orbax's, by its name and its items."""
    names = (layout.MANIFEST, layout.CHECKPOINT_METADATA)
    if any(os.path.exists(os.path.join(path, name)) for name in names):
        return not foreign.is_bare(path)
    root, name = os.path.split(path)
    number = layout.parse_step(name)
    if number is None or foreign.is_bare(path):
        return False
    entry = catalog_of(root).entry(number)
    return entry is not None and entry.problem is None


def open_path(path: Any, step: int | None = None) -> OpenStep:
    """Opens what `path` names: a step's directory, a run's directory and a step of it (None: the
    latest committed), or the bare output of an Orbax Checkpointer.

    Raises StepNotFound saying what the path looks like, or CorruptCheckpoint.
    """
    step = None if step is None else step_number(step)
    where = finished_directory(path)
    if step is None and foreign.is_bare(where) and not looks_like_step(os.path.dirname(where)):
        return foreign.open_bare(where)
    if step is None and looks_like_step(where):
        root, name = os.path.split(where)
        number = layout.parse_step(name)
        if number is None:
            raise StepNotFound(
                f"{where} looks like a step, but its name is not a number; rename it to its step's"
            )
        return open_entry(root, _good(where, catalog_of(root).entry(number), number))
    catalog = catalog_of(where)
    if step is not None:
        return open_entry(where, _good(where, catalog.entry(step), step))
    entry = newest(catalog)
    if entry is None:
        raise StepNotFound(f"there is no committed step in {where}{hint(where)}")
    return open_entry(where, entry)


def finished_directory(path: Any) -> str:
    where = local_path(path)
    if not os.path.isdir(where):
        state = "is a file, not a directory" if os.path.exists(where) else "does not exist"
        raise StepNotFound(f"{where} {state}{_flax_hint(where)}")
    if ".orbax-checkpoint-tmp" in os.path.basename(where):
        raise StepNotFound(f"{where} is a save that did not finish")
    return where


def newest(catalog: Catalog) -> Entry | None:
    """The newest committed step whose values are not in doubt; a warning names newer ones.

    Where all are in doubt the newest of those.
    """
    in_doubt: Entry | None = None
    for entry in catalog.entries():
        if entry.unreadable is not None:
            raise entry.unreadable
        if entry.suspect:
            logger.warning("step %d is suspect (%s) and passed over", entry.step, entry.suspect)
            in_doubt = in_doubt or entry
        elif entry.problem is None:
            return entry
        elif not is_no_step(entry):
            logger.warning("step %d is damaged (%s) and passed over", entry.step, entry.problem)
    return in_doubt


def why_suspect(entry: Entry) -> str:
    """Why a suspect step is passed over, and how to read it nevertheless."""
    return f"suspect: {entry.suspect}; restore(step={entry.step}) reads it all the same"


def is_no_step(entry: Entry) -> bool:
    """An odd directory with a number for a name that never was a step of anyone."""
    return entry.problem is not None and entry.problem.file == ""


def new_attempt() -> str:
    """A name that no other attempt has."""
    return uuid.uuid4().hex[:16]


def catalog_of(root: str) -> Catalog:
    return Catalog(Store(root), Clock(), lambda: "")


def _good(where: str, entry: Entry | None, step: int) -> Entry:
    if entry is None:
        raise StepNotFound(f"there is no step {step} in {where}{hint(where)}", step)
    if entry.problem is not None:
        raise CorruptCheckpoint(step, [entry.problem])
    return entry


def hint(where: str) -> str:
    """What to pass instead, where that can be guessed."""
    if os.path.exists(os.path.join(where, "_METADATA")):
        return f"; it is an item inside a step, pass {os.path.dirname(where)}"
    for name in sorted(os.listdir(where)):
        below = os.path.join(where, name)
        if os.path.isdir(below) and next(catalog_of(below).committed(), None) is not None:
            return f"; {below} has some"
        if hint := _flax_hint(below):
            return f"; {name}{hint}"
    return ""


def _flax_hint(path: str) -> str:
    """Legacy flax checkpoints are files named checkpoint_<n>, or directories of msgpack parts."""
    found = re.fullmatch(r"checkpoint_\d+", os.path.basename(path))
    return " looks like flax's msgpack format, which ckptmgr does not read" if found else ""


@no_collections()
def restore_step(
    step: OpenStep,
    like: Any,
    *,
    item: str | None,
    cast: bool,
    partial: bool,
    options: Options,
    mesh: jax.sharding.Mesh | None = None,
    ready: Callable[[], None] | None = None,
) -> Any:
    """The state of an open step: the tree of a single state, else `Items`.

    `ready` returns when all processes of the job have read an item; None: this one is by itself.
    """
    how = _How(cast, partial, options, mesh, ready)
    if item is not None:
        return _restore_item(step, _item(step, item), like, how)
    if isinstance(like, Items):
        missing = sorted(set(like) - set(step.items))
        extra = [] if partial else sorted(set(step.items) - set(like))
        if missing or extra:
            raise TreeMismatch(
                f"step {step.info.step}",
                len(step.items),
                [f"item {name}" for name in missing],
                [f"item {name}" for name in extra],
            )
        found = {
            name: _restore_item(step, step.items[name], target, how)
            for name, target in sorted(like.items(), key=lambda item: is_stateful(item[1]))
        }  # iterators are set last, when nothing can fail any more
        return Items({name: found[name] for name in like})
    if step.is_single:
        only = step.items[layout.DEFAULT_ITEM]
        return _restore_item(step, only, like, how)
    if like is not None:
        raise InvalidOption(
            f"step {step.info.step} holds the items {sorted(step.items)}; "
            "pass ckptmgr.Items(...) as the target, or item=..."
        )
    unreadable = [name for name, found in step.items.items() if found.unreadable]
    if unreadable:
        rest = sorted(set(step.items) - set(unreadable))
        raise CorruptCheckpoint(
            step.info.step,
            [
                Problem(name, f"{step.items[name].unreadable}; item=... restores one of {rest}")
                for name in unreadable
            ],
        )
    return Items(
        {name: _restore_item(step, found, None, how) for name, found in step.items.items()}
    )


def _item(step: OpenStep, name: str) -> OpenItem:
    if name not in step.items:
        raise StepNotFound(
            f"step {step.info.step} has no item {name!r}; it has {sorted(step.items)}",
            step.info.step,
        )
    return step.items[name]


@dataclass(frozen=True, slots=True)
class _How:
    """How items are restored; see `restore_step`."""

    cast: bool
    partial: bool
    options: Options
    mesh: jax.sharding.Mesh | None
    ready: Callable[[], None] | None = None


def _restore_item(step: OpenStep, item: OpenItem, like: Any, how: _How) -> Any:
    if item.unreadable:
        raise CorruptCheckpoint(step.info.step, [Problem(item.name, item.unreadable)])
    if item.tree is None:
        mine = _own(item, how)
        if is_stateful(like):
            if mine is None:
                raise _not_own(step, item)
            like.set_state(item.states[mine])
            return like
        return PerProcess(item.states) if mine is None else item.states[mine]
    options = how.options.restore
    ready = how.ready
    if ready is None:
        options = replace(options, broadcast_replicas=False)
    wanted = _goals(step, item, like, how, options)
    for note in wanted.notes if how.mesh is not None else ():
        logger.warning("step %s, item %s: %s", step.info.step, item.name, note)
    verify = how.options.integrity.verify_on_restore
    return engine_restore.read(
        item,
        wanted,
        options,
        verify,
        step.info.step,
        ready or (lambda: None),
    )


def _own(item: OpenItem, how: _How) -> int | None:
    """Which of an item's states is this process's, where as many saved it as restore it now."""
    if len(item.states) == jax.process_count():
        return jax.process_index()
    return 0 if how.options.coordination.alone and len(item.states) == 1 else None


def _not_own(step: OpenStep, item: OpenItem) -> InvalidOption:
    """Another number of processes saved it: whose part of the data each would go on with, nobody
    here can know."""
    return InvalidOption(
        f"step {step.info.step}, item {item.name!r}: its state was saved by "
        f"{len(item.states)} processes, each for its own part, and this job has "
        f"{jax.process_count()}; restore(item={item.name!r}) without a target gives all of "
        "them to divide anew, and partial=True restores the rest without it"
    )


def _goals(step: OpenStep, item: OpenItem, like: Any, how: _How, options: Restore) -> Goals:
    number = step.info.step
    if like is None:
        return goals.goals_without_target(item, how.mesh, number)
    where = f"step {number}" + ("" if step.is_single else f", item {item.name}")
    return goals.goals_for_target(
        item, like, where, cast=how.cast, partial=how.partial, options=options
    )


# -- the module's functions -------------------------------------------------------------------


def restore(
    path: Any,
    like: Any = None,
    *,
    step: int | None = None,
    item: str | None = None,
    mesh: jax.sharding.Mesh | None = None,
    cast: bool = False,
    partial: bool = False,
    options: Options | None = None,
) -> Any:
    """Restores from a run's directory (its latest step, or `step`) or a step's own directory.

    With `mesh` and no `like`, every device array goes onto the mesh with its saved partition
    spec; an axis that the mesh lacks or that does not divide is replicated (`plan_restore` says
    so in its notes). Without both, arrays come back as numpy. Raises like
    `CheckpointManager.restore`.
    """
    chosen = options or Options()
    _check_mesh(mesh, like)
    while True:
        try:
            opened = open_path(path, step)
            return restore_step(
                opened, like, item=item, cast=cast, partial=partial, options=chosen, mesh=mesh
            )
        except CorruptCheckpoint as exc:
            if not _has_gone(path, exc.step):
                raise  # else it was deleted while it was read; look again


def _check_mesh(mesh: Any, like: Any) -> None:
    if mesh is not None and not isinstance(mesh, jax.sharding.Mesh):
        raise InvalidOption(f"mesh must be a jax.sharding.Mesh, got {type(mesh).__name__}")
    if mesh is not None and like is not None:
        raise InvalidOption("pass like or mesh, not both: the leaves of like say where they go")


def _has_gone(path: Any, step: int | None) -> bool:
    """Whether a step of the run or at the place that `path` names is not there any more."""
    if step is None:
        return False
    where, name = local_path(path), layout.step_name(step)
    return not os.path.isdir(where if os.path.basename(where) == name else f"{where}/{name}")


def plan_restore(
    path: Any,
    like: Any = None,
    *,
    step: int | None = None,
    item: str | None = None,
    mesh: jax.sharding.Mesh | None = None,
    cast: bool = False,
    partial: bool = False,
    options: Options | None = None,
) -> RestorePlan:
    """What `restore` with the same arguments would read and hold, without reading array data."""
    chosen = options or Options()
    opened = open_path(path, step)
    targets: Mapping[str, Any] = like if isinstance(like, Items) else {}
    names = [item] if item else [n for n in opened.items if not targets or n in targets]
    plans = []
    for name in names:
        found = _item(opened, name)
        if found.tree is not None:
            target = targets.get(name) if targets else like
            how = _How(cast, partial, chosen, mesh)
            wanted = _goals(opened, found, target, how, chosen.restore)
            plans.append(engine_restore.make_plan(found, wanted, chosen.restore))
    return RestorePlan(
        tuple(unit for plan in plans for unit in plan.units),
        sum(plan.wanted_bytes for plan in plans),
        sum(plan.read_bytes for plan in plans),
        sum(plan.target_bytes for plan in plans),
        max((plan.peak_host_bytes for plan in plans), default=0),
        tuple(note for plan in plans for note in plan.notes),
    )
