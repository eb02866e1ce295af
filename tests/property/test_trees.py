"""Trees taken apart and put together, against JAX."""

import collections
import json

import jax
from hypothesis import given
from hypothesis import strategies as st

from ckptmgr.core import tree, values
from tests.property.strategies import Layer, Pair, Train, trees

LEAVES = st.integers(0, 9) | st.text(max_size=2) | st.floats(allow_nan=False)


def through_json(flat: tree.Flat):
    containers = json.loads(values.dumps(flat.containers))
    return tree.unflatten(containers, lambda i: flat.leaves[i])


def plainly(node):
    """What should come back: user classes as dicts, defaultdicts as dicts."""
    if isinstance(node, Layer):
        return {"kernel": plainly(node.kernel), "bias": plainly(node.bias)}
    if isinstance(node, Train):
        return {"params": plainly(node.params), "step": plainly(node.step)}
    if isinstance(node, Pair):
        return Pair(plainly(node.first), plainly(node.second))
    if isinstance(node, (list, tuple)):
        return type(node)(map(plainly, node))
    if isinstance(node, collections.OrderedDict):
        return collections.OrderedDict((key, plainly(child)) for key, child in node.items())
    if isinstance(node, dict):
        return {key: plainly(child) for key, child in node.items()}
    return node


def assert_same(found, wanted):
    if isinstance(wanted, Pair):
        assert (type(found).__name__, found._fields) == ("Pair", Pair._fields)
    else:
        assert type(found) is type(wanted)
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        if isinstance(wanted, collections.OrderedDict):
            assert list(found) == list(wanted)
        for key in wanted:
            assert_same(found[key], wanted[key])
    elif isinstance(wanted, (list, tuple)):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert_same(one, other)
    else:
        assert found == wanted


@given(trees(LEAVES))
def test_the_leaves_and_paths_are_those_of_jax_in_its_order(state):
    flat = tree.flatten(state)
    pairs = jax.tree_util.tree_flatten_with_path(state)[0]
    assert [id(leaf) for leaf in flat.leaves] == [id(leaf) for _, leaf in pairs]
    assert list(flat.paths) == [tuple(map(tree.key_text, path)) for path, _ in pairs]
    for (path, _), flags in zip(pairs, flat.sequence_keys, strict=True):
        assert flags == tuple(isinstance(key, jax.tree_util.SequenceKey) for key in path)


@given(trees(LEAVES, user_classes=False))
def test_plain_containers_come_back_as_they_were(state):
    flat = tree.flatten(state)
    found = through_json(flat)
    assert jax.tree.structure(found) == jax.tree.structure(state)
    assert_same(found, state)
    assert flat.plain == {}


@given(trees(LEAVES))
def test_user_classes_come_back_in_a_plain_form(state):
    assert_same(through_json(tree.flatten(state)), plainly(state))


@given(trees(LEAVES))
def test_a_tree_matches_what_was_stored_of_it(state):
    flat = tree.flatten(state)
    found = tree.match(flat.paths, flat.paths)
    assert found.pairs == tuple((i, i) for i in range(len(flat.paths)))
    assert found.missing == found.extra == ()


@given(trees(LEAVES), st.data())
def test_what_is_left_out_leaves_the_others_in_place(state, data):
    flat = tree.flatten(state)
    keep = [i for i in range(len(flat.leaves)) if data.draw(st.booleans())]
    numbers = {old: new for new, old in enumerate(keep)}
    containers = tree.without_leaves(flat.containers, numbers)
    found = tree.unflatten(containers, lambda i: ("leaf", keep[i]))
    gone = object()
    marks = iter([("leaf", i) if i in numbers else gone for i in range(len(flat.leaves))])
    expected = tree.unflatten(flat.containers, lambda _: next(marks))

    def emptied(node):
        return jax.tree.map(
            lambda leaf: None if leaf is gone else leaf,
            node,
            is_leaf=lambda x: x is gone or (isinstance(x, tuple) and x[:1] == ("leaf",)),
        )

    assert_same(found, emptied(expected))
