"""Latte-R-SWA++ of the 400M class, for one host of accelerators.

latte train --config latte_400m --data.path TEXT

24 layers, width 1,024, H 8, N 64, window 128, vocabulary 50,304, tied: 391.6M parameters.
"""

from latte.config import Config, DataConfig, ModelConfig, OptimConfig, TrainConfig

config = Config(
    name="latte_400m",
    model=ModelConfig(
        vocab_size=50_304,
        width=1024,
        layers=24,
        pattern=("latte_r_swa",),
        heads=8,
        latents=64,
        window=128,
        ff=2816,
    ),
    data=DataConfig(tokenizer_vocab=50_304),
    optim=OptimConfig(lr=3e-4, warmup=2000, schedule="cosine"),
    train=TrainConfig(steps=30_000, batch_size=128, sequence_length=4096),
)
