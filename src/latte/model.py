"""From a config to a model: mixers, blocks, the scanned stack, language model and classifier.

Parameters are float32 and activations the config's dtype. The blocks of one place in the repeating
pattern are stacked along a leading axis and the stack is a scan over repeats, so that depth costs
no compile time.
"""

from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree

from latte.config import Mixer as MixerName
from latte.config import ModelConfig
from latte.layers import (
    GLU,
    Attention,
    Conv,
    GeluMLP,
    Identity,
    Latte,
    LayerNorm,
    Linear,
    Macchiato,
    Mixer,
    Place,
    Recurrence,
    RMSNorm,
    make_mlp,
    make_norm,
    sinusoids,
)
from latte.layers.linear import PRODUCT
from latte.mesh import TOKENS, WHOLE, constrain, look_up, run_place, sum_losses
from latte.ops.cross_entropy import CrossEntropy, cross_entropy
from latte.ops.kept import KEPT
from latte.ops.segments import EMPTY, number_runs, place

_EMBEDDING_DEVIATION = 0.02


def make_mixer(name: MixerName, config: ModelConfig, *, key: PRNGKeyArray) -> Mixer:
    """The token mixer that a pattern names.

    attention and swa read the input; r_swa takes queries and keys of N channels a head from an
    RG-LRU (Table 2's R-SWA++). latte* are Latte, with _conv or _r the logits' source and _swa the
    window that makes it Latte-Macchiato.
    """
    key_source, key = jax.random.split(key)
    width, causal = config.width, config.causal
    parts = name.split("_")
    source: Mixer = Identity()
    if "conv" in parts:
        source = Conv(width, config.conv_size, causal=causal, key=key_source)
    elif "r" in parts:
        source = Recurrence(width, config.heads, causal=causal, key=key_source)
    rope = config.rope_theta if config.position in ("rope", "vapor") else None
    shared: dict[str, Any] = {
        "heads": config.heads,
        "causal": causal,
        "gain_out": _residual_gain(config),
        "key": key,
    }
    kv_heads = config.kv_heads or config.heads
    if "latte" not in parts:
        return Attention(
            source,
            width,
            kv_heads=kv_heads,
            key_size=config.latents if "r" in parts else width // config.heads,
            window=config.window if "swa" in parts else None,
            theta=rope,
            **shared,
        )
    if "swa" not in parts:
        vapor = config.rope_theta if config.position == "vapor" else None
        return Latte(source, width, latents=config.latents, theta=vapor, **shared)
    return Macchiato(
        source,
        width,
        kv_heads=kv_heads,
        latents=config.latents,
        window=config.window,
        theta=rope,
        **shared,
    )


def _residual_gain(config: ModelConfig) -> float:
    """Scale of the projections that add to the residual stream, so that its variance stays put."""
    return (2 * config.layers) ** -0.5


def dropout(
    x: Float[Array, "B T D"], rate: float, key: PRNGKeyArray | None
) -> Float[Array, "B T D"]:
    """Drops elements with probability `rate` and scales the rest; the identity without a key."""
    if key is None or rate == 0:
        return x
    kept = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(kept, x / (1 - rate), 0).astype(x.dtype)


class Block(eqx.Module):
    """x + mixer(norm(x)), then x + mlp(norm(x))."""

    mixer_norm: RMSNorm | LayerNorm
    mixer: Mixer
    mlp_norm: RMSNorm | LayerNorm
    mlp: GLU | GeluMLP
    dropout: float = eqx.field(static=True)

    def __init__(self, name: MixerName, config: ModelConfig, *, key: PRNGKeyArray):
        key_mixer, key_mlp = jax.random.split(key)
        gain_out = _residual_gain(config)
        self.mixer_norm = make_norm(config.norm, config.width)
        self.mixer = make_mixer(name, config, key=key_mixer)
        self.mlp_norm = make_norm(config.norm, config.width)
        self.mlp = make_mlp(config.mlp, config.width, config.ff, gain_out=gain_out, key=key_mlp)
        self.dropout = config.dropout

    def __call__(
        self,
        x: Float[Array, "B T D"],
        place: Place,
        state: PyTree | None = None,
        key: PRNGKeyArray | None = None,
    ) -> tuple[Float[Array, "B T D"], Any]:
        keys = (None, None) if key is None else jax.random.split(key)
        y, state = self.mixer(self.mixer_norm(x), place, state)
        x = constrain(x + dropout(y, self.dropout, keys[0]), TOKENS)
        x = x + dropout(self.mlp(self.mlp_norm(x)), self.dropout, keys[1])
        return constrain(x, TOKENS), state

    def latents(self, x: Float[Array, "B T D"], place: Place) -> Float[Array, "B T H L"] | None:
        """p(l|t) of the block's mixer, None where it has no latents."""
        if isinstance(self.mixer, Latte | Macchiato):
            return self.mixer.latents(self.mixer_norm(x), place)
        return None


def _make_block(name: MixerName, config: ModelConfig, key: PRNGKeyArray) -> Block:
    return Block(name, config, key=key)


