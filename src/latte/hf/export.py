"""A run's newest checkpoint as a folder that transformers loads."""

import os
import shutil
from pathlib import Path
from typing import Any

import jax

from latte.config import MeshConfig
from latte.errors import UserError
from latte.hf.card import write_card
from latte.hf.folder import generation_config, transformers_config, write_model
from latte.hf.parity import compare, import_torch
from latte.hf.tokenizers import write_tokenizer
from latte.mesh import make_mesh
from latte.run import open_run

SHARD_BYTES = 4_000_000_000
"""Most bytes of a safetensors file."""


def export(
    run_dir: Path, out: Path, *, licence: str = "apache-2.0", shard_bytes: int = SHARD_BYTES
) -> dict[str, Any]:
    """Writes the folder, and compares what is in it with the run before it gets its name.

    Returns what was written and the largest difference of logits, relative to the largest logit.

    Raises:
        UserError: the run has no checkpoint, `out` is there already, or the two differ.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} is there already; choose another --out, or delete it")
    import_torch()
    with jax.set_mesh(make_mesh(MeshConfig(), jax.devices()[:1])):
        config, tokenizer, model, step = open_run(run_dir)
    shape, separator = config.model, tokenizer.separator
    partial = out.with_name(f"{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        written = transformers_config(shape, separator)
        written["latte_run"] = {"name": config.name, "step": step}
        generation = generation_config(shape, separator, tokenizer.vocab_size)
        write_model(model, written, generation, partial, shard_bytes)
        write_tokenizer(tokenizer, partial)
        difference = compare(model, tokenizer, partial)
        write_card(partial, run_dir, config, step, difference, licence)
        if out.exists():
            out.rmdir()
        os.replace(partial, out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return {
        "out": str(out),
        "step": step,
        "class": written["architectures"][0],
        "largest_difference": difference.logits,
        "prompts": difference.prompts,
        "greedy_tokens": difference.tokens,
        "greedy_tokens_same": difference.same,
    }


def push(folder: Path, name: str) -> str:
    """Puts an exported folder on the Hugging Face Hub under NAME; returns its address.

    Raises:
        UserError: the hub refuses, or cannot be reached.
    """
    import huggingface_hub

    try:
        huggingface_hub.create_repo(name, exist_ok=True)
        info = huggingface_hub.upload_folder(repo_id=name, folder_path=folder)
    except Exception as error:  # Whatever the hub and what carries its requests say.
        words = " ".join(str(error).split())[:300]
        raise UserError(
            f"{folder} was written, but could not be put on the hub as {name} ({words}); log in "
            "with `hf auth login` and push it with `hf upload`"
        ) from error
    return str(info.commit_url)
