"""A folder for transformers as a run directory, which every other command reads."""

import dataclasses
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from latte.checkpoint import Checkpoints, Keep
from latte.config import Config, from_json, to_json, validate
from latte.data.tokenizer import Tokenizer, load_tokenizer
from latte.errors import UserError
from latte.hf.folder import read_json, read_model
from latte.hf.foreign import of_llama
from latte.model import LanguageModel
from latte.run import write_config


def import_folder(folder: Path, run_dir: Path) -> dict[str, Any]:
    """Makes a run directory of a folder; the weights of an exported one are the run's to the bit.

    Raises:
        UserError: the folder is no model, is not whole, or `run_dir` is there already.
    """
    if run_dir.exists() and (not run_dir.is_dir() or any(run_dir.iterdir())):
        raise UserError(f"{run_dir} is there already; choose another --run, or delete it")
    stored = read_json(folder / "config.json")
    kind = stored.get("model_type", "no model")
    if "latte" in stored:
        fields = stored["latte"]
    elif kind == "llama":
        fields = dataclasses.asdict(of_llama(stored, str(folder)))
    else:
        raise UserError(f"{folder} holds {kind}; what can be read is what was exported, and llama")
    run = stored.get("latte_run", {})
    name, step = run.get("name", folder.name), run.get("step", 0)
    config = _config(name, fields, str(folder / "config.json"))
    tokenizer = load_tokenizer(folder)
    if tokenizer.vocab_size > config.model.vocab_size:
        raise UserError(
            f"the tokenizer of {folder} has {tokenizer.vocab_size} tokens, but the model's "
            f"vocabulary is {config.model.vocab_size}; they are not of one model"
        )
    write_run(run_dir, config, tokenizer, read_model(config.model, folder), step)
    return {"run": str(run_dir), "name": name, "step": step}


def _config(name: str, model: dict[str, Any], source: str) -> Config:
    """A run's config around the fields of a model's, checked as those of a run directory are."""
    blank = json.loads(to_json(Config(name=name)))
    config = from_json(json.dumps(blank | {"model": model}), source)
    length = config.model.max_length or config.train.sequence_length
    return validate(replace(config, train=replace(config.train, sequence_length=length)))


def write_run(
    run_dir: Path, config: Config, tokenizer: Tokenizer, model: LanguageModel, step: int
) -> None:
    """A run directory with one checkpoint: everything but the optimizer's moments and the text."""
    partial = run_dir.with_name(f"{run_dir.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    tokenizer.save(partial)
    checkpoints = Checkpoints(partial / "checkpoints", Keep(1))
    checkpoints.save(step, {"model": model})
    checkpoints.close()
    write_config(config, partial)
    if run_dir.exists():
        run_dir.rmdir()
    partial.rename(run_dir)