class Stack(eqx.Module):
    """The blocks: for each place in the pattern its R repeats, stacked."""

    blocks: tuple[Block, ...]
    remat: str = eqx.field(static=True)
    unroll: bool = eqx.field(static=True)

    def __init__(self, config: ModelConfig, *, key: PRNGKeyArray):
        repeats = config.layers // len(config.pattern)
        keys = jax.random.split(key, (len(config.pattern), repeats))
        self.blocks = tuple(
            eqx.filter_vmap(partial(_make_block, name, config))(keys[i])
            for i, name in enumerate(config.pattern)
        )
        self.remat, self.unroll = config.remat, config.unroll

    @property
    def repeats(self) -> int:
        return self.blocks[0].mixer_norm.scale.shape[0]

    def __call__(
        self,
        x: Float[Array, "B T D"],
        place: Place,
        states: tuple | None = None,
        key: PRNGKeyArray | None = None,
    ) -> tuple[Float[Array, "B T D"], tuple]:
        """Runs all blocks; `states` and what is returned hold R stacked states a place."""
        arrays, static = eqx.partition(self.blocks, eqx.is_array)
        keys = None if key is None else jax.random.split(key, (self.repeats, len(self.blocks)))

        def body(x: Array, item: tuple) -> tuple[Array, tuple]:
            arrays, states, keys = item
            after = []
            for i, block in enumerate(eqx.combine(arrays, static)):
                state = None if states is None else states[i]
                x, state = block(x, place, state, None if keys is None else keys[i])
                after.append(state)
            return x, tuple(after)

        return jax.lax.scan(self._kept(body), x, (arrays, states, keys), unroll=self.unroll)

    def _kept(self, body):
        """Chooses what a block keeps for its backward pass."""
        if self.remat == "none":
            return body
        policies = {
            "full": None,
            "dots": jax.checkpoint_policies.save_only_these_names(PRODUCT, KEPT),
        }
        return jax.checkpoint(body, policy=policies[self.remat])

    def latents(
        self, x: Float[Array, "B T D"], place: Place
    ) -> tuple[Float[Array, "R B T H L"] | None, ...]:
        """p(l|t) of every layer, stacked a place of the pattern."""
        arrays, static = eqx.partition(self.blocks, eqx.is_array)

        def body(x: Array, arrays: tuple) -> tuple[Array, tuple]:
            seen = []
            for block in eqx.combine(arrays, static):
                seen.append(block.latents(x, place))
                x, _ = block(x, place)
            return x, tuple(seen)

        return jax.lax.scan(body, x, arrays)[1]

    def empty_states(self, batch: int, room: int) -> tuple:
        """The states before any token; full attention keeps `room` tokens."""

        def empty(block: Block) -> PyTree:
            return eqx.filter_vmap(lambda block: block.mixer.empty_state(batch, room))(block)

        return tuple(empty(block) for block in self.blocks)


class ModelState(NamedTuple):
    """What a model carries from one call to the next.

    segment, position: of the last token; EMPTY and −1 before the first.
    """

    layers: tuple
    segment: Int[Array, " B"]
    position: Int[Array, " B"]


class Backbone(eqx.Module):
    """Embedding, stack and final norm: from tokens to hidden vectors."""

    embedding: Linear
    position_table: Float[Array, "max_length D"] | None
    stack: Stack
    norm: RMSNorm | LayerNorm
    config: ModelConfig = eqx.field(static=True)

    def __init__(self, config: ModelConfig, *, key: PRNGKeyArray):
        key_embedding, key_table, key_stack = jax.random.split(key, 3)
        deviation = _EMBEDDING_DEVIATION
        gain = deviation * config.vocab_size**0.5
        self.embedding = Linear(config.vocab_size, config.width, key=key_embedding, gain=gain)
        learned = config.position == "learned"
        shape = (config.max_length, config.width)
        self.position_table = jax.random.normal(key_table, shape) * deviation if learned else None
        self.stack = Stack(config, key=key_stack)
        self.norm = make_norm(config.norm, config.width)
        self.config = config

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        state: ModelState | None = None,
        key: PRNGKeyArray | None = None,
    ) -> tuple[Float[Array, "B T D"], ModelState | None]:
        """Hidden vectors of a batch of rows, after the tokens that `state` has seen.

        Without `segment_ids` a row is one document; with a `key` dropout is on. The state is None
        where several devices share rows that began at none.
        """
        key_embed, key_stack = (None, None) if key is None else jax.random.split(key)
        place, after = _place(segment_ids, state, tokens)
        x = dropout(self._embed(tokens, place), self.config.dropout, key_embed)
        x, layers = self.stack(x, place, None if state is None else state.layers, key_stack)
        return self.norm(x), None if after is None else after._replace(layers=layers)

    def latents(
        self, tokens: Int[Array, "B T"], segment_ids: Int[Array, "B T"] | None = None
    ) -> list[Float[Array, "B T H L"] | None]:
        """p(l|t) of every layer in order (state 0 is the window, where there is one)."""
        place, _ = _place(segment_ids, None, tokens)
        stacked = self.stack.latents(self._embed(tokens, place), place)
        stacked = [None if p is None else constrain(p, WHOLE) for p in stacked]
        return [None if p is None else p[r] for r in range(self.stack.repeats) for p in stacked]

    def empty_state(self, batch: int, room: int) -> ModelState:
        """The state before any token; full attention keeps `room` tokens, nothing else grows."""
        empty = _nothing_seen(batch)
        return empty._replace(layers=self.stack.empty_states(batch, room))

    def _embed(self, tokens: Int[Array, "B T"], place: Place) -> Float[Array, "B T D"]:
        x = look_up(self.embedding.weight, tokens)
        if self.position_table is not None:
            x = x + self.position_table[place.positions]
        elif self.config.position == "sinusoidal":
            x = x + sinusoids(place.positions, self.config.width, self.config.rope_theta)
        return constrain(x.astype(self.config.dtype), TOKENS)


