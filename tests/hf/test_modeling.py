"""What transformers reads of a folder: the definition's logits, however the text is given."""

import numpy as np
import pytest
import torch

from tests.hf.folders import SHAPES, TRANSFORMER_PP, random_tokens, read, same

REMOTE = [name for name in SHAPES if name != TRANSFORMER_PP]


@pytest.mark.parametrize("name", SHAPES)
def test_logits_are_those_of_the_definition(folder, name):
    made = folder(name)
    for length in (1, 2, 17, 70):
        tokens = random_tokens(length)
        same(read(made.model, tokens[None])[0], made.defined(tokens))


@pytest.mark.parametrize("name", SHAPES)
def test_padding_changes_nothing(folder, name):
    made, lengths, width = folder(name), (1, 9, 40), 40
    tokens = random_tokens(3, width)
    for side in ("left", "right"):
        mask = np.zeros((3, width), int)
        for row, length in enumerate(lengths):
            mask[row, slice(-length, None) if side == "left" else slice(length)] = 1
        found = read(made.model, tokens, attention_mask=torch.as_tensor(mask))
        assert np.isfinite(found).all()
        for row, real in enumerate(mask.astype(bool)):
            same(found[row][real], made.defined(tokens[row][real]))


@pytest.mark.parametrize("name", REMOTE)
def test_documents_packed_into_a_row_do_not_see_each_other(folder, name):
    made, tokens, sizes = folder(name), random_tokens(2, 50), (3, 30, 17)
    positions = np.concatenate([np.arange(n) for n in sizes])
    found = read(made.model, tokens, position_ids=torch.as_tensor(positions)[None])
    cuts = np.cumsum(sizes)[:-1]
    for row, logits in zip(tokens, found, strict=True):
        for document, part in zip(np.split(row, cuts), np.split(logits, cuts), strict=True):
            same(part, made.defined(document))


@pytest.mark.parametrize("name", SHAPES)
def test_a_prompt_in_chunks_then_steps_is_one_pass(folder, name):
    """With padding on the left, of which the first chunks may hold nothing else."""
    made, length, steps = folder(name), 33, 6
    tokens, mask = random_tokens(2, length + steps), np.ones((2, length + steps), int)
    mask[0, :20] = 0
    for size in (1, 7, 16):
        cuts = [*range(0, length, size), *range(length, length + steps)]
        cache, found = None, []
        for start, stop in zip(cuts, [*cuts[1:], length + steps], strict=True):
            with torch.no_grad():
                output = made.model(
                    torch.as_tensor(tokens[:, start:stop]),
                    attention_mask=torch.as_tensor(mask[:, :stop]),
                    past_key_values=cache,
                    use_cache=True,
                )
            cache = output.past_key_values
            found.append(output.logits.numpy())
        whole = np.concatenate(found, axis=1)
        for row, real in enumerate(mask.astype(bool)):
            same(whole[row][real], made.defined(tokens[row][real]))


def test_logits_that_jump_are_exact(folder):
    """Key logits of ±10⁴ in one step, and equal ones: nothing under- or overflows."""
    from latte.hf.remote.mixing_latte import Place, latte

    rng, (rows, length, heads, latents, size) = np.random.default_rng(0), (2, 90, 2, 3, 4)
    p = torch.softmax(torch.as_tensor(rng.normal(size=(rows, length, heads, latents))), -1)
    v = torch.as_tensor(rng.normal(size=(rows, length, heads, size)))
    for scale in (0.0, 1e2, 1e4):
        k = torch.as_tensor(scale * rng.choice([-1.0, 0.0, 1.0], size=p.shape))
        real = torch.ones(rows, length, dtype=torch.bool)
        run, at = torch.zeros(rows, length, dtype=torch.long), torch.arange(length)
        place = Place(run, run == 1, real, at.expand(rows, -1), real.sum(1))
        y, _ = latte(p.float(), k.float(), v.float(), place, None)
        for t in (0, 15, 16, 17, 89):
            weights = torch.softmax(k[:, : t + 1], dim=1)
            s = torch.einsum("bshn,bshd->bhnd", weights, v[:, : t + 1])
            expected = torch.einsum("bhn,bhnd->bhd", p[:, t], s)
            np.testing.assert_allclose(y[:, t], expected, atol=1e-5)
