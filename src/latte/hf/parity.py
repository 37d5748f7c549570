"""An exported folder beside the run that it came from: the same logits, and the same tokens."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from latte.cost import shapes
from latte.data.tokenizer import Tokenizer
from latte.errors import UserError
from latte.generate import Sampling, generate_ids
from latte.model import LanguageModel

PROMPTS = (
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age "
    "of foolishness, it was the epoch of belief, it was the epoch of incredulity,",
    "def mean(values):\n    return sum(values) / len(values)\n\n\ndef variance(values):\n",
    "Été comme hiver, la mer était là — 日本語、한국어, ελληνικά 😀.",
    "The",
)
"""Prose, code, several scripts, and one word."""
BOUND = 1e-4
"""Largest difference of two logits of a token that is rounding, as a share of the token's largest
logit."""
_TOKENS = 64


class Difference(NamedTuple):
    """How far the two are apart.

    logits: the largest difference, as a share of the token's largest logit.
    prompts, tokens: how many were compared; `tokens` are those that both wrote after each prompt.
    same: tokens of all prompts before the first that differ.
    """

    logits: float
    prompts: int
    tokens: int
    same: int


def compare(
    model: LanguageModel, tokenizer: Tokenizer, folder: Path, prompts: Sequence[str] = PROMPTS
) -> Difference:
    """Reads prompts and writes on from them with both, in float32.

    Raises:
        UserError: they differ by more than rounding.
    """
    torch, transformers = import_torch()
    model = in_float32(model)
    config, separator = model.backbone.config, tokenizer.separator
    most = config.max_length // 2 if config.position == "learned" else 512
    ids = [[separator, *tokenizer.encode(prompt).tolist()][:most] for prompt in prompts]
    longest = max(map(len, ids))
    count = min(_TOKENS, most)
    # Loading takes code from the folder; it was copied there a moment ago.
    other = transformers.AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=True, dtype=torch.float32
    ).eval()

    worst = 0.0
    for row in ids:
        own = read_logits(model, row, longest)
        with torch.no_grad():
            theirs = other(torch.tensor([row])).logits[0].float().numpy()
        worst = max(worst, _distance(own, theirs))
    if not worst <= BOUND:
        raise UserError(
            f"the exported model's logits differ by {worst:.1e} of the largest, more than the "
            f"{BOUND:.0e} of rounding: nothing was exported; this is a mistake in latte, report it"
        )
    vocab = tokenizer.vocab_size
    settings: dict[str, Any] = {"sampling": Sampling(temperature=0), "end": separator}
    drawn = generate_ids(model, ids, tokens=count, vocab=vocab, **settings)
    own_text = np.concatenate(list(drawn), axis=1)
    same = _compare_texts(model, ids, own_text, _write(torch, other, ids, count, separator))
    return Difference(worst, len(ids), count, same)


def import_torch() -> tuple[Any, Any]:
    """PyTorch and transformers.

    Raises:
        UserError: they are not installed.
    """
    try:
        import torch
        import transformers
    except ImportError as error:
        raise UserError(
            f"{error.name} is not installed; run `pip install latte-lm[hf]` for what goes to and "
            "from Hugging Face"
        ) from error
    return torch, transformers


def in_float32(model: LanguageModel) -> LanguageModel:
    """The model with activations and products in float32."""
    config = dataclasses.replace(model.backbone.config, dtype="float32")
    return jax.tree.unflatten(jax.tree.structure(shapes(config)), jax.tree.leaves(model))


@eqx.filter_jit
def _forward(model: LanguageModel, tokens: jax.Array) -> jax.Array:
    return model(tokens)[0]


def read_logits(model: LanguageModel, row: Sequence[int], length: int) -> Float[np.ndarray, "T V"]:
    """The logits of every token of a row; what fills it up to a common `length` is not seen."""
    padded = np.zeros((1, length), np.int32)
    padded[0, : len(row)] = row
    return np.asarray(_forward(model, jnp.asarray(padded)))[0, : len(row)]


def _distance(own: np.ndarray, theirs: np.ndarray) -> float:
    largest = np.maximum(np.abs(own).max(axis=-1), 1e-30)
    return float((np.abs(own - theirs).max(axis=-1) / largest).max())


def _write(torch: Any, other: Any, ids: list[list[int]], count: int, pad: int) -> np.ndarray:
    """What the exported model writes, likeliest token by token, prompts padded on the left."""
    longest = max(map(len, ids))
    rows = [[pad] * (longest - len(row)) + row for row in ids]
    mask = [[0] * (longest - len(row)) + [1] * len(row) for row in ids]
    text = other.generate(
        torch.tensor(rows),
        attention_mask=torch.tensor(mask),
        do_sample=False,
        max_new_tokens=count,
    )
    return text[:, longest:].numpy()


def _compare_texts(
    model: LanguageModel, ids: list[list[int]], own: np.ndarray, theirs: np.ndarray
) -> int:
    """How many tokens are the same; where they part, both must be as likely, to rounding."""
    same = 0
    for row, mine, other in zip(ids, own.tolist(), theirs.tolist(), strict=True):
        shared = min(len(mine), len(other))
        at = next((i for i in range(shared) if mine[i] != other[i]), shared)
        same += at
        if at == shared:
            continue
        read = [*row, *mine[:at]]
        logits = read_logits(model, read, len(read))[-1]
        gap = abs(float(logits[mine[at]] - logits[other[at]]))
        if not gap <= 2 * BOUND * float(np.abs(logits).max()):
            raise UserError(
                f"the exported model writes another text from token {at + 1} on: nothing was "
                "exported; this is a mistake in latte, report it"
            )
    return same
