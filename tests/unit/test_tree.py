"""Trees: what properties do not single out."""

import collections
import enum
import json
from typing import NamedTuple

import flax.struct
import jax
import numpy as np
import optax
import pytest
from flax import nnx

from ckptmgr.core import tree, values
from ckptmgr.errors import UnsupportedLeaf


def through_json(state):
    flat = tree.flatten(state)
    containers = json.loads(values.dumps(flat.containers))
    return tree.unflatten(containers, lambda i: flat.leaves[i])


def test_paths_are_dotted_as_orbax_spells_them():
    flat = tree.flatten({"params": {"dense": [1, (2, 3)]}, "step": 4})
    assert [tree.dotted(path) for path in flat.paths] == [
        "params.dense.0",
        "params.dense.1.0",
        "params.dense.1.1",
        "step",
    ]
    assert flat.sequence_keys[1] == (False, False, True, True)
    assert flat.leaves == (1, 2, 3, 4)


def test_a_single_leaf_is_a_tree_with_an_empty_path():
    flat = tree.flatten(5)
    assert (flat.paths, flat.leaves, flat.containers) == (((),), (5,), 0)
    assert through_json(5) == 5


@pytest.mark.parametrize(
    "state", [None, {}, [], (), {"a": None}, {"a": {}, "b": [], "c": ()}, [None, [None]]]
)
def test_trees_without_a_leaf_come_back(state):
    flat = tree.flatten(state)
    assert flat.leaves == ()
    assert through_json(state) == state
    assert type(through_json(state)) is type(state)


def test_empty_containers_are_named_for_orbax():
    class Nothing(NamedTuple):
        pass

    flat = tree.flatten({"a": None, "b": {}, "c": [], "d": (), "e": Nothing(), "f": [{}]})
    assert {tree.dotted(path): name for (path, _), name in flat.empties.items()} == {
        "a": "None",
        "b": "Dict",
        "c": "List",
        "d": "Tuple",
        "e": "NamedTuple",
        "f.0": "Dict",
    }


def test_keys_keep_their_type():
    state = {"i": {1: "a", 10: "b", 2: "c"}, "t": {(1, "x"): 0}, "b": {b"k": 1}, "f": {0.5: 2}}
    assert through_json(state) == state
    assert through_json({True: 1}) == {True: 1}
    assert type(next(iter(through_json({True: 1})))) is bool


def test_numpy_integers_as_keys_become_python_ones():
    found = through_json({np.int32(3): 1})
    assert found == {3: 1}
    assert type(next(iter(found))) is int


def test_an_ordered_dict_keeps_its_order():
    state = collections.OrderedDict(z=1, a=2)
    found = through_json(state)
    assert isinstance(found, collections.OrderedDict)
    assert list(found.items()) == [("z", 1), ("a", 2)]
    assert tree.flatten(state).leaves == (1, 2)


def test_leaves_of_a_dict_come_in_the_order_of_sorted_keys():
    assert tree.flatten({"b": 1, "a": 2}).leaves == (2, 1)
    assert tree.flatten({10: 1, 9: 2}).leaves == (2, 1)


class Point(NamedTuple):
    x: int
    y: int


def test_a_namedtuple_comes_back_with_its_name_and_fields():
    found = through_json({"p": Point(1, 2)})["p"]
    assert (found.x, found.y) == (1, 2)
    assert type(found).__name__ == "Point"
    assert type(found) is type(through_json(Point(3, 4)))
    assert tree.flatten({"p": Point(1, 2)}).plain == {"p": f"{__name__}.Point"}


def test_an_optimizer_state_comes_back_by_field():
    state = optax.adam(1e-3).init({"w": np.ones(2, np.float32)})
    found = through_json(state)
    assert type(found[0]).__name__ == "ScaleByAdamState"
    assert found[0].mu["w"].tolist() == [0, 0]
    assert type(found[1]).__name__ == type(state[1]).__name__


@flax.struct.dataclass
class Model:
    w: int
    act: str = flax.struct.field(pytree_node=False, default="relu")


def test_a_flax_struct_comes_back_as_a_dict_of_its_leaves():
    assert through_json({"m": Model(7)}) == {"m": {"w": 7}}
    assert tree.flatten({"m": Model(7)}).plain == {"m": f"{__name__}.Model"}


def test_an_nnx_state_comes_back_as_a_dict():
    state = nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    flat = tree.flatten(state)
    pairs = jax.tree_util.tree_flatten_with_path(state)[0]
    assert [id(leaf) for leaf in flat.leaves] == [id(leaf) for _, leaf in pairs]
    found = through_json(state)
    shapes = jax.tree.map(np.shape, found)
    assert jax.tree.leaves(shapes["kernel"], is_leaf=lambda x: isinstance(x, tuple)) == [(2, 3)]
    assert jax.tree.leaves(shapes["bias"], is_leaf=lambda x: isinstance(x, tuple)) == [(3,)]


def test_a_node_registered_without_key_names_comes_back_by_number():
    class Box:
        def __init__(self, *parts):
            self.parts = parts

    jax.tree_util.register_pytree_node(Box, lambda b: (b.parts, None), lambda _, c: Box(*c))
    assert through_json(Box(5, 6)) == {"0": 5, "1": 6}


def test_a_defaultdict_comes_back_as_a_dict():
    found = through_json(collections.defaultdict(list, a=1))
    assert type(found) is dict
    assert found == {"a": 1}


def test_two_leaves_with_the_same_path_are_refused_by_name():
    state = {"m": collections.OrderedDict([(1, 0), ("1", 0)])}
    with pytest.raises(UnsupportedLeaf, match=r"leaf 'm.1': two leaves .* same path") as refused:
        tree.flatten(state)
    assert refused.value.leaf == "m.1"


def test_keys_that_jax_cannot_sort_are_refused_by_name():
    with pytest.raises(UnsupportedLeaf, match=r"leaf 'a\.b'") as refused:
        tree.flatten({"a": {"b": {1: 0, "x": 0}}})
    assert refused.value.leaf == "a.b"


def test_a_key_that_cannot_be_stored_is_refused_by_name():
    class Color(enum.Enum):
        RED = 1

    with pytest.raises(UnsupportedLeaf, match=r"leaf 'a\.Color.RED': .*key has the type Color"):
        tree.flatten({"a": {Color.RED: 0}})


def test_a_dict_class_that_jax_does_not_know_is_a_leaf():
    class Odd(dict):
        pass

    odd = Odd(a=1)
    assert tree.flatten({"x": odd}).leaves == (odd,)


def test_match_says_what_is_missing_and_what_is_extra():
    found = tree.match([("a",), ("b",), ("c",)], [("c",), ("d",), ("a",)])
    assert found.pairs == ((2, 0), (0, 2))
    assert found.missing == (("d",),)
    assert found.extra == (("b",),)


def test_a_leaf_that_was_left_out_comes_back_as_none():
    flat = tree.flatten({"a": 1, "b": [2, 3]})
    kept = tree.without_leaves(flat.containers, {0: 0, 2: 1})
    assert tree.unflatten(kept, lambda i: ("one", "three")[i]) == {"a": "one", "b": [None, "three"]}
