"""Every container comes back: exactly where it needs no user class, else with a target."""

import collections
import dataclasses
import enum
import typing

import flax.linen
import flax.struct
import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.core import FrozenDict, freeze
from flax.training import train_state

import ckptmgr
from tests.support import trees


class Moments(typing.NamedTuple):
    mu: typing.Any
    nu: typing.Any
    count: typing.Any = 0


class Nothing(typing.NamedTuple):
    pass


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    kernel: typing.Any
    bias: typing.Any
    name: str = dataclasses.field(default="", metadata={"static": True})


@flax.struct.dataclass
class Model:
    params: typing.Any
    extra: typing.Any
    apply: typing.Callable = flax.struct.field(pytree_node=False)
    label: str = flax.struct.field(pytree_node=False, default="")


class MyDict(dict):
    """A dictionary class that JAX knows by registration."""


jax.tree_util.register_pytree_with_keys(
    MyDict,
    lambda d: ([(jax.tree_util.DictKey(k), d[k]) for k in sorted(d)], tuple(sorted(d))),
    lambda keys, values: MyDict(zip(keys, values, strict=True)),
)


@jax.tree_util.register_pytree_node_class
class Unnamed:
    """A node without key names: JAX numbers its children."""

    def __init__(self, *children):
        self.children = children

    def tree_flatten(self):
        return self.children, None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def round_trip(root, tree):
    """Saves `tree`; with a target the very same comes back. Returns what comes back without."""
    trees.save(root, tree)
    for like in (tree, trees.abstract(tree), trees.without_sharding(tree)):
        trees.assert_same_tree(ckptmgr.restore(root, like), tree)
    return ckptmgr.restore(root)


def exact(root, tree):
    """Saves `tree`; the same structure comes back even without a target."""
    back = round_trip(root, tree)
    trees.assert_same_tree(back, tree)
    return back


X = np.arange(3, dtype=np.float32)


@pytest.mark.parametrize(
    "tree",
    [
        jnp.arange(4), np.arange(4), 3.5, True, None, "text", b"bytes", 2**100, np.float32(2), {}, [], (),
        jnp.float32(2), collections.OrderedDict(), [None], (X,), {"a": None}, np.zeros((0, 2)), jax.random.key(3),
    ],
    ids=lambda tree: f"{type(tree).__name__}-{jax.tree.structure(tree)}",
)  # fmt: skip
def test_a_bare_leaf_or_an_empty_container_can_be_the_whole_tree(tmp_path, tree):
    back = exact(tmp_path, tree)
    assert isinstance(tree, jax.Array) or type(back) is type(tree)


def test_lists_tuples_dicts_and_none_come_back_as_they_were_without_a_target(tmp_path):
    tree = {
        "tuple": (X, [X + 1, (X + 2,)], {"k": (X + 3, None)}),
        "list": [{}, [], (), None, X, [None, [None]]],
        "first": (7, (), X),
        "ordered": collections.OrderedDict([("z", X), ("a", X + 1), ("m", {})]),
        "empty_ordered": collections.OrderedDict(),
        "deep": {"a": {"b": {"c": {"d": [[[[X]]]]}}}},
    }
    back = exact(tmp_path, tree)
    assert type(back["tuple"]) is tuple and type(back["tuple"][1]) is list
    assert (
        list(back["ordered"]) == ["z", "a", "m"]
        and type(back["ordered"]) is collections.OrderedDict
    )
    # What came back goes where the original went.
    new = jax.device_put((back["tuple"], jax.tree.map(np.zeros_like, tree["tuple"])))
    chosen = jax.lax.cond(True, lambda a, b: a, lambda a, b: b, *new)
    trees.assert_same_tree(chosen, tree["tuple"])


def test_dictionary_keys_keep_type_and_order(tmp_path):
    tree = {
        "ints": {0: X, 1: X + 1, 10: X + 2, 2: X + 3, -1: X + 4},
        "mixed": collections.OrderedDict([("b", X), (3, X + 1), ("a", X + 2)]),
        "bools": {True: X, False: X + 1},
        "floats": {0.5: X, 1.5: X + 1},
        "tuples": {(0, "a"): X, (0, "b"): X + 1},
        "bytes": {b"k": X},
        "none": {None: X},
        "nested": {3: {4: {5: X}}},
    }
    back = exact(tmp_path, tree)
    assert list(back["ints"]) == sorted(tree["ints"])
    assert {type(key) for key in back["ints"]} == {int}
    assert [type(key) for key in back["bools"]] == [bool, bool]
    assert list(back["mixed"]) == ["b", 3, "a"]


