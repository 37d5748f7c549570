"""R-SWA++ of the paper's tables: sliding window whose queries and keys come from an RG-LRU (Table
2).

latte train --config paper_r_swa_pp --data.path OPENWEBTEXT

12 layers, width 768, H 8, N 16, vocabulary 50,267, tied: 141.9M (the paper: 141M) parameters.
"""

from latte.config import Config, DataConfig, ModelConfig, OptimConfig, TrainConfig

config = Config(
    name="paper_r_swa_pp",
    model=ModelConfig(
        vocab_size=50_267,
        pattern=("r_swa",),
    ),
    data=DataConfig(tokenizer_vocab=50_267),
    optim=OptimConfig(lr=6e-4, warmup=2000, schedule="cosine", weight_decay=0.01),
    train=TrainConfig(steps=100_000, batch_size=80, sequence_length=1024),
)
