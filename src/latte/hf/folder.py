"""A folder for transformers: config.json, sharded safetensors with an index, modelling code."""

import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import safetensors
import safetensors.numpy

from latte.config import ModelConfig
from latte.errors import UserError
from latte.hf.weights import Tensor, collect, is_llama, tensors
from latte.model import LanguageModel

INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_REMOTE = Path(__file__).parent / "remote"
_CODE = ("configuration_latte", "modeling_latte", "mixing_latte", "cache_latte")


def transformers_config(config: ModelConfig, separator: int) -> dict[str, Any]:
    """What config.json says of a model, in transformers' words and, under "latte", in our own."""
    shared = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads or config.heads,
        "intermediate_size": config.ff,
        "max_position_embeddings": config.max_length,
        "tie_word_embeddings": config.tied,
        "bos_token_id": separator,
        "eos_token_id": separator,
        "pad_token_id": separator,
        "dtype": "float32",
        "latte": dataclasses.asdict(config),
    }
    if is_llama(config):
        return {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_theta": config.rope_theta,
            **shared,
        }
    return {
        "model_type": "latte",
        "architectures": ["LatteForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_latte.LatteConfig",
            "AutoModel": "modeling_latte.LatteModel",
            "AutoModelForCausalLM": "modeling_latte.LatteForCausalLM",
        },
        "pattern": list(config.pattern),
        "latents": config.latents,
        "window": config.window,
        "conv_size": config.conv_size,
        "mlp": config.mlp,
        "norm": config.norm,
        "position": config.position,
        "wavelength": config.rope_theta,
        **shared,
    }


def generation_config(config: ModelConfig, separator: int, vocab: int) -> dict[str, Any]:
    """How `generate` begins and ends; rows of the table beyond the vocabulary are no tokens."""
    found: dict[str, Any] = {
        "bos_token_id": separator,
        "eos_token_id": separator,
        "pad_token_id": separator,
    }
    if vocab < config.vocab_size:
        found["suppress_tokens"] = list(range(vocab, config.vocab_size))
    return found


def write_model(
    model: LanguageModel,
    config: dict[str, Any],
    generation: dict[str, Any],
    folder: Path,
    shard_bytes: int,
) -> None:
    """Writes weights, configs and, for a model that transformers does not have, its code."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", generation)
    if "auto_map" in config:
        for name in _CODE:
            shutil.copyfile(_REMOTE / f"{name}.py", folder / f"{name}.py")
    _write_weights(model, folder, shard_bytes)


def _write_weights(model: LanguageModel, folder: Path, shard_bytes: int) -> None:
    leaves = jax.tree.leaves(model)
    shards = list(_shards(tensors(model.backbone.config), shard_bytes))
    where: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        held: dict[int, np.ndarray] = {}
        for tensor in shard:
            held.setdefault(tensor.leaf, np.asarray(leaves[tensor.leaf]))
        parts = {tensor.name: tensor.take(held[tensor.leaf]) for tensor in shard}
        safetensors.numpy.save_file(parts, folder / name, metadata={"format": "pt"})
        where |= dict.fromkeys(parts, name)
    total = 4 * sum(leaf.size for leaf in leaves)
    _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": where})


def _shards(found: list[Tensor], most: int) -> Iterator[list[Tensor]]:
    """Tensors in groups of at most `most` bytes, or of one where it is larger."""
    shard, size = [], 0
    for tensor in found:
        bytes_ = 4 * int(np.prod(tensor.shape))
        if shard and size + bytes_ > most:
            yield shard
            shard, size = [], 0
        shard.append(tensor)
        size += bytes_
    yield shard


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


# --- reading -----------------------------------------------------------------------------------


class Weights:
    """The tensors of a folder, one read at a time.

    Raises:
        UserError: the folder holds no weights, or a file is missing or not whole.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._files: dict[str, Any] = {}
        if (folder / INDEX).is_file():
            self._where = read_json(folder / INDEX).get("weight_map", {})
        elif (folder / _SINGLE).is_file():
            self._where = dict.fromkeys(self._open(_SINGLE).keys(), _SINGLE)
        else:
            raise UserError(f"{folder} holds no {_SINGLE} or {INDEX}; is it a model's folder?")

    def names(self) -> set[str]:
        """The names of all tensors."""
        return set(self._where)

    def read(self, name: str) -> np.ndarray:
        """A tensor, in float32 where it is stored in 16 bits."""
        if name not in self._where:
            raise UserError(
                f"{self._folder} has no tensor {name}; is config.json that of these weights?"
            )
        file = self._where[name]
        try:
            value = self._open(file).get_tensor(name)
        except safetensors.SafetensorError as error:
            raise self._torn(file, error) from error
        return np.asarray(value, np.float32)

    def _open(self, file: str) -> Any:
        if file not in self._files:
            path = self._folder / file
            if not path.is_file():
                raise UserError(f"{path} is missing; copy the folder again")
            try:
                self._files[file] = safetensors.safe_open(path, framework="np")
            except (safetensors.SafetensorError, OSError) as error:
                raise self._torn(file, error) from error
        return self._files[file]

    def _torn(self, file: str, error: Exception) -> UserError:
        return UserError(
            f"{self._folder / file} is not whole ({error}); copy it again from where it came"
        )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        UserError: there is none in the file.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path.parent} is no model's folder: it has no {path.name}") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}); copy it again") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} holds no JSON object; copy it again")
    return value


def read_model(config: ModelConfig, folder: Path) -> LanguageModel:
    """The model of a folder that `write_model` wrote, to the bit."""
    weights = Weights(folder)
    model = collect(config, lambda tensor: weights.read(tensor.name))
    left = weights.names() - {tensor.name for tensor in tensors(config)}
    if left:
        raise UserError(
            f"{folder} holds {min(left)}, which the config has no place for; is config.json that "
            "of these weights?"
        )
    return model
