"""Attention on GPUs by cuDNN, for whole rows: the fastest there is, where it fits."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from latte.ops.attention.scores import Score, Window


def fits(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S G K"],
    v: Float[Array, "B S G D"],
    window: Window,
    score: Score,
) -> bool:
    """Whether cuDNN takes these arrays: 16 bits, no past, no soft cap, a window that it knows."""
    narrow = {x.dtype for x in (q, k, v)} in ({jnp.dtype("bfloat16")}, {jnp.dtype("float16")})
    sizes = q.shape[3] == v.shape[3] and q.shape[3] % 8 == 0 and q.shape[3] <= 128
    known = window.right == 0 or window == Window(None, None)
    return narrow and sizes and known and q.shape[1] == k.shape[1] and score.softcap is None


def attention(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T G K"],
    v: Float[Array, "B T G D"],
    window: Window,
    score: Score,
) -> Float[Array, "B T H D"]:
    """NVIDIA's attention, for rows of one document each; see `fits`."""
    near = window.left is not None and window.left < q.shape[1] - 1
    return jax.nn.dot_product_attention(
        q,
        k,
        v,
        scale=score.scale,
        is_causal=window.right == 0,
        # JAX's window leaves out the token itself, as Window does.
        local_window_size=(window.left, 0) if near and window.left is not None else None,
        implementation="cudnn",
    )
