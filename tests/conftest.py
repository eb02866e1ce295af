"""Eight CPU devices, a watchdog for every test, and the fixtures all tests share."""

import faulthandler
import os
from collections.abc import Iterator

import numpy as np
import pytest

# Nothing above imports jax, which reads this once. Children of the tests inherit it.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
_COUNT = "--xla_force_host_platform_device_count"
os.environ["XLA_FLAGS"] = " ".join(
    [f for f in os.environ.get("XLA_FLAGS", "").split() if not f.startswith(_COUNT)]
    + [f"{_COUNT}=8"]
)

WATCHDOG_GRACE = 20.0  # seconds after pytest-timeout had its chance
EXIT_LIMIT = 60.0  # seconds from the last test to the end of the process
SOAK_TIMEOUT = 1800.0
_stderr = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="run the tests marked soak too")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_stderr] = os.dup(2)  # the real one: pytest captures later


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    skip = pytest.mark.skip(reason="a long run; give --soak")
    for item in items:
        if item.get_closest_marker("soak") is None:
            continue
        if not config.getoption("--soak"):
            item.add_marker(skip)
        elif item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(SOAK_TIMEOUT))


# pytest-timeout ends a hung test from a Python thread, and prints every stack. It can do
# nothing where native code holds the interpreter lock; faulthandler can, so it comes second.


def _limit(item: pytest.Item) -> float:
    marker = item.get_closest_marker("timeout")
    given = [*marker.args[:1], marker.kwargs.get("timeout")] if marker else []
    config = item.config
    given += [config.getoption("timeout", None), config.getini("timeout")]
    return float(next((value for value in given if value not in (None, "")), 0))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    limit = _limit(item)
    if limit > 0 and not item.config.getoption("usepdb"):
        faulthandler.dump_traceback_later(
            limit + WATCHDOG_GRACE, exit=True, file=item.config.stash[_stderr]
        )
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    # A thread that nobody closed must not keep the run from ending.
    faulthandler.dump_traceback_later(EXIT_LIMIT, exit=True, file=config.stash[_stderr])


def _mesh(shape: tuple[int, ...], names: tuple[str, ...]):
    import jax

    devices = jax.devices()
    if len(devices) < 8:
        if devices[0].platform == "cpu":
            pytest.fail(f"8 CPU devices wanted, {len(devices)} found: jax was imported too early")
        pytest.skip(f"needs 8 devices; {devices[0].platform} has {len(devices)}")
    return jax.sharding.Mesh(np.array(devices[:8]).reshape(shape), names)


@pytest.fixture
def mesh8():
    """A mesh of 8 devices along 'x'."""
    return _mesh((8,), ("x",))


@pytest.fixture
def mesh42():
    """A mesh of 4x2 devices: 'data' and 'model'."""
    return _mesh((4, 2), ("data", "model"))
