"""What a model costs: parameters, and the arithmetic that its definition needs."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from latte.config import ModelConfig
from latte.model import LanguageModel


def shapes(config: ModelConfig) -> LanguageModel:
    """The language model as shapes: nothing is computed or held."""
    return eqx.filter_eval_shape(LanguageModel, config, key=jax.random.key(0))


def count_parameters(model: PyTree) -> int:
    """Parameters of a model, or of its shapes."""

    def is_parameter(leaf: Any) -> bool:
        return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.inexact)

    return sum(leaf.size for leaf in jax.tree.leaves(eqx.filter(model, is_parameter)))


def training_flops_per_token(config: ModelConfig, length: int) -> float:
    """Floating-point operations a token of a training step on rows of `length` tokens.

    Three times the forward pass (the backward pass is two), without recomputation. The forward pass
    is 2 for each weight of every projection and of the output table (the embedding is a look-up),
    and for the mixing itself, with H heads of D values, N latents and keys of K channels:

        attention   2 · H · (K + D) · keys seen, on average over the row
        Latte       4 · H · N · D: writing the state and reading it, as in the recurrence
        Macchiato   both

    Norms, gates, softmaxes, RG-LRU's recurrence and convolutions are not counted.
    """
    blocks = shapes(config).backbone.stack.blocks
    weights = [leaf.size for path, leaf in _leaves(blocks) if path[-1].name == "weight"]
    projections = 2 * (sum(weights) + config.vocab_size * config.width)
    mixing = sum(_mixing(name, config, length) for name in config.pattern)
    return 3 * (projections + mixing * config.layers / len(config.pattern))


def _mixing(name: str, config: ModelConfig, length: int) -> float:
    parts = name.split("_")
    size = config.width // config.heads
    latents = 4.0 * config.heads * config.latents * size if "latte" in parts else 0.0
    if name != "attention" and "swa" not in parts:
        return latents
    key_size = config.latents if name == "r_swa" else size
    window = length if name == "attention" else min(config.window, length)
    keys = window * (1 - (window - 1) / (2 * length)) if config.causal else window
    return latents + 2 * config.heads * (key_size + size) * keys


def _leaves(tree: PyTree) -> list[tuple[Any, Any]]:
    return jax.tree_util.tree_flatten_with_path(tree)[0]
