"""Latte-R-SWA++ of the 400M class, for one host of accelerators.

latte train --config latte_400m --data.path TEXT
launch/tpu.sh --config latte_400m --tpu v5litepod-16 --data.path TEXT

24 layers, width 1,024, H 8, N 64, window 128, vocabulary 50,304, tied: 391.6M parameters.

latte plan --config latte_400m --topology v5e:4x4

Planned, with no TPU, for 16 v5e chips: 12.8 of 15.8 GiB a device, 0.92 s a step of 524,288
tokens, 0.57M tokens/s, MFU at most 44%; 16B tokens take at least 7.6 hours.
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
