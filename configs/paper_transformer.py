"""Transformer as in Vaswani et al.: full attention, LayerNorm, GELU MLP, sinusoidal positions.

latte train --config paper_transformer --data.path OPENWEBTEXT

12 layers, width 768, H 8, N 16, vocabulary 50,267, tied: 123.6M parameters.
"""

from latte.config import Config, DataConfig, ModelConfig, OptimConfig, TrainConfig

config = Config(
    name="paper_transformer",
    model=ModelConfig(
        vocab_size=50_267,
        pattern=("attention",),
        norm="layer",
        mlp="gelu",
        position="sinusoidal",
    ),
    data=DataConfig(tokenizer_vocab=50_267),
    optim=OptimConfig(lr=6e-4, warmup=2000, schedule="cosine", weight_decay=0.01),
    train=TrainConfig(steps=100_000, batch_size=80, sequence_length=1024),
)