def _nothing_seen(batch: int) -> ModelState:
    return ModelState((), jnp.full((batch,), EMPTY), jnp.full((batch,), -1))


def _place(
    segment_ids: Int[Array, "B T"] | None, state: ModelState | None, tokens: Int[Array, "B T"]
) -> tuple[Place, ModelState | None]:
    """Where each token stands, counting on from the last one seen.

    Rows that are spread over devices begin at no state and leave none.
    """
    batch, length = tokens.shape
    if state is None:
        ids = jnp.zeros_like(tokens) if segment_ids is None else segment_ids
        spread = run_place(place, ids)
        if spread is not None:
            return Place(*spread), None
        state = _nothing_seen(batch)
    runs = number_runs(segment_ids, state.segment, length)
    if segment_ids is None:
        segment_ids = jnp.repeat(runs.last[:, None], length, axis=1)
    at = jnp.arange(length)
    start = jnp.where(runs.first, at, -1 - state.position[:, None])
    positions = at - jax.lax.cummax(start, axis=1)
    return Place(segment_ids, positions), ModelState((), runs.last, positions[:, -1])


class LanguageModel(eqx.Module):
    """Next-token logits."""

    backbone: Backbone
    head: Linear | None

    def __init__(self, config: ModelConfig, *, key: PRNGKeyArray):
        key_backbone, key_head = jax.random.split(key)
        self.backbone = Backbone(config, key=key_backbone)
        self.head = None if config.tied else Linear(config.width, config.vocab_size, key=key_head)

    @property
    def table(self) -> Float[Array, "V D"]:
        """The output projection, a row a token."""
        return self.backbone.embedding.weight if self.head is None else self.head.weight.T

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        state: ModelState | None = None,
    ) -> tuple[Float[Array, "B T V"], ModelState | None]:
        """Float32 logits of every token: for short sequences; `loss` never holds them all."""
        hidden, state = self.backbone(tokens, segment_ids=segment_ids, state=state)
        return self.logits(hidden), state

    def logits(self, hidden: Float[Array, "*rows D"]) -> Float[Array, "*rows V"]:
        """Float32 logits of hidden vectors."""
        table = self.table.astype(hidden.dtype)
        return jnp.einsum("...d,vd->...v", hidden, table, preferred_element_type=jnp.float32)

    def loss(
        self,
        tokens: Int[Array, "B T"],
        targets: Int[Array, "B T"],
        segment_ids: Int[Array, "B T"],
        weights: Float[Array, "B T"],
        *,
        z_loss: float = 0.0,
        key: PRNGKeyArray | None = None,
    ) -> CrossEntropy:
        """Weighted sums over a batch of packed rows, in nats."""
        hidden, _ = self.backbone(tokens, segment_ids=segment_ids, key=key)

        def losses(table: Array, hidden: Array, targets: Array, weights: Array) -> CrossEntropy:
            return cross_entropy(hidden, table, targets, weights, z_loss=z_loss)

        return sum_losses(losses, self.table, hidden, targets, weights)


class Classifier(eqx.Module):
    """Class logits of each row's document from the mean of its hidden vectors; for encoders."""

    backbone: Backbone
    head: Linear

    def __init__(self, config: ModelConfig, classes: int, *, key: PRNGKeyArray):
        key_backbone, key_head = jax.random.split(key)
        self.backbone = Backbone(config, key=key_backbone)
        self.head = Linear(config.width, classes, key=key_head)

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        weights: Float[Array, "B T"],
        *,
        key: PRNGKeyArray | None = None,
    ) -> Float[Array, "B classes"]:
        """`weights` is 1 for the document's tokens and 0 for padding, which no token sees."""
        segment_ids = (weights == 0).astype(jnp.int32)
        hidden, _ = self.backbone(tokens, segment_ids=segment_ids, key=key)
        total = jnp.einsum("btd,bt->bd", hidden.astype(jnp.float32), weights)
        mean = total / jnp.maximum(weights.sum(axis=1, keepdims=True), 1)
        return self.head(mean)
