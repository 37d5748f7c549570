"""Latte-R-SWA++ of the 1B class, for a slice of 256 v5e chips.

latte train --config latte_1b --data.path TEXT

20 layers, width 2,048, H 16, N 64, window 128, vocabulary 32,768, tied: 1190.0M parameters.
"""

from latte.config import Config, DataConfig, MeshConfig, ModelConfig, OptimConfig, TrainConfig

config = Config(
    name="latte_1b",
    model=ModelConfig(
        vocab_size=32_768,
        width=2048,
        layers=20,
        pattern=("latte_r_swa",),
        heads=16,
        latents=64,
        window=128,
        ff=5632,
        remat="dots",
    ),
    data=DataConfig(tokenizer_vocab=32_768),
    optim=OptimConfig(lr=3e-4, warmup=2000, schedule="cosine"),
    train=TrainConfig(steps=50_000, batch_size=512, sequence_length=4096),
    mesh=MeshConfig(data=16, fsdp=16),
)
