"""Transformer++ of the size of latte_150m, to compare with.

latte train --config transformer_150m --data.path TEXT
launch/tpu.sh --config transformer_150m --tpu v5litepod-16 --data.path TEXT

12 layers, width 768, H 8, FF 3,200, vocabulary 50,304, tied: 155.4M parameters.

latte plan --config transformer_150m --topology v5e:4x4

Planned, with no TPU, for 16 v5e chips: 9.3 of 15.8 GiB a device, 0.60 s a step of 524,288
tokens, 0.87M tokens/s, MFU at most 32%; 10B tokens take at least 3.3 hours.
"""

from latte.config import Config, DataConfig, ModelConfig, OptimConfig, TrainConfig

config = Config(
    name="transformer_150m",
    model=ModelConfig(
        vocab_size=50_304,
        width=768,
        layers=12,
        pattern=("attention",),
        heads=8,
        ff=3200,
        remat="dots",
    ),
    data=DataConfig(tokenizer_vocab=50_304),
    optim=OptimConfig(lr=6e-4, warmup=2000, schedule="cosine"),
    train=TrainConfig(steps=20_000, batch_size=128, sequence_length=4096, accumulate=2),
)