def test_numpy_integer_keys_come_back_as_the_equal_python_integers(tmp_path):
    trees.save(tmp_path, {np.int64(1): X, np.int32(2): X + 1})
    back = ckptmgr.restore(tmp_path)
    trees.assert_same_tree(back, {1: X, 2: X + 1})


def test_any_text_can_be_a_key(tmp_path):
    names = [
        "mlp/~/linear_0", "/", "//", "a//b", "a/", "/a", ".", "..", "...", "a.b", " ", " a ", "", "é\U0001f600", "\n",
        "a\0b", "%2F", "a\\b", "*?[", "'\"", "$map", "#", "ckptmgr/leaves/0", ".zarray", "manifest.ocdbt", "d",
        "_METADATA", "x" * 300, "CON", "-",
    ]  # fmt: skip
    tree = {name: {"w": np.full(3, i), "b": i} for i, name in enumerate(names)}
    tree |= {"flat": {name: np.full(2, -i) for i, name in enumerate(names)}}
    exact(tmp_path, tree)


def test_leaves_whose_dotted_names_collide_stay_apart(tmp_path):
    tree = {
        "a.b": X, "a": {"b": X + 1, "b.c": X + 2, "b/c": X + 3}, "a.b.c": X + 4,
        "s.t": "one", "s": {"t": "two"}, "n": {"1": 5}, "n.1": 6, "l": [X, X + 1], "l.0": X + 5, "l.1": "text",
        "": {"": X + 6}, ".": X + 7,
        "p/q": X + 8, "p": {"q": X + 9, "q/.zarray": X + 10},
    }  # fmt: skip
    exact(tmp_path, tree)


def test_keys_that_read_the_same_as_text_are_refused_by_path(tmp_path):
    tree = {"a": collections.OrderedDict([(1, X), ("1", X + 1)])}
    with ckptmgr.CheckpointManager(tmp_path) as manager:
        before = trees.files_below(tmp_path)
        with pytest.raises(ckptmgr.UnsupportedLeaf, match="same path") as caught:
            manager.save(1, tree)
        assert caught.value.leaf == "a.1"
        assert trees.files_below(tmp_path) == before


class Color(enum.Enum):
    RED = 1


class Key:
    """A key that JAX can sort and JSON cannot hold."""

    def __lt__(self, other):
        return id(self) < id(other)


@pytest.mark.parametrize("key", [Color.RED, Key(), frozenset({1})], ids=["enum", "object", "set"])
def test_a_key_that_cannot_be_stored_is_refused_by_path(tmp_path, key):
    with ckptmgr.CheckpointManager(tmp_path) as manager:
        before = trees.files_below(tmp_path)
        with pytest.raises(ckptmgr.UnsupportedLeaf, match="key") as caught:
            manager.save(1, {"outer": {key: X}})
        assert caught.value.leaf == f"outer.{key}"
        assert trees.files_below(tmp_path) == before


def test_keys_that_jax_cannot_sort_are_refused_by_path(tmp_path):
    with ckptmgr.CheckpointManager(tmp_path) as manager:
        before = trees.files_below(tmp_path)
        with pytest.raises(ckptmgr.UnsupportedLeaf) as caught:
            manager.save(1, {"outer": {1: X, "a": X}})
        assert caught.value.leaf == "outer"
        assert trees.files_below(tmp_path) == before


def test_a_namedtuple_comes_back_as_one_of_the_same_name_and_fields(tmp_path):
    tree = {
        "m": Moments(X, {"k": X + 1}, 3),
        "none": Nothing(),
        "nested": (Moments(None, (), Moments(1, 2)),),
    }
    back = round_trip(tmp_path, tree)
    assert type(back["m"]).__name__ == "Moments" and back["m"]._fields == ("mu", "nu", "count")
    assert isinstance(back["m"], tuple) and back["m"].count == 3
    assert type(back["none"]).__name__ == "Nothing" and back["none"] == ()
    assert back["nested"][0].count == (1, 2, 0) and back["nested"][0].nu == ()
    trees.assert_same_leaves(back, tree)
    again = ckptmgr.restore(tmp_path)
    assert jax.tree.structure(again) == jax.tree.structure(back)  # the class is the same each time
    plain = ckptmgr.CheckpointManager(tmp_path).info(1).plain
    assert plain["default: m"].endswith(".Moments") and plain["default: none"].endswith(".Nothing")


def test_a_dataclass_comes_back_as_a_dict_of_its_fields_and_with_a_target_as_itself(tmp_path):
    tree = {"layer": Layer(X, None, "first"), "l": [Layer(X + 1, X + 2)]}
    back = round_trip(tmp_path, tree)
    trees.assert_same_leaves(back, tree)
    assert back["layer"] == {"kernel": back["layer"]["kernel"], "bias": None}
    assert type(back["l"][0]) is dict and set(back["l"][0]) == {"kernel", "bias"}
    like = {"layer": Layer(X, None, "second"), "l": [Layer(X, X)]}
    kept = ckptmgr.restore(tmp_path, like)
    assert isinstance(kept["layer"], Layer) and kept["layer"].name == "second"


