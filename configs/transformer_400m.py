"""Transformer++ of the size of latte_400m, to compare with.

latte train --config transformer_400m --data.path TEXT
launch/tpu.sh --config transformer_400m --tpu v5litepod-16 --data.path TEXT

24 layers, width 1,024, H 8, FF 3,264, vocabulary 50,304, tied: 392.9M parameters.

latte plan --config transformer_400m --topology v5e:4x4

Planned, with no TPU, for 16 v5e chips: 12.3 of 15.8 GiB a device, 1.17 s a step of 524,288
tokens, 0.45M tokens/s, MFU at most 42%; 16B tokens take at least 9.7 hours.
"""

from latte.config import Config, DataConfig, ModelConfig, OptimConfig, TrainConfig

config = Config(
    name="transformer_400m",
    model=ModelConfig(
        vocab_size=50_304,
        width=1024,
        layers=24,
        pattern=("attention",),
        heads=8,
        ff=3264,
    ),
    data=DataConfig(tokenizer_vocab=50_304),
    optim=OptimConfig(lr=3e-4, warmup=2000, schedule="cosine"),
    train=TrainConfig(steps=30_000, batch_size=128, sequence_length=4096),
)
