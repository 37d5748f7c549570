"""Cross-entropy of a language model's output without its logits: [B, T, V] never exists.

Time is cut into chunks, and one chunk's logits live at a time. Under differentiation the forward
pass turns each chunk's logits into its part of the gradients at once, so that logits are computed
once, and the backward pass only scales by the incoming cotangent:

    ℓ = softcap · tanh(h · tableᵀ / softcap)      logits, [chunk, V]
    z = logsumexp ℓ,   nll = z − ℓ_target,   loss = Σ w (nll + z_loss z²)
    ∂loss/∂ℓ = w ((1 + 2 z_loss z) softmax ℓ − onehot(target))

The batch axis stays whole in each chunk, so that a batch sharded over devices stays sharded.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from latte.ops.chunk import accumulator, products
from latte.ops.dispatch import platform


class _Most(NamedTuple):
    """Limits of a chunk: tokens, all rows together, and logits alive at a time."""

    rows: int
    logits: int


_MOST = _Most(512, 2**26)
"""On a CPU logits should stay near the core (measured)."""
_MOST_ON_GPU = _Most(4096, 2**27)
"""Half a gigabyte of float32. A GPU is kept waiting by short products, and by the table's gradient,
which is read and written once a chunk (measured)."""


class CrossEntropy(NamedTuple):
    """Sums over tokens, float32 (float64 for float64 inputs); divide by `weight` for means.

    Only `loss` has a gradient; the others are for metrics.
    """

    loss: Float[Array, ""]
    """Σ w (nll + z_loss z²)."""
    nll: Float[Array, ""]
    """Σ w nll, in nats."""
    z: Float[Array, ""]
    """Σ w z², the squared log-normaliser."""
    correct: Float[Array, ""]
    """Σ w over the tokens whose target has the largest logit, or one of several."""
    weight: Float[Array, ""]
    """Σ w."""


class _Chunk(NamedTuple):
    """Some tokens of every row, [n, B, C, …] before the scan and [B, C, …] in it."""

    hidden: Array
    targets: Array
    weights: Array


class _Settings(NamedTuple):
    z_loss: float
    softcap: float | None
    chunk: int


def chunk_length(batch: int, length: int, vocabulary: int) -> int:
    """Tokens of each row in a chunk: within the budget, at most half the row, evenly cut."""
    limits = _MOST_ON_GPU if platform() == "gpu" else _MOST
    rows = min(limits.rows, limits.logits // vocabulary)
    most = max(1, min(rows // batch, (length + 1) // 2))
    even = -(-length // -(-length // most))
    return min(most, -(-even // 8) * 8)


def cross_entropy(
    hidden: Float[Array, "B T D"],
    table: Float[Array, "V D"],
    targets: Int[Array, "B T"],
    weights: Float[Array, "B T"],
    *,
    z_loss: float = 0.0,
    softcap: float | None = None,
    chunk: int | None = None,
) -> CrossEntropy:
    """Weighted sums of the loss of predicting `targets`, differentiable in `hidden` and `table`.

    Args:
        hidden: the model's output; matrix products are of its dtype, with float32 sums.
        table: the output projection; its gradient is summed in float32.
        targets: in [0, V).
        weights: 0 where nothing is to be predicted. No gradient reaches them.
        z_loss: weight of the squared log-normaliser.
        softcap: bounds logits to ±softcap by tanh; None leaves them as they are.
        chunk: tokens of each row whose logits are alive at a time; None goes by the platform, and
            knows nothing of sharding: give it where many devices share B.
    """
    batch, length, _ = hidden.shape
    if chunk is None:
        chunk = chunk_length(batch, length, table.shape[0])
    settings = _Settings(z_loss, softcap, min(chunk, length))
    weights = weights.astype(accumulator(hidden.dtype))
    sums = _sums(settings, hidden, table, targets, weights)
    return sums._replace(
        **{name: jax.lax.stop_gradient(getattr(sums, name)) for name in sums._fields[1:]}
    )


def token_losses(
    hidden: Float[Array, "B T D"],
    table: Float[Array, "V D"],
    targets: Int[Array, "B T"],
    *,
    softcap: float | None = None,
) -> Float[Array, "B T"]:
    """The loss of every token in nats, for evaluation."""
    batch, length, _ = hidden.shape
    chunks = _split(hidden, targets, targets, chunk_length(batch, length, table.shape[0]))
    table = table.astype(hidden.dtype)

    # Differentiation recomputes the logits of each chunk instead of keeping those of all.
    @jax.checkpoint
    def nll(chunk: _Chunk):
        shifted, _ = _logits(chunk.hidden, table, softcap)
        return _log_normaliser(shifted) - _at(shifted, chunk.targets)

    losses = jax.lax.map(nll, chunks)
    return _join(losses, length)


def reference(
    hidden: Float[Array, "B T D"],
    table: Float[Array, "V D"],
    targets: Int[Array, "B T"],
    weights: Float[Array, "B T"],
    *,
    z_loss: float = 0.0,
    softcap: float | None = None,
) -> CrossEntropy:
    """The definition, which holds all logits."""
    dtype = accumulator(hidden.dtype)
    logits = jnp.einsum("btd,vd->btv", hidden.astype(dtype), table.astype(dtype))
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    target = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    z = jax.nn.logsumexp(logits, axis=-1)
    nll = -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)[..., 0]
    return CrossEntropy(
        loss=jnp.sum(weights * (nll + z_loss * z**2)),
        nll=jnp.sum(weights * nll),
        z=jnp.sum(weights * z**2),
        correct=jnp.sum(weights * (target == logits.max(-1))),
        weight=jnp.sum(weights),
    )


def _sums_alone(settings: _Settings, hidden, table, targets, weights) -> CrossEntropy:
    """The sums, where nothing is differentiated."""
    rounded = table.astype(hidden.dtype)

    def step(sums, chunk):
        shifted, peak = _logits(chunk.hidden, rounded, settings.softcap)
        return _add(sums, _measure(settings, chunk, shifted, peak)), None

    chunks = _split(hidden, targets, weights, settings.chunk)
    return jax.lax.scan(step, _zero(weights.dtype), chunks)[0]


def _forward(settings: _Settings, hidden, table, targets, weights):
    """The sums, and the gradients of the loss in `hidden` and in `table`."""
    rounded = table.astype(hidden.dtype)
    einsum = products(hidden.dtype)

    def step(carry, chunk):
        sums, dtable = carry
        shifted, peak = _logits(chunk.hidden, rounded, settings.softcap)
        sums = _add(sums, _measure(settings, chunk, shifted, peak))
        dlogits = _dlogits(settings, chunk, shifted, peak)
        dhidden = einsum("bcv,vd->bcd", dlogits, rounded).astype(hidden.dtype)
        return (sums, dtable + einsum("bcv,bcd->vd", dlogits, chunk.hidden)), dhidden

    chunks = _split(hidden, targets, weights, settings.chunk)
    zero = _zero(weights.dtype), jnp.zeros(table.shape, weights.dtype)
    (sums, dtable), dhidden = jax.lax.scan(step, zero, chunks)
    return sums, (_join(dhidden, hidden.shape[1]), dtable.astype(table.dtype))


def _backward(settings: _Settings, residuals, cotangents):
    del settings
    dhidden, dtable = residuals
    scale = cotangents.loss
    return (
        (scale * dhidden).astype(dhidden.dtype),
        (scale * dtable).astype(dtable.dtype),
        None,
        None,
    )


_sums = jax.custom_vjp(_sums_alone, nondiff_argnums=(0,))
_sums.defvjp(_forward, _backward)


def _logits(hidden, table, softcap):
    """A chunk's logits less their largest, and that largest: small differences stay exact."""
    logits = products(hidden.dtype)("bcd,vd->bcv", hidden, table)
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    peak = jax.lax.stop_gradient(logits.max(-1))
    return logits - peak[..., None], peak


