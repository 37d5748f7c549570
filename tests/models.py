"""Small language models that between them make every choice that a config offers."""

import dataclasses
import functools
from typing import Any, get_args

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from latte.config import Mixer, ModelConfig
from latte.cost import shapes
from latte.model import LanguageModel

SMALL = ModelConfig(
    vocab_size=40,
    width=16,
    layers=2,
    heads=2,
    latents=4,
    window=4,
    ff=24,
    rope_theta=100.0,
    max_length=24,
    dtype="float32",
    remat="none",
)

CHOICES: dict[Mixer, dict] = {
    "attention": {"norm": "layer", "mlp": "gelu", "position": "sinusoidal"},
    "swa": {"position": "learned", "tied": False},
    "r_swa": {"kv_heads": 1},
    "latte": {"norm": "layer", "mlp": "gelu", "position": "vapor"},
    "latte_conv": {"position": "none", "tied": False},
    "latte_r": {"norm": "layer", "position": "learned"},
    "latte_swa": {"kv_heads": 1, "position": "vapor"},
    "latte_conv_swa": {"mlp": "gelu", "position": "none"},
    "latte_r_swa": {},
}
"""One of each mixer. What is not said is as in `SMALL`: RMSNorm, GLU, RoPE, tied."""

MODELS: dict[str, ModelConfig] = {
    **{name: dataclasses.replace(SMALL, pattern=(name,), **CHOICES[name]) for name in CHOICES},
    "hybrid": dataclasses.replace(SMALL, pattern=("latte_r", "attention"), layers=4),
    "hybrid of three": dataclasses.replace(
        SMALL, pattern=("latte_conv", "swa", "latte_r_swa"), layers=3, position="sinusoidal"
    ),
}

assert set(CHOICES) == set(get_args(Mixer))


@functools.cache
def make(config: ModelConfig) -> LanguageModel:
    """A model of random parameters, none at a value that could hide it; nothing is compiled."""
    rng = np.random.default_rng(0)

    def draw(path: tuple, leaf: Any) -> jax.Array:
        z = rng.normal(size=leaf.shape)
        match path[-1].name:
            case "weight":
                z = z * leaf.shape[-2] ** -0.5
            case "scale":
                z = 1 + z / 4
            case "lam":
                z = z - 4  # decays of about 0.93 where the gate is half open
        return jnp.asarray(z, leaf.dtype)

    model = jax.tree_util.tree_map_with_path(draw, shapes(config))
    table = jnp.asarray(rng.normal(size=(config.vocab_size, config.width)), jnp.float32)
    return eqx.tree_at(lambda m: m.backbone.embedding.weight, model, table)
