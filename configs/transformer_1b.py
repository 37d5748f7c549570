"""Transformer++ of the size of latte_1b, to compare with.

latte train --config transformer_1b --data.path TEXT
launch/tpu.sh --config transformer_1b --tpu v5litepod-256 --data.path TEXT

20 layers, width 2,048, H 16, FF 6,400, vocabulary 32,768, tied: 1189.2M parameters.

latte plan --config transformer_1b --topology v5e:16x16

Planned, with no TPU, for 256 v5e chips: 10.1 of 15.8 GiB a device, 0.69 s a step of 2,097,152
tokens, 3.03M tokens/s, MFU at most 49%; 105B tokens take at least 9.6 hours.
"""

from latte.config import Config, DataConfig, MeshConfig, ModelConfig, OptimConfig, TrainConfig

config = Config(
    name="transformer_1b",
    model=ModelConfig(
        vocab_size=32_768,
        width=2048,
        layers=20,
        pattern=("attention",),
        heads=16,
        ff=6400,
        remat="dots",
    ),
    data=DataConfig(tokenizer_vocab=32_768),
    optim=OptimConfig(lr=3e-4, warmup=2000, schedule="cosine"),
    train=TrainConfig(steps=50_000, batch_size=512, sequence_length=4096),
    mesh=MeshConfig(data=16, fsdp=16),
)
