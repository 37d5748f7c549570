"""A model's parameters under the names, and in the layout, that a folder for transformers has."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from latte.config import ModelConfig
from latte.cost import shapes
from latte.errors import UserError
from latte.model import LanguageModel

_LLAMA = {
    "mixer_norm": "input_layernorm",
    "mixer.project_q": "self_attn.q_proj",
    "mixer.project_k": "self_attn.k_proj",
    "mixer.project_v": "self_attn.v_proj",
    "mixer.project_out": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.project_gate": "mlp.gate_proj",
    "mlp.project_in": "mlp.up_proj",
    "mlp.project_out": "mlp.down_proj",
}
"""What transformers calls the parts of a block in Llama."""


def is_llama(config: ModelConfig) -> bool:
    """Whether transformers' own Llama is the same model: Transformer++."""
    shape = config.norm, config.mlp, config.position
    return set(config.pattern) == {"attention"} and shape == ("rms", "glu", "rope")


@dataclass(frozen=True)
class Tensor:
    """One tensor of a folder.

    name: its name there.
    leaf: which of the model's arrays it comes from, in the order of `jax.tree.leaves`.
    repeat: the place along that array's leading axis; None for the whole array.
    turned: it is the transpose, [out, in] where the model has [in, out].
    shape: in the folder.
    """

    name: str
    leaf: int
    repeat: int | None
    turned: bool
    shape: tuple[int, ...]

    def take(self, leaf: np.ndarray) -> np.ndarray:
        """The tensor from its array."""
        part = leaf if self.repeat is None else leaf[self.repeat]
        return np.ascontiguousarray(part.T if self.turned else part)


def tensors(config: ModelConfig) -> list[Tensor]:
    """Every tensor of a model's folder, in the order of its arrays."""
    found = []
    leaves = jax.tree_util.tree_flatten_with_path(shapes(config))[0]
    for number, (path, leaf) in enumerate(leaves):
        words = jax.tree_util.keystr(path, simple=True, separator=".").split(".")
        turned = words[-1] == "weight" and words[-2].startswith(("project_", "head"))
        for repeat, name in _names(words, config, leaf.shape[0]):
            shape = leaf.shape if repeat is None else leaf.shape[1:]
            found.append(Tensor(name, number, repeat, turned, shape[::-1] if turned else shape))
    return found


def _names(words: list[str], config: ModelConfig, repeats: int) -> Iterator[tuple[int | None, str]]:
    """The names of an array's parts, given the path to it."""
    if words[0] == "head":
        yield None, "lm_head.weight"
    elif words[1] == "stack":
        place, rest = int(words[3]), _rename(".".join(words[4:]), config)
        for repeat in range(repeats):
            layer = repeat * len(config.pattern) + place
            yield repeat, f"model.layers.{layer}.{rest}"
    else:
        simple = {"embedding": "embed_tokens", "position_table": "embed_positions"}
        last = "weight" if words[-1] in ("scale", "position_table") else words[-1]
        yield None, f"model.{simple.get(words[1], words[1])}.{last}"


def _rename(name: str, config: ModelConfig) -> str:
    """The name of a parameter in its block; torch modules have a method called `forward`."""
    name = name.replace("source.forward.", "source.rg_lru.").removesuffix("scale")
    name = name + "weight" if name.endswith(".") else name
    if is_llama(config):
        part = name.removesuffix(".weight")
        return f"{_LLAMA[part]}.weight"
    return name


def collect(config: ModelConfig, read: Callable[[Tensor], np.ndarray]) -> LanguageModel:
    """The model whose tensors `read` gives one by one.

    Raises:
        UserError: a tensor has another shape than the model's.
    """
    target = shapes(config)
    parts: dict[int, list[np.ndarray]] = {}
    for tensor in tensors(config):
        value = read(tensor)
        if value.shape != tensor.shape:
            raise UserError(
                f"{tensor.name} has the shape {list(value.shape)}, but the config asks for "
                f"{list(tensor.shape)}; is config.json that of these weights?"
            )
        parts.setdefault(tensor.leaf, []).append(value.T if tensor.turned else value)

    def join(leaf: int, like: Any) -> jax.Array:
        values = parts.pop(leaf)
        whole = np.stack(values) if len(like.shape) > values[0].ndim else values[0]
        return jnp.asarray(whole, like.dtype)

    leaves, structure = jax.tree.flatten(target)
    return jax.tree.unflatten(structure, [join(i, leaf) for i, leaf in enumerate(leaves)])