def test_a_flax_struct_as_root_keeps_class_and_static_fields_of_the_target(tmp_path):
    def apply(x):
        return x

    state = Model(freeze({"dense": {"kernel": X}}), None, apply, "saved")
    back = round_trip(tmp_path, state)
    assert back == {
        "params": {"dense": {"kernel": back["params"]["dense"]["kernel"]}},
        "extra": None,
    }
    like = Model(freeze({"dense": {"kernel": X * 0}}), None, print, "mine")
    kept = ckptmgr.restore(tmp_path, like)
    assert type(kept) is Model and kept.apply is print and kept.label == "mine"
    assert isinstance(kept.params, FrozenDict)
    trees.assert_same_values(kept.params["dense"]["kernel"], X)
    with pytest.raises(ckptmgr.TreeMismatch) as caught:
        ckptmgr.restore(tmp_path, like.replace(extra=X))
    assert caught.value.missing == ("extra",) and not caught.value.extra


def test_registered_nodes_of_any_kind_come_back(tmp_path):
    tree = {
        "mydict": MyDict(b=X, a=X + 1), "empty": MyDict(), "unnamed": Unnamed(X, (X + 1, None)),
        "default": collections.defaultdict(list, {"k": X}),
        "partial": jax.tree_util.Partial(max, X, key=None), "frozen": freeze({"a": {}, "b": {"c": X}}),
    }  # fmt: skip
    back = round_trip(tmp_path, tree)
    assert back["mydict"].keys() == {"a", "b"} and back["empty"] == {} and back["frozen"]["a"] == {}
    trees.assert_same_values(back["mydict"]["b"], X)
    trees.assert_same_values(back["default"]["k"], X)
    trees.assert_same_values(back["frozen"]["b"]["c"], X)
    trees.assert_same_leaves(back["unnamed"], {0: X, 1: (X + 1, None)})


def params():
    return {
        "dense": {"kernel": jnp.linspace(-1, 1, 12).reshape(4, 3), "bias": jnp.zeros(3)},
        "norm": {"scale": jnp.ones(3, jnp.bfloat16)},
    }


def transforms():
    mask = {"dense": {"kernel": True, "bias": False}, "norm": {"scale": False}}
    labels = {"dense": {"kernel": "a", "bias": "b"}, "norm": {"scale": "b"}}
    return {
        "adamw": optax.adamw(1e-3),
        "chain": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3), optax.ema(0.9)),
        "masked": optax.chain(optax.adam(1e-3), optax.masked(optax.trace(0.9), mask)),
        "multi": optax.multi_transform({"a": optax.adam(1e-3), "b": optax.set_to_zero()}, labels),
        "inject": optax.inject_hyperparams(optax.sgd)(learning_rate=0.1, momentum=0.9),
        "every": optax.MultiSteps(optax.adam(1e-3), 2).gradient_transformation(),
        "schedule": optax.adam(optax.cosine_decay_schedule(1e-3, 10)),
    }


def test_every_optax_state_comes_back(tmp_path):
    tree = {name: tx.init(params()) for name, tx in transforms().items()}
    back = round_trip(tmp_path, tree)
    trees.assert_same_leaves(back["adamw"], tree["adamw"])
    mu = back["adamw"][0].mu["dense"]["kernel"]
    trees.assert_same_values(mu, tree["adamw"][0].mu["dense"]["kernel"])
    assert type(back["chain"]) is tuple and len(back["chain"]) == 3
    assert (
        jax.tree.structure(back["chain"][0]) == jax.tree.structure(tree["chain"][0])
        or back["chain"][0] == ()
    )


