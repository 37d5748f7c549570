"""Latte-R-SWA++ of the 1B class, for a slice of 256 v5e chips.

latte train --config latte_1b --data.path TEXT
launch/tpu.sh --config latte_1b --tpu v5litepod-256 --data.path TEXT

20 layers, width 2,048, H 16, N 64, window 128, vocabulary 32,768, tied: 1190.0M parameters.

latte plan --config latte_1b --topology v5e:16x16

Planned, with no TPU, for 256 v5e chips: 11.7 of 15.8 GiB a device, 0.51 s a step of 2,097,152
tokens, 4.08M tokens/s, MFU at most 59%; 105B tokens take at least 7.1 hours.
"""

from latte.config import Config, DataConfig, MeshConfig, ModelConfig, OptimConfig, TrainConfig

config = Config(
    name="latte_1b",
    model=ModelConfig(
        vocab_size=32_768,
        width=2048,
        layers=20,
        pattern=("latte_r_swa",),
        heads=16,
        latents=64,
        window=128,
        ff=5632,
        remat="dots",
    ),
    data=DataConfig(tokenizer_vocab=32_768),
    optim=OptimConfig(lr=3e-4, warmup=2000, schedule="cosine"),
    train=TrainConfig(steps=50_000, batch_size=512, sequence_length=4096),
    mesh=MeshConfig(data=16, fsdp=16),
)