def _log_normaliser(shifted):
    return jnp.log(jnp.sum(jnp.exp(shifted), axis=-1))


def _at(shifted, targets):
    """The targets' entries by comparison, which fuses with the other sums and needs no gather."""
    return jnp.sum(jnp.where(_onehot(shifted, targets), shifted, 0), axis=-1)


def _onehot(shifted, targets):
    return jax.lax.broadcasted_iota(targets.dtype, shifted.shape, 2) == targets[..., None]


def _measure(settings: _Settings, chunk: _Chunk, shifted, peak) -> CrossEntropy:
    target = _at(shifted, chunk.targets)
    log_normaliser = _log_normaliser(shifted)
    nll = log_normaliser - target
    z = (peak + log_normaliser) ** 2
    w = chunk.weights
    # Against the largest of the same array: a fused subtraction need not leave 0 at the peak.
    correct = target == shifted.max(-1)
    sums = nll + settings.z_loss * z, nll, z, correct, jnp.ones_like(w)
    return CrossEntropy(*(jnp.sum(w * each) for each in sums))


def _dlogits(settings: _Settings, chunk: _Chunk, shifted, peak):
    """∂loss/∂(h · tableᵀ) of a chunk."""
    log_normaliser = _log_normaliser(shifted)[..., None]
    w = chunk.weights[..., None]
    scale = w * (1 + 2 * settings.z_loss * (peak[..., None] + log_normaliser))
    softmax = jnp.exp(shifted - log_normaliser)
    d = scale * softmax - jnp.where(_onehot(shifted, chunk.targets), w, 0)
    if settings.softcap is not None:
        d = d * (1 - ((shifted + peak[..., None]) / settings.softcap) ** 2)
    return d


def _split(hidden, targets, weights, chunk) -> _Chunk:
    """Cuts time into chunks; tokens of weight 0 fill the last one."""

    def cut(z):
        z = jnp.pad(z, [(0, 0), (0, -z.shape[1] % chunk)] + [(0, 0)] * (z.ndim - 2))
        return jnp.moveaxis(z.reshape(z.shape[0], -1, chunk, *z.shape[2:]), 1, 0)

    return _Chunk(cut(hidden), cut(targets), cut(weights))


def _join(z, length):
    z = jnp.moveaxis(z, 0, 1)
    return z.reshape(z.shape[0], -1, *z.shape[3:])[:, :length]


def _zero(dtype) -> CrossEntropy:
    return CrossEntropy(*(jnp.zeros((), dtype) for _ in CrossEntropy._fields))


def _add(a: CrossEntropy, b: CrossEntropy) -> CrossEntropy:
    return CrossEntropy(*(p + q for p, q in zip(a, b, strict=True)))