def test_a_flax_train_state_comes_back_as_it_was_when_saved(tmp_path):
    class Net(flax.linen.Module):
        @flax.linen.compact
        def __call__(self, x):
            return flax.linen.Dense(2)(flax.linen.Dense(4)(x))

    net = Net()
    state = train_state.TrainState.create(
        apply_fn=net.apply,
        params=net.init(jax.random.key(0), jnp.ones((1, 3)))["params"],
        tx=optax.adamw(1e-2),
    )

    @jax.jit
    def update(state, x):
        grads = jax.grad(lambda p: (state.apply_fn({"params": p}, x) ** 2).sum())(state.params)
        return state.apply_gradients(grads=grads)

    first = state
    for i in range(3):
        state = update(state, jnp.full((2, 3), 1.0 + i))
    captured = jax.device_get(state)
    with ckptmgr.CheckpointManager(tmp_path) as manager:
        manager.save(3, state)
        for _ in range(2):
            state = update(state, jnp.ones((2, 3)))
        manager.wait()
        back = manager.restore(state, step=3)
        trees.assert_same_leaves(back, captured)
        assert type(back) is train_state.TrainState
        assert back.tx is state.tx and back.apply_fn == net.apply
        # A fresh state, whose step is a Python 0, takes the values too.
        fresh = manager.restore(first, step=3)
        assert int(fresh.step) == 3
        trees.assert_same_leaves(fresh.params, captured.params)
        plain = manager.restore(step=3)
    trees.assert_same_leaves(plain["params"], captured.params)
    assert set(plain) == {"step", "params", "opt_state"}


class Net(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(2, 3, rngs=rngs), nnx.Linear(3, 2, rngs=rngs)])
        self.norm = nnx.BatchNorm(2, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.scale = nnx.Param(jnp.ones(()))

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.drop(self.norm(x)) * self.scale[...]


def test_nnx_state_with_rngs_and_lists_comes_back(tmp_path):
    net = Net(nnx.Rngs(0, dropout=1))
    x = jnp.ones((4, 2))
    net(x)  # the stream of the dropout moves on
    graph, live = nnx.split(net)
    state = jax.tree.map(lambda leaf: leaf, live)  # `live` changes with the model
    trees.save(tmp_path, live)
    wanted = net(x)
    like = nnx.eval_shape(lambda: nnx.state(Net(nnx.Rngs(0, dropout=1))))
    for target in (nnx.state(Net(nnx.Rngs(5, dropout=6))), like):
        back = ckptmgr.restore(tmp_path, target)
        assert type(back) is type(state)
        trees.assert_same_leaves(back, state)
        fresh = nnx.merge(graph, back)
        assert np.array_equal(fresh(x), wanted)
    plain = ckptmgr.restore(tmp_path)
    assert list(plain["layers"]) == [0, 1]  # whole numbers, not text
    trees.assert_same_leaves(plain, state)


def test_nnx_updates_a_model_from_its_pure_dict(tmp_path):
    net = Net(nnx.Rngs(3))
    pure = nnx.to_pure_dict(nnx.state(net, nnx.Param))
    back = exact(tmp_path, pure)
    other = Net(nnx.Rngs(4))
    nnx.update(other, nnx.state(other, nnx.Param))
    state = nnx.state(other, nnx.Param)
    nnx.replace_by_pure_dict(state, back)
    nnx.update(other, state)
    trees.assert_same_leaves(nnx.state(other, nnx.Param), nnx.state(net, nnx.Param))


def test_nnx_optimizer_state_comes_back(tmp_path):
    net = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(net, optax.adam(1e-2), wrt=nnx.Param)
    grads = nnx.grad(lambda m: (m(jnp.ones((4, 2))) ** 2).sum())(net)
    optimizer.update(net, grads)
    tree = {"model": nnx.state(net), "optimizer": nnx.state(optimizer)}
    trees.save(tmp_path, tree)
    fresh = Net(nnx.Rngs(9))
    like = {
        "model": nnx.state(fresh),
        "optimizer": nnx.state(nnx.Optimizer(fresh, optax.adam(1e-2), wrt=nnx.Param)),
    }
    trees.assert_same_tree(ckptmgr.restore(tmp_path, like), tree)


def test_items_come_back_as_items_and_alone(tmp_path):
    items = ckptmgr.Items(
        state={"w": jnp.arange(3.0)}, rng=jax.random.key(1), note="text", none=None
    )
    trees.save(tmp_path, items)
    back = ckptmgr.restore(tmp_path)
    assert type(back) is ckptmgr.Items and set(back) == set(items)
    trees.assert_same_tree(dict(back), dict(items))
    trees.assert_same_tree(ckptmgr.restore(tmp_path, item="rng"), items.rng)
    trees.assert_same_tree(dict(ckptmgr.restore(tmp_path, items)), dict(items))
    with pytest.raises(ckptmgr.StepNotFound, match="other"):
        ckptmgr.restore(tmp_path, item="other")
    with pytest.raises(ckptmgr.TreeMismatch) as caught:
        ckptmgr.restore(tmp_path, ckptmgr.Items(state={"w": jnp.zeros(3)}, more=1))
    assert caught.value.missing == ("item more",)
    assert caught.value.extra == ("item none", "item note", "item rng")
    with pytest.raises(ckptmgr.InvalidOption, match="Items"):
        ckptmgr.restore(tmp_path, {"w": jnp.zeros(3)})
