"""A small transformer over bytes, its sharded train state and its jitted steps."""

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training import train_state
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from ml_collections import ConfigDict

AXES = ("data", "model")  # batches are split over the first, weights over the second


def make_mesh(axes: dict[str, int], processes: int = 1) -> Mesh:
    """A mesh of the first devices; on a CPU each process makes as many virtual ones as it needs.

    Call it before anything else that uses a device: the number of virtual devices is then fixed.
    """
    count = int(np.prod(list(axes.values())))
    jax.config.update("jax_num_cpu_devices", count // processes)
    devices = jax.devices()
    if len(devices) < count:
        raise ValueError(f"a mesh of {axes} needs {count} devices, there are {len(devices)}")
    return Mesh(np.array(devices[:count]).reshape(*axes.values()), tuple(axes))


def parse_mesh(text: str) -> dict[str, int]:
    """`4x2` as the sizes of the axes `data` and `model`."""
    sizes = text.split("x")
    if len(sizes) != len(AXES) or not all(size.isdigit() and int(size) for size in sizes):
        raise ValueError(f"--mesh={text!r} should be one size for each of {AXES}, like 4x2")
    return dict(zip(AXES, map(int, sizes), strict=True))


def _split(*axes: str | None) -> Callable:
    """An initialiser of weights whose dimensions lie on these mesh axes."""
    return nn.with_partitioning(nn.initializers.normal(0.02), axes)


class Block(nn.Module):
    heads: int
    mlp_width: int
    dropout: float

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        causal = nn.make_causal_mask(x[..., 0])
        drop = partial(nn.Dropout(self.dropout), deterministic=not train)
        attention = nn.MultiHeadDotProductAttention(
            self.heads,
            use_bias=False,
            kernel_init=_split(None, "model", None),
            out_kernel_init=_split("model", None, None),
        )
        x = x + drop(attention(nn.LayerNorm()(x), mask=causal))
        hidden = nn.Dense(self.mlp_width, use_bias=False, kernel_init=_split(None, "model"))
        out = nn.Dense(x.shape[-1], use_bias=False, kernel_init=_split("model", None))
        return x + drop(out(nn.gelu(hidden(nn.LayerNorm()(x)))))


class TinyLM(nn.Module):
    vocab: int
    width: int
    layers: int
    heads: int
    mlp_width: int
    dropout: float

    @nn.compact
    def __call__(self, tokens: jax.Array, train: bool) -> jax.Array:
        length = tokens.shape[-1]
        embed = nn.Embed(self.vocab, self.width, embedding_init=_split(None, "model"))
        positions = self.param("positions", _split(None, "model"), (length, self.width))
        x = embed(tokens) + positions
        for _ in range(self.layers):
            x = Block(self.heads, self.mlp_width, self.dropout)(x, train)
        logits = nn.Dense(self.vocab, use_bias=False, kernel_init=_split(None, "model"))
        return logits(nn.LayerNorm()(x))


class State(train_state.TrainState):
    """What a step changes: flax's TrainState and the random key of dropout."""

    dropout_key: jax.Array


def loss_of(model: TinyLM, params: Any, batch: jax.Array, dropout_key: jax.Array | None = None):
    """Mean cross-entropy in nats per byte; dropout is on when there is a key for it."""
    rngs = None if dropout_key is None else {"dropout": dropout_key}
    logits = model.apply({"params": params}, batch[:, :-1], train=rngs is not None, rngs=rngs)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()


@dataclass(frozen=True)
class Job:
    """The jitted functions of one run on one mesh, and how its state lies there."""

    abstract: State  # shapes, dtypes and shardings, no data
    init: Callable[[], State]
    step: Callable[[State, np.ndarray], tuple[State, jax.Array]]  # takes the state's memory


def build(config: ConfigDict, mesh: Mesh) -> Job:
    model = TinyLM(**config.model)
    schedule = optax.linear_schedule(
        0.0, config.optimizer.learning_rate, config.optimizer.warmup_steps
    )
    optimizer = optax.adamw(schedule, weight_decay=config.optimizer.weight_decay)

    def boxed_init() -> State:  # every array in a box that names its mesh axes
        weights_key, dropout_key = jax.random.split(jax.random.key(config.seed))
        tokens = jnp.zeros((1, config.data.length), jnp.int32)
        params = model.init(weights_key, tokens, train=False)["params"]
        return State.create(
            apply_fn=model.apply, params=params, tx=optimizer, dropout_key=dropout_key
        )

    def init() -> State:
        return nn.unbox(boxed_init())

    def step(state: State, batch: jax.Array) -> tuple[State, jax.Array]:
        next_key, key = jax.random.split(state.dropout_key)
        loss, grads = jax.value_and_grad(partial(loss_of, model))(state.params, batch, key)
        return state.apply_gradients(grads=grads, dropout_key=next_key), loss

    specs = nn.get_partition_spec(jax.eval_shape(boxed_init))
    shardings = jax.tree.map(partial(NamedSharding, mesh), specs)
    abstract = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        jax.eval_shape(init),
        shardings,
    )
    jitted = jax.jit(
        step,
        in_shardings=(shardings, _by_batch(mesh)),
        out_shardings=(shardings, NamedSharding(mesh, PartitionSpec())),
        donate_argnums=0,
    )
    return Job(
        abstract=abstract,
        init=jax.jit(init, out_shardings=shardings),
        step=lambda state, batch: jitted(state, _placed(batch, mesh)),
    )


def held_out_loss(
    config: ConfigDict, mesh: Mesh, params: Any, batches: Iterable[np.ndarray]
) -> float:
    """The loss on text that was not trained on: the mean over the first batches of it."""
    loss = jax.jit(partial(loss_of, TinyLM(**config.model)))
    first = itertools.islice(batches, config.data.held_out_batches)
    losses = [loss(params, _placed(batch, mesh)) for batch in first]
    return float(np.mean(losses))


def _by_batch(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec("data"))


def _placed(batch: np.ndarray, mesh: Mesh) -> jax.Array:
    """The batch on the mesh; each process gives the part that its devices need."""
    return jax.make_array_from_callback(batch.shape, _by_batch(mesh), lambda index: batch[index])
