"""Plain values as JSON: numpy, tags, and what is refused."""

import datetime
import json
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from ckptmgr.core import values


def there_and_back(value):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return values.decode(json.loads(values.dumps(values.encode(value)), parse_constant=refuse))


@pytest.mark.parametrize("value", [math.inf, -math.inf, -0.0, 1e308, 5e-324, 0.1])
def test_floats_come_back_exactly(value):
    assert repr(there_and_back(value)) == repr(value)


def test_nan_comes_back():
    assert math.isnan(there_and_back({"loss": math.nan})["loss"])
    assert math.isnan(there_and_back(complex(1, math.nan)).imag)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.float64(1.5), 1.5),
        (np.float32(0.1), float(np.float32(0.1))),
        (np.int8(-3), -3),
        (np.uint64(2**64 - 1), 2**64 - 1),
        (np.bool_(True), True),
        (np.complex64(1 + 2j), 1 + 2j),
        (np.array(7), 7),
        (ml_dtypes.bfloat16(1.5), 1.5),
        (np.str_("x"), "x"),
        (bytearray(b"ab"), b"ab"),
    ],
)
def test_numpy_scalars_come_back_as_python_ones(value, expected):
    found = there_and_back(value)
    assert found == expected
    assert type(found) is type(expected)


def test_a_jax_scalar_is_taken_by_value():
    assert there_and_back({"loss": jnp.float32(2.5)}) == {"loss": 2.5}


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.int16).reshape(2, 3),
        np.array([], np.float32),
        np.zeros((0, 3), np.int8),
        np.array([[1, 2], [3, 4]], np.float64).T,
        np.array([1.5, -2], ml_dtypes.bfloat16),
        np.array([True, False]),
        np.array([1, 258], ">i4"),
        np.array([1.5, 3], ">f8"),
    ],
    ids=lambda a: f"{a.dtype.str}{list(a.shape)}",
)
def test_arrays_come_back(array):
    found = there_and_back(array)
    assert found.shape == array.shape
    assert found.dtype.name == array.dtype.name
    assert found.tolist() == array.tolist()
    found[...] = 0  # it is the caller's to change


def test_tuples_bytes_and_odd_keys_come_back():
    value = {1: "a", (2, None): b"\0\xff", None: (1, [2, ()]), b"k": {}, False: 0.5}
    assert there_and_back(value) == value


@pytest.mark.parametrize(
    "value",
    [{"$float": "nan"}, {"$map": []}, {"$nope": 1}, {"$": 0, "a": 1}, {"a": {"$bytes": "x"}}],
)
def test_a_dict_that_looks_like_a_tag_comes_back_as_a_dict(value):
    assert there_and_back(value) == value


def test_values_are_those_of_the_call():
    value = {"a": [1], "b": np.ones(2)}
    encoded = values.encode(value)
    value["a"].append(2)
    value["b"][:] = 0
    found = values.decode(encoded)
    assert found["a"] == [1]
    assert found["b"].tolist() == [1, 1]


class Odd:
    pass


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": [0, Odd()]}, r"extra\['a'\]\[1\] has the type Odd"),
        ({"a": {1, 2}}, r"extra\['a'\] has the type set"),
        (datetime.date(2025, 1, 2), r"extra has the type date"),
        ({frozenset(): 1}, r"extra key has the type frozenset"),
        ((np.array([Odd()]),), r"extra\[0\] is an array of object"),
        (np.array(["x"]), r"extra is an array of <U1"),
        ({"k": np.zeros(1, [("f", "i4")])}, r"extra\['k'\] is an array of .*'f'"),
        ({"t": np.array(0, "M8[s]")}, r"extra\['t'\] is an array of datetime64"),
        ({"k": lambda: 0}, r"extra\['k'\] has the type function"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_its_place(value, message):
    with pytest.raises(TypeError, match=message):
        values.encode(value, "extra")


def test_a_prng_key_is_refused_by_its_place():
    with pytest.raises(TypeError, match=r"extra\['rng'\]"):
        values.encode({"rng": jax.random.key(0)}, "extra")


def test_an_unknown_tag_is_refused_by_name():
    with pytest.raises(ValueError, match=r"unknown tag '\$later'"):
        values.decode({"$later": 1})
