"""Parameters and operations of models, counted by hand and as the paper prints them."""

import dataclasses

import pytest

from latte.config import load
from latte.cost import count_parameters, shapes, training_flops_per_token
from tests.models import MODELS, SMALL


@pytest.mark.parametrize(
    ("name", "millions", "tolerance"),
    [
        # Tables 1 and 2 of the paper. Its RG-LRU has fewer parameters in its gates.
        ("paper_latte", 111, 0.02),
        ("paper_latte_pp", 140, 0.02),
        ("paper_latte_conv_pp", 140, 0.02),
        ("paper_latte_conv_swa_pp", 153, 0.02),
        ("paper_transformer_pp", 151, 0.02),
        ("paper_latte_r_pp", 139, 0.03),
        ("paper_latte_r_swa_pp", 153, 0.03),
        ("paper_r_swa_pp", 141, 0.03),
        # 50,267 · 768 for the table, 12 layers of 4 · 768² and 2 · 768 · 3072, and 25 norms.
        ("paper_transformer", 123.578, 1e-5),
    ],
)
def test_the_papers_models_have_the_papers_sizes(name, millions, tolerance):
    count = count_parameters(shapes(load(name).model))
    assert count == pytest.approx(1e6 * millions, rel=tolerance)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        # The table 40·16; 2 layers of q and k 16·8, v and out 16², MLP 2·16·24, 2 norms of 2·16.
        ("latte", 640 + 2 * (128 + 128 + 512 + 768 + 64) + 32),
        # As much again for the head, 24 positions; q, k, v, out 16², GLU 3·16·24, norms of 16.
        ("swa", 2 * 640 + 24 * 16 + 2 * (4 * 256 + 1152 + 32) + 16),
        # Gates of 2 blocks of 8² and 16 biases, Λ, the norm of z; k and v have one head of two.
        ("r_swa", 640 + 2 * (2 * 144 + 32 + 128 + 64 + 128 + 256 + 1152 + 32) + 16),
    ],
)
def test_parameters_are_as_counted_by_hand(name, parameters):
    assert count_parameters(shapes(MODELS[name])) == parameters


@pytest.mark.parametrize(
    ("mixer", "mlp", "forward"),
    [
        # 2 layers of (q 16·8, k 16·8, v and out 16·16, MLP 3·16·24 weights, and 4 · 2 · 4 · 8 for
        # the state), and the table's 16·40 weights.
        ("latte", "glu", 2 * (2 * (128 + 128 + 512 + 1152) + 256) + 2 * 640),
        # q, k, v, out and MLP 2·16·24; 2 heads of (8 + 8) · 2 for (1 + … + 8) / 8 = 4.5 keys.
        ("attention", "gelu", 2 * (2 * (1024 + 768) + 2 * 2 * 16 * 4.5) + 2 * 640),
        # q has one logit more; window q, k as well; (1 + 2 + 3 + 5 · 4) / 8 = 3.25 keys.
        (
            "latte_swa",
            "glu",
            2 * (2 * (160 + 128 + 1024 + 1152) + 256 + 2 * 2 * 16 * 3.25) + 2 * 640,
        ),
        # Two gates of 2 blocks of 8·8; queries and keys of 4 channels.
        ("r_swa", "glu", 2 * (2 * (256 + 256 + 512 + 1152) + 2 * 2 * 12 * 3.25) + 2 * 640),
    ],
)
def test_operations_of_a_token_are_as_counted_by_hand(mixer, mlp, forward):
    config = dataclasses.replace(SMALL, pattern=(mixer,), mlp=mlp)
    assert training_flops_per_token(config, 8) == 3 * forward


def test_an_encoders_tokens_see_the_whole_row():
    config = dataclasses.replace(SMALL, pattern=("attention",), causal=False)
    more = training_flops_per_token(config, 8) - training_flops_per_token(config, 4)
    assert more == 3 * 2 * (2 * 2 * 16 * 4)
