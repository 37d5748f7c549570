"""`generate()` of transformers on a folder: greedy, sampled and by beams, from any prompts."""

import numpy as np
import pytest
import torch
import transformers

from tests.hf.folders import BYTES, SHAPES, TRANSFORMER_PP, random_tokens, same

REMOTE = [name for name in SHAPES if name != TRANSFORMER_PP]
PROMPTS = ("", "the cat sat on", "né")
ONLY = {"pad_token_id": 256, "eos_token_id": 259, "do_sample": False}
"""Nothing ends: the tokenizer has no 259, and `suppress_tokens` keeps it from being drawn."""


def encode(path, prompts=PROMPTS) -> dict:
    tokenizer = transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=True)
    return dict(tokenizer(list(prompts), return_tensors="pt", padding=True))


@pytest.mark.parametrize("name", SHAPES)
def test_greedy_text_is_the_likeliest_at_every_token_of_the_whole(folder, name):
    made = folder(name)
    prompt = encode(made.path)
    width = prompt["input_ids"].shape[1]
    found = made.model.generate(**prompt, max_new_tokens=30, **ONLY)[:, width:].numpy()
    for text, drawn in zip(PROMPTS, found, strict=True):
        read = [BYTES.separator, *text.encode()]
        logits = made.defined([*read, *drawn])[len(read) - 1 : -1, :257]
        chosen = logits[np.arange(len(drawn)), drawn]
        np.testing.assert_allclose(chosen, logits.max(axis=-1), atol=1e-4)


@pytest.mark.parametrize("name", ["latte_r_swa", "hybrid of three", TRANSFORMER_PP])
def test_a_prompt_read_in_chunks_gives_the_same_text(folder, name):
    made = folder(name)
    prompt = encode(made.path)
    settings = {**prompt, "max_new_tokens": 20, **ONLY}
    whole = made.model.generate(**settings)
    for size in (1, 7):
        assert made.model.generate(**settings, prefill_chunk_size=size).equal(whole)


@pytest.mark.parametrize("name", ["latte_r_swa", "hybrid"])
def test_beams_find_what_beams_without_a_cache_find(folder, name):
    made = folder(name)
    settings = {**encode(made.path), "num_beams": 3, "max_new_tokens": 8, **ONLY}
    assert made.model.generate(**settings).equal(made.model.generate(**settings, use_cache=False))


def test_sampling_draws_what_the_logits_say(folder):
    made = folder("latte_conv_swa")
    prompt = encode(made.path, ["a"] * 400)
    transformers.set_seed(0)
    settings = {**ONLY, "do_sample": True, "top_k": 3, "max_new_tokens": 1}
    drawn = made.model.generate(**prompt, **settings)[:, -1].numpy()
    logits = made.defined([256, *b"a"])[-1, :257]
    best = np.argsort(logits)[-3:]
    expected = np.exp(logits[best]) / np.exp(logits[best]).sum()
    shares = [(drawn == token).mean() for token in best]
    np.testing.assert_allclose(shares, expected, atol=0.1)
    assert sum(shares) == 1


def test_a_cache_passed_back_goes_on_where_it_was(folder):
    made = folder("latte_r_swa")
    tokens = torch.as_tensor(random_tokens(2, 20))
    first = made.model.generate(
        tokens, max_new_tokens=5, return_dict_in_generate=True, use_cache=True, **ONLY
    )
    again = made.model.generate(
        first.sequences, past_key_values=first.past_key_values, max_new_tokens=5, **ONLY
    )
    assert again.equal(made.model.generate(tokens, max_new_tokens=10, **ONLY))


@pytest.mark.parametrize("name", REMOTE)
def test_a_cache_does_not_grow(folder, name):
    """But with full attention, by one token's keys and values a step."""
    made, sizes = folder(name), []
    cache = None
    for _ in range(3):
        with torch.no_grad():
            cache = made.model(torch.as_tensor([[1]]), past_key_values=cache).past_key_values
        states = [s for layer in cache.layers for s in layer if s is not None]
        leaves = [x for s in states for x in (s if isinstance(s, tuple) else (s,))]
        sizes.append(sum(x.numel() for x in leaves))
    layers = 2 if "attention" in SHAPES[name].pattern else 0
    assert sizes[2] - sizes[1] == sizes[1] - sizes[0] == layers * (2 * 16 + 1)


def test_what_cannot_be_carried_is_refused(folder):
    made = folder("latte_r")
    used = transformers.DynamicCache()
    used.update(torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1), 0)
    with pytest.raises(ValueError, match="carries a LatteCache"):
        made.model(torch.as_tensor([[1]]), past_key_values=used)
    cache = made.model(torch.as_tensor([[1]])).past_key_values
    with pytest.raises(ValueError, match="the cache has 1 rows and the input 2"):
        made.model(torch.as_tensor([[1], [2]]), past_key_values=cache)
    with pytest.raises(ValueError, match="must be \\[batch, length\\]"):
        made.model(torch.as_tensor([[1]]), attention_mask=torch.ones(1, 1, 1, 1))
    with pytest.raises(ValueError, match="learned 600 positions"):
        made.model(torch.zeros(1, 601, dtype=torch.long))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_are_near_and_finite(folder, dtype):
    for name in ("latte_r_swa", "hybrid of three"):
        made, tokens = folder(name), random_tokens(2, 40)
        half = made.load(dtype=dtype)
        with torch.no_grad():
            found = half(torch.as_tensor(tokens)).logits.float().numpy()
            whole = made.model(torch.as_tensor(tokens)).logits.numpy()
        np.testing.assert_allclose(found, whole, atol=0.08 * np.abs(whole).max())
        text = half.generate(torch.as_tensor(tokens), max_new_tokens=4, **ONLY)
        assert text.shape == (2, 44)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["latte_r_swa", "latte", "hybrid of three"])
def test_compiled_is_the_same(folder, name):
    made, tokens = folder(name), random_tokens(2, 40)
    compiled = torch.compile(made.load())
    with torch.no_grad():
        found = compiled(torch.as_tensor(tokens), use_cache=False).logits.numpy()
    for row, logits in zip(tokens, found, strict=True):
        same(logits, made.defined(row))
