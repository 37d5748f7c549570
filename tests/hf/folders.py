"""Runs and folders of random weights, and what the definition says of their tokens."""

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from latte.config import Config, ModelConfig
from latte.data.tokenizer import ByteTokenizer
from latte.hf.folder import generation_config, transformers_config, write_model
from latte.hf.imports import write_run
from latte.hf.tokenizers import write_tokenizer
from latte.model import LanguageModel
from tests import definitions
from tests.models import MODELS, SMALL, make

BYTES = ByteTokenizer()
TRANSFORMER_PP = "transformer++"
SHAPES: dict[str, ModelConfig] = {
    **MODELS,
    TRANSFORMER_PP: dataclasses.replace(SMALL, pattern=("attention",), kv_heads=1),
}
"""What is exported: every model of the tests, and the one that is transformers' own."""


def shape(name: str, length: int = 600) -> ModelConfig:
    """A model with room for bytes and a few rows more, and for `length` positions."""
    return dataclasses.replace(SHAPES[name], vocab_size=260, max_length=length)


def make_run(run_dir: Path, name: str) -> Path:
    """A run directory of random weights, as after its seventh step."""
    config = Config(name="random", model=shape(name))
    write_run(run_dir, config, BYTES, make(config.model), 7)
    return run_dir


@dataclass(frozen=True)
class Folder:
    """A model's folder, and the model."""

    path: Path
    own: LanguageModel

    @classmethod
    def make(cls, path: Path, name: str, length: int = 600) -> "Folder":
        """As `export` writes it, without what it says of it."""
        config, end = shape(name, length), BYTES.separator
        model, generation = make(config), generation_config(config, end, BYTES.vocab_size)
        write_model(model, transformers_config(config, end), generation, path, 10_000)
        write_tokenizer(BYTES, path)
        return cls(path, model)

    @cached_property
    def model(self) -> Any:
        return self.load()

    def load(self, **settings: Any) -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(
            self.path, trust_remote_code=True, **settings
        ).eval()

    @cached_property
    def wide(self) -> Any:
        return definitions.wide(self.own)

    def defined(self, document: Any) -> np.ndarray:
        """The logits of a document's tokens [T] by the definition."""
        return definitions.logits(self.wide, np.asarray(document))


def read(model: Any, tokens: Any, **settings: Any) -> np.ndarray:
    """What the exported model says of rows [B, T]."""
    with torch.no_grad():
        return model(torch.as_tensor(np.asarray(tokens)), **settings).logits.float().numpy()


def same(found: np.ndarray, expected: np.ndarray) -> None:
    """Asserts that logits are the same to 1e-4 of the largest."""
    np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max(), rtol=0)


def random_tokens(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape)


def losses_of(model: LanguageModel, document: Any) -> np.ndarray:
    """Nats of every token [T − 1] of a document after its first, by the definition."""
    document = np.asarray(document)
    logits = definitions.logits(definitions.wide(model), document)[:-1]
    most = logits.max(axis=-1)
    total = np.log(np.exp(logits - most[:, None]).sum(axis=-1)) + most
    return total - logits[np.arange(len(logits)), document[1:]]
