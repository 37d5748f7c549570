"""Latte-R-SWA++ of the size of the paper's table 1.

latte train --config latte_150m --data.path TEXT

12 layers, width 768, H 8, N 16, window 128, vocabulary 50,304, tied: 156.1M parameters.
"""

from latte.config import Config, DataConfig, ModelConfig, OptimConfig, TrainConfig

config = Config(
    name="latte_150m",
    model=ModelConfig(
        vocab_size=50_304,
        width=768,
        layers=12,
        pattern=("latte_r_swa",),
        heads=8,
        latents=16,
        window=128,
        ff=3072,
    ),
    data=DataConfig(tokenizer_vocab=50_304),
    optim=OptimConfig(lr=6e-4, warmup=2000, schedule="cosine"),
    train=TrainConfig(steps=20_000, batch_size=128, sequence_length=4096),
)
