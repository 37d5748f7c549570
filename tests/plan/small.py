"""Runs that compile in seconds, for slices of four chips."""

import importlib.util
from dataclasses import replace

import pytest

from latte.config import Config, MeshConfig, ModelConfig, TrainConfig, validate

needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs libtpu's compiler"
)
SLICE = "v5e:2x2"


def small(mesh: MeshConfig | None = None, **model) -> Config:
    shape = {
        "vocab_size": 512,
        "width": 256,
        "layers": 3,
        "heads": 2,
        "latents": 16,
        "window": 128,
        "ff": 512,
        **model,
    }
    return validate(
        Config(
            "small",
            model=ModelConfig(**shape),
            train=TrainConfig(batch_size=8, sequence_length=512, steps=10_000),
            mesh=mesh or MeshConfig(fsdp=4),
        )
    )


def as_overrides(config: Config, base: Config) -> list[str]:
    """The options that make `base` into `config`, as far as the sections of `small` go."""
    words = []
    for section in ("model", "train", "mesh"):
        mine, theirs = getattr(config, section), getattr(base, section)
        for name, value in vars(mine).items():
            if value != getattr(theirs, name):
                value = list(value) if isinstance(value, tuple) else [value]
                words += [f"--{section}.{name}", *map(str, value)]
    return words


def unrolled(config: Config) -> Config:
    """The same layers, with none of them in a scan."""
    pattern = config.model.pattern * config.model.layers
    return replace(config, model=replace(config.model, pattern=pattern))
