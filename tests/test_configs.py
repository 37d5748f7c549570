"""Every file of configs/ is a run that could start."""

import ast
import re
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

from latte.config import CONFIGS, load, validate
from latte.cost import count_parameters, shapes
from latte.data.batch import Batch
from latte.data.tokenizer import ByteTokenizer
from latte.run import resolve
from latte.train import initial_state, train_step

NAMES = sorted(path.stem for path in CONFIGS.glob("*.py"))


@pytest.mark.parametrize("name", NAMES)
def test_its_training_step_traces(name):
    """Bytes stand in for a vocabulary that training would learn first."""
    config = resolve(validate(load(name)), ByteTokenizer())
    state = eqx.filter_eval_shape(initial_state, config)
    rows = config.train.batch_size, config.train.sequence_length
    types = (jnp.int32, jnp.int32, jnp.int32, jnp.float32)
    batch = Batch(*(jax.ShapeDtypeStruct(rows, dtype) for dtype in types))
    after, report = jax.eval_shape(partial(train_step, config), state, batch)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    for one, other in zip(jax.tree.leaves(after), jax.tree.leaves(state), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
    assert report.loss.dtype == jnp.float32


@pytest.mark.parametrize("name", NAMES)
def test_it_has_its_files_name_and_says_how_it_is_run(name):
    config = load(name)
    doc = ast.get_docstring(ast.parse((CONFIGS / f"{name}.py").read_text()))
    assert config.name == name
    assert doc is not None
    assert f"--config {name}" in doc
    said = re.search(r"([0-9.]+)M(?: \(the paper: .*\))? parameters", doc)
    if said:
        assert f"{count_parameters(shapes(config.model)) / 1e6:.1f}" == said[1]
