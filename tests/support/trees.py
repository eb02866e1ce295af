"""Comparing trees bit for bit, and the shortest way to save one and read it back."""

import os
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import ckptmgr


def is_key(value: Any) -> bool:
    """Whether `value` is an array of typed PRNG keys."""
    return isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)


def bits(value: Any) -> np.ndarray:
    """The bits of an array as bytes; of types below a byte only the bits that count."""
    if is_key(value):
        value = jax.random.key_data(value)
    array = np.ascontiguousarray(value)
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    raw = array.reshape(-1).view(np.uint8)
    return raw & np.uint8(2 ** _width(array.dtype) - 1)


def _width(dtype: np.dtype) -> int:
    try:
        return min(8, ml_dtypes.iinfo(dtype).bits)
    except ValueError:
        pass
    try:
        return min(8, ml_dtypes.finfo(dtype).bits)
    except ValueError:
        return 8


def assert_same_values(got: Any, want: Any, where: str = "") -> None:
    """One leaf: shape, dtype and bits; a device array may have become numpy."""
    if not hasattr(want, "dtype"):
        assert type(got) is type(want), f"{where}: {got!r} is no {type(want).__name__}"
        assert got == want, f"{where}: {got!r} != {want!r}"
        return
    assert np.shape(got) == np.shape(want), f"{where}: shape {np.shape(got)} != {np.shape(want)}"
    if is_key(want):
        assert is_key(got), f"{where}: {got!r} is no key"
        assert jax.random.key_impl(got) == jax.random.key_impl(want), where
    else:
        assert got.dtype.name == want.dtype.name, f"{where}: {got.dtype} != {want.dtype}"
    assert np.array_equal(bits(got), bits(want)), f"{where}: {got!r} != {want!r}"


def assert_same_leaves(got: Any, want: Any) -> None:
    """Leaves at the same paths, keys compared as text, with the values and bits of `want`."""
    have, need = _by_path(got), _by_path(want)
    assert have.keys() == need.keys()
    for path, expected in need.items():
        assert_same_values(have[path], expected, ".".join(path))


def assert_same_tree(got: Any, want: Any) -> None:
    """Containers of the same classes, and the same leaves."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    assert_same_leaves(got, want)


def assert_same_placement(got: Any, want: Any) -> None:
    """Every device array of `got` lies and counts as the one in `want` does."""
    leaves = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    for found, expected in leaves:
        if isinstance(expected, jax.Array):
            assert isinstance(found, jax.Array)
            assert found.sharding.is_equivalent_to(expected.sharding, expected.ndim)
            assert found.sharding.memory_kind == expected.sharding.memory_kind
            assert found.committed == expected.committed
            assert _weak(found) == _weak(expected)


def _by_path(tree: Any) -> dict[tuple[str, ...], Any]:
    pairs = jax.tree_util.tree_flatten_with_path(tree)[0]
    found = {tuple(key_text(key) for key in path): leaf for path, leaf in pairs}
    assert len(found) == len(pairs)
    return found


def _weak(array: jax.Array) -> bool:
    return not is_key(array) and array.weak_type


def key_text(key: Any) -> str:
    """One key of a path as text."""
    names = ("key", "name", "idx")
    return str(next((getattr(key, name) for name in names if hasattr(key, name)), key))


def abstract(tree: Any) -> Any:
    """The same tree with ShapeDtypeStruct and sharding in the place of device arrays."""

    def one(value: Any) -> Any:
        if not isinstance(value, jax.Array):
            return value
        return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=value.sharding)

    return jax.tree.map(one, tree)


def without_sharding(tree: Any) -> Any:
    """What `jax.eval_shape` gives: shapes and dtypes only."""

    def one(value: Any) -> Any:
        return jax.ShapeDtypeStruct(value.shape, value.dtype) if _is_device(value) else value

    return jax.tree.map(one, tree)


def _is_device(value: Any) -> bool:
    return isinstance(value, jax.Array)


def save(root: Any, tree: Any, step: int = 1, **options: Any) -> str:
    """Saves asynchronously, waits until durable; gives the directory of the step."""
    with ckptmgr.CheckpointManager(root, ckptmgr.Options(**options)) as manager:
        assert manager.save(step, tree).accepted
    return os.path.join(os.fspath(root), str(step))


def files_below(root: Any) -> set[str]:
    """Every file and directory below `root`."""
    found = set()
    for where, dirs, files in os.walk(root):
        found |= {os.path.join(where, name) for name in [*dirs, *files]}
    return found
