"""Transformer++ of the size of latte_3b, to compare with.

latte train --config transformer_3b --data.path TEXT
launch/tpu.sh --config transformer_3b --tpu v5litepod-256 --data.path TEXT

30 layers, width 2,560, H 20, FF 7,808, vocabulary 32,768, tied: 2669.4M parameters.

latte plan --config transformer_3b --topology v5e:16x16

Planned, with no TPU, for 256 v5e chips: 6.7 of 15.8 GiB a device, 1.44 s a step of 2,097,152
tokens, 1.46M tokens/s, MFU at most 52%; 105B tokens take at least 20.0 hours.
"""

from latte.config import Config, DataConfig, MeshConfig, ModelConfig, OptimConfig, TrainConfig

config = Config(
    name="transformer_3b",
    model=ModelConfig(
        vocab_size=32_768,
        width=2560,
        layers=30,
        pattern=("attention",),
        heads=20,
        ff=7808,
    ),
    data=DataConfig(tokenizer_vocab=32_768),
    optim=OptimConfig(lr=2e-4, warmup=2000, schedule="cosine"),
    train=TrainConfig(steps=50_000, batch_size=512, sequence_length=4096),
    mesh=MeshConfig(data=16, fsdp=16),
)
