"""Latte-R-SWA++ of the 3B class, for a slice of 256 v5e chips.

latte train --config latte_3b --data.path TEXT
launch/tpu.sh --config latte_3b --tpu v5litepod-256 --data.path TEXT

30 layers, width 2,560, H 20, N 64, window 128, vocabulary 32,768, tied: 2681.1M parameters.

latte plan --config latte_3b --topology v5e:16x16

Planned, with no TPU, for 256 v5e chips: 7.4 of 15.8 GiB a device, 1.41 s a step of 2,097,152
tokens, 1.49M tokens/s, MFU at most 48%; 105B tokens take at least 19.6 hours.
"""

from latte.config import Config, DataConfig, MeshConfig, ModelConfig, OptimConfig, TrainConfig

config = Config(
    name="latte_3b",
    model=ModelConfig(
        vocab_size=32_768,
        width=2560,
        layers=30,
        pattern=("latte_r_swa",),
        heads=20,
        latents=64,
        window=128,
        ff=6912,
    ),
    data=DataConfig(tokenizer_vocab=32_768),
    optim=OptimConfig(lr=2e-4, warmup=2000, schedule="cosine"),
    train=TrainConfig(steps=50_000, batch_size=512, sequence_length=4096),
    mesh=MeshConfig(data=16, fsdp=16),
)
