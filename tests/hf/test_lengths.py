"""The whole matrix on long texts: logits to 4,096 tokens, prompts in chunks, then 200 steps."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from latte.data.tokenizer import ByteTokenizer
from latte.generate import Sampling, generate_ids
from latte.hf.weights import is_llama
from tests.hf.folders import SHAPES, Folder, random_tokens, read, same

LENGTH, STEPS = 4096, 200

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=SHAPES)
def long(request, tmp_path_factory) -> Folder:
    """A model of every kind with positions for it all."""
    path = tmp_path_factory.mktemp("long") / "out"
    return Folder.make(path, request.param, length=LENGTH + STEPS)


@eqx.filter_jit
def _forward(model, tokens, segment_ids):
    return model(tokens, segment_ids=segment_ids)[0]


def own(model, tokens, segment_ids=None) -> np.ndarray:
    """What JAX says: the definition would write out every pair of tokens."""
    tokens = jnp.asarray(tokens, jnp.int32)
    ids = jnp.zeros_like(tokens) if segment_ids is None else jnp.asarray(segment_ids, jnp.int32)
    return np.asarray(_forward(model, tokens, ids))


def test_logits_chunks_and_steps(long):
    tokens = random_tokens(1, LENGTH + STEPS)
    expected = own(long.own, tokens)
    same(read(long.model, tokens[:, :LENGTH]), expected[:, :LENGTH])
    for size in (512, 7, 1):
        # A prompt in chunks of one or seven tokens is as many calls; the last part of it will do.
        begin = 0 if size == 512 else LENGTH - 50 * size
        cuts = [*([0] if begin else []), *range(begin, LENGTH, size)]
        cuts += [*range(LENGTH, LENGTH + STEPS)]
        cache, found = None, []
        for start, stop in zip(cuts, [*cuts[1:], LENGTH + STEPS], strict=True):
            with torch.no_grad():
                output = long.model(
                    torch.as_tensor(tokens[:, start:stop]), past_key_values=cache, use_cache=True
                )
            cache = output.past_key_values
            found.append(output.logits.numpy())
        same(np.concatenate(found, axis=1), expected)


def test_packed_and_padded(long):
    tokens = random_tokens(1, LENGTH)
    sizes = [1, 1000, 95, LENGTH - 1096]
    segments = np.repeat([[0, 1, 2, 3]], sizes, axis=1)
    positions = np.concatenate([np.arange(n) for n in sizes])[None]
    whole = own(long.own, tokens, segments)
    if not is_llama(long.own.backbone.config):
        same(read(long.model, tokens, position_ids=torch.as_tensor(positions)), whole)
    real = segments[0] == 3
    mask = torch.as_tensor(real[None].astype(int))
    found = read(long.model, tokens, attention_mask=mask)
    same(found[0][real], whole[0][real])
    right = read(long.model, tokens[:, ::-1].copy(), attention_mask=mask.flip(1))
    alone = own(long.own, tokens[:, ::-1][:, : sizes[-1]])
    same(right[0, : sizes[-1]], alone[0])


def test_256_greedy_tokens(long):
    prompts = [random_tokens(n, seed=n).tolist() for n in (1, 20, 300)]
    settings = {"sampling": Sampling(0), "end": -1, "vocab": ByteTokenizer.vocab_size}
    expected = np.concatenate(list(generate_ids(long.own, prompts, tokens=256, **settings)), axis=1)
    longest = max(map(len, prompts))
    rows = [[0] * (longest - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    found = long.model.generate(
        torch.tensor(rows),
        attention_mask=torch.tensor(mask),
        max_new_tokens=256,
        do_sample=False,
        eos_token_id=259,
        pad_token_id=256,
    )
    np.testing.assert_array_equal(found[:, longest:].numpy(), expected)
