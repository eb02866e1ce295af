"""Imports go downward, and importing the library does nothing else."""

import ast
import pathlib

import pytest

import ckptmgr
from tests.support import run_python

ROOT = pathlib.Path(ckptmgr.__file__).parent

# Lowest first; rooms on one line may not import each other.
LAYERS = [
    ("errors",),
    ("core",),
    ("options", "events"),
    ("sinks",),
    ("engine",),
    ("reading", "saving"),
    ("checking", "describing", "pruning", "restoring", "watching"),
    ("manager",),
    ("__init__",),
    ("orbax", "testing"),
    ("cli",),
    ("__main__",),
]
HEIGHT = {room: height for height, rooms in enumerate(LAYERS) for room in rooms}

# What pure code has no use for.
OUTSIDE = {
    "asyncio",
    "concurrent",
    "ctypes",
    "glob",
    "io",
    "mmap",
    "multiprocessing",
    "os",
    "pathlib",
    "random",
    "shutil",
    "signal",
    "socket",
    "subprocess",
    "tempfile",
    "threading",
    "time",
    "datetime",
    "uuid",
    "tensorstore",
    "orbax",
    "etils",
    "flax",
    "logging",
}
MODULES = sorted(ROOT.rglob("*.py"))


def room_of(path: pathlib.Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported(path: pathlib.Path) -> list[tuple[int, str]]:
    """(line, dotted name) of every import, wherever it stands; names of `from` are included."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return found


def target_room(name: str) -> str:
    """The room that a dotted name of ckptmgr lies in; names of the package itself are its own."""
    part = (name.split(".") + [""])[1]
    return part if part in HEIGHT and part != "__init__" else "__init__"


def test_every_module_lies_in_a_room():
    assert {room_of(path) for path in MODULES} <= set(HEIGHT)
    assert {"core", "engine", "cli", "manager", "reading"} <= {room_of(path) for path in MODULES}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_downward(path):
    here = room_of(path)
    wrong = [
        f"line {line}: {here} imports {name}"
        for line, name in imported(path)
        if name.split(".")[0] == "ckptmgr"
        and target_room(name) != here
        and HEIGHT[target_room(name)] >= HEIGHT[here]
    ]
    assert wrong == []


@pytest.mark.parametrize(
    "path", [p for p in MODULES if room_of(p) == "core"], ids=lambda path: path.stem
)
def test_core_touches_nothing_outside(path):
    found = {name.split(".")[0] for _, name in imported(path)}
    assert found & OUTSIDE == set()
    calls = {
        node.func.id
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert calls & {"open", "print", "input", "exec", "eval"} == set()


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_only_the_rooms_at_the_edge_import_orbax(path):
    names = {name.split(".")[0] for _, name in imported(path)}
    assert "orbax" not in names or room_of(path) == "orbax"
    assert "flax" not in names


def test_importing_loads_neither_orbax_nor_flax():
    done = run_python(
        """
        import sys
        import ckptmgr
        print(sorted({name.split(".")[0] for name in sys.modules} & {"orbax", "flax", "optax"}))
        """
    )
    assert done.stdout == "[]\n"


def test_importing_changes_no_logging_and_prints_nothing():
    done = run_python(
        """
        import logging
        import absl.logging
        import jax

        def state():
            root = logging.getLogger()
            return [
                root.level, list(root.handlers), root.disabled, logging.root.manager.disable,
                absl.logging.get_verbosity(), absl.logging.get_absl_logger().level,
                logging.getLogger("jax").level, logging.lastResort, logging.getLoggerClass(),
            ]

        before = state()
        import ckptmgr
        import ckptmgr.cli
        assert state() == before, (before, state())
        ours = logging.getLogger("ckptmgr")
        assert (ours.level, ours.propagate) == (logging.NOTSET, True)
        """
    )
    assert (done.stdout, done.stderr) == ("", "")


def test_importing_starts_no_backend_and_no_thread():
    done = run_python(
        """
        import threading
        import ckptmgr
        import jax
        jax.config.update("jax_platforms", "no_such_platform")  # fails from here, if not before
        try:
            jax.devices()
        except RuntimeError as exc:
            print("no_such_platform" in str(exc), threading.active_count())
        """,
        env={"JAX_PLATFORMS": None},
    )
    assert done.stdout == "True 1\n"
