"""Latte-R-SWA++ in nanoGPT's CPU setting: characters of Shakespeare, context 64, 2,000 steps.

latte train --config shakespeare_latte --data.path tinyshakespeare.txt

nanoGPT publishes a validation loss of 1.88 nats a character for its own model of this size.
"""

from latte.config import Config, DataConfig, ModelConfig, OptimConfig, TrainConfig

config = Config(
    name="shakespeare_latte",
    model=ModelConfig(
        pattern=("latte_r_swa",),
        latents=16,
        window=16,
        width=128,
        layers=4,
        heads=4,
        ff=336,
        dtype="float32",
        remat="none",
    ),
    data=DataConfig(tokenizer="bytes", heldout=0.1),
    optim=OptimConfig(lr=1e-3, warmup=100, beta2=0.99, weight_decay=0.1),
    train=TrainConfig(
        steps=2000, batch_size=12, sequence_length=64, eval_every=250, checkpoint_every=500
    ),
)
