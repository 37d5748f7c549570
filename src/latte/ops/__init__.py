"""Pure functions of arrays; each folder holds one op: its definition, its forms and its state.

The names here are the functions: import anything else of an op from its folder's own path.
"""

from latte.ops.attention import attention
from latte.ops.conv import conv
from latte.ops.cross_entropy import cross_entropy
from latte.ops.latte import latte
from latte.ops.macchiato import macchiato
from latte.ops.rg_lru import rg_lru

__all__ = ["attention", "conv", "cross_entropy", "latte", "macchiato", "rg_lru"]
