"""Transformer++ of the size of latte_150m, to compare with.

latte train --config transformer_150m --data.path TEXT

12 layers, width 768, H 8, FF 3,200, vocabulary 50,304, tied: 155.4M parameters.
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
    ),
    data=DataConfig(tokenizer_vocab=50_304),
    optim=OptimConfig(lr=6e-4, warmup=2000, schedule="cosine"),
    train=TrainConfig(steps=20_000, batch_size=128, sequence_length=4096),
)
