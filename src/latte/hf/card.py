"""The model card of an exported folder."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from latte.config import Config
from latte.cost import count_parameters, shapes
from latte.hf.parity import Difference
from latte.hf.weights import is_llama
from latte.metrics import read_metrics

_FIGURES = {
    "heldout_bits_per_byte": "bits per byte",
    "heldout_loss": "nats a token",
    "heldout_perplexity": "perplexity",
}


def write_card(
    folder: Path, run_dir: Path, config: Config, step: int, difference: Difference, licence: str
) -> None:
    """Writes README.md: what the model is, what it was trained on and by which command, figures."""
    model, parameters = config.model, count_parameters(shapes(config.model))
    remote = "" if is_llama(model) else ", trust_remote_code=True"
    lines = [
        "---",
        f"license: {licence}",
        "library_name: transformers",
        "pipeline_tag: text-generation",
        "tags:",
        "- latte",
        "---",
        "",
        f"# {config.name}",
        "",
        f"A language model of {parameters:,} parameters: {model.layers} blocks of width "
        f"{model.width}, token mixers {', '.join(model.pattern)}, a vocabulary of "
        f"{model.vocab_size:,}. It was trained with Latte for {step:,} steps.",
        "",
        "```python",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        f'model = AutoModelForCausalLM.from_pretrained("FOLDER"{remote})',
        f'tokenizer = AutoTokenizer.from_pretrained("FOLDER"{remote})',
        'prompt = tokenizer("Once upon a time", return_tensors="pt")',
        "print(tokenizer.decode(model.generate(**prompt, max_new_tokens=100)[0]))",
        "```",
        "",
        "## Data",
        "",
        *_data(run_dir, config),
        "",
        "## Training",
        "",
        f"`latte train --config {config.name}`: {config.train.batch_size} rows of "
        f"{config.train.sequence_length:,} tokens a step, AdamW with a peak learning rate of "
        f"{config.optim.lr:g}, schedule {config.optim.schedule}.",
        "",
        "## Figures",
        "",
        *_figures(run_dir, step),
        f"- exported logits beside the trainer's: a difference of at most {difference.logits:.1e} "
        f"of the largest, on {difference.prompts} prompts",
        "",
        "## Licence",
        "",
        f"`{licence}`",
    ]
    (folder / "README.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _data(run_dir: Path, config: Config) -> list[str]:
    """The corpus by its name, and how much of it there is; no path of the machine."""
    name = "texts of its own" if config.data.path else f"the corpus `{config.data.corpus}`"
    try:
        manifest: Mapping[str, Any] = json.loads((run_dir / "manifest.json").read_text("utf-8"))
    except (OSError, ValueError):
        return [f"Trained on {name}."]
    sizes = manifest["splits"]["train"]
    return [
        f"Trained on {name}: {sizes['documents']:,} documents, {sizes['bytes']:,} bytes, "
        f"{sizes['tokens']:,} tokens."
    ]


def _figures(run_dir: Path, step: int) -> list[str]:
    """The last evaluation on held-out documents that the weights' step has seen."""
    path = run_dir / "metrics.jsonl"
    records = read_metrics(path) if path.exists() else iter(())
    seen = [r for r in records if "heldout_loss" in r and r["step"] <= step]
    last = seen[-1] if seen else {}
    return [
        f"- held-out text, {words}: {last[name]:.4f} (step {last['step']:,})"
        for name, words in _FIGURES.items()
        if last.get(name) is not None
    ]
