"""Equinox modules: projections around one op call each."""

from latte.layers.attention import Attention
from latte.layers.latte import Latte, Macchiato
from latte.layers.linear import Linear
from latte.layers.mixer import Mixer, Place
from latte.layers.mlp import GLU, GeluMLP, make_mlp
from latte.layers.norm import LayerNorm, RMSNorm, make_norm
from latte.layers.position import rotate, sinusoids
from latte.layers.recurrence import RGLRU, Conv, Identity, Recurrence

__all__ = [
    "GLU",
    "RGLRU",
    "Attention",
    "Conv",
    "GeluMLP",
    "Identity",
    "Latte",
    "LayerNorm",
    "Linear",
    "Macchiato",
    "Mixer",
    "Place",
    "RMSNorm",
    "Recurrence",
    "make_mlp",
    "make_norm",
    "rotate",
    "sinusoids",
]
