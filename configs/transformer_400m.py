"""Transformer++ of the size of latte_400m, to compare with.

latte train --config transformer_400m --data.path TEXT

24 layers, width 1,024, H 8, FF 3,264, vocabulary 50,304, tied: 392.9M parameters.
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
