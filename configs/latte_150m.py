"""Latte-R-SWA++ of the size of the paper's table 1.

latte train --config latte_150m --data.path TEXT
launch/tpu.sh --config latte_150m --tpu v5litepod-16 --data.path TEXT

12 layers, width 768, H 8, N 16, window 128, vocabulary 50,304, tied: 156.1M parameters.

latte plan --config latte_150m --topology v5e:4x4

Planned, with no TPU, for 16 v5e chips: 10.0 of 15.8 GiB a device, 0.37 s a step of 524,288 tokens,
1.43M tokens/s, MFU at most 43%; 10B tokens take at least 2.0 hours.
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
        remat="dots",
    ),
    data=DataConfig(tokenizer_vocab=50_304),
    optim=OptimConfig(lr=6e-4, warmup=2000, schedule="cosine"),
    train=TrainConfig(steps=20_000, batch_size=128, sequence_length=4096, accumulate=2),
)
