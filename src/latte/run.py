"""A run directory: what is in it, and how the programs that read it open it.

config.json        every setting, resolved
manifest.json      the token store's: what the model is trained on
tokenizer.*        the tokenizer that the model is trained with
checkpoints/       model and optimizer, by step
metrics.jsonl      a line a step and an evaluation
tensorboard/       the same for TensorBoard
environment.json   versions, git state and devices, an entry a start
samples.txt        what the model wrote after each evaluation
plots/             the loss curve, and how each layer uses its latents
"""

import os
from dataclasses import replace
from pathlib import Path

import jax
from jaxtyping import PyTree

from latte.checkpoint import Checkpoints, Keep
from latte.config import Config, read_run_config, to_json
from latte.cost import shapes
from latte.data.prepare import CACHE
from latte.data.store import TokenStore
from latte.data.tokenizer import Tokenizer, load_tokenizer
from latte.errors import UserError
from latte.memory import keep_freed_pages
from latte.mesh import shardings
from latte.mirror import checkpoint_folder, shown
from latte.model import LanguageModel


def checkpoints_of(run_dir: Path, keep: Keep | None = None) -> Checkpoints:
    """The checkpoints of a run; only to be read where it is not said which to keep."""
    return Checkpoints(checkpoint_folder(run_dir), keep)


def resolve(config: Config, tokenizer: Tokenizer) -> Config:
    """The config with the sizes that follow from the tokenizer and the row length filled in.

    Raises:
        UserError: the model's vocabulary has no room for the tokenizer's.
    """
    model = config.model
    vocab_size = model.vocab_size or tokenizer.vocab_size
    if vocab_size < tokenizer.vocab_size:
        raise UserError(
            f"model.vocab_size ({vocab_size}) is smaller than the tokenizer's "
            f"({tokenizer.vocab_size}); take --model.vocab_size {tokenizer.vocab_size} or 0"
        )
    max_length = model.max_length or config.train.sequence_length
    return replace(config, model=replace(model, vocab_size=vocab_size, max_length=max_length))


def start_run(config: Config, run_dir: Path, store: TokenStore) -> None:
    """Writes what a run is; its config comes last and whole, so that with it nothing is missing."""
    run_dir.mkdir(parents=True, exist_ok=True)
    path, text = run_dir / "config.json", to_json(config)
    if not path.exists():
        store.tokenizer.save(run_dir)
        (run_dir / "manifest.json").write_text(store.manifest.to_json(), encoding="utf-8")
    elif path.read_text(encoding="utf-8") == text:
        return
    write_config(config, run_dir)


def write_config(config: Config, run_dir: Path) -> None:
    """Writes the config of a run directory, whole or not at all."""
    path = run_dir / "config.json"
    with open(path.with_suffix(".partial"), "w", encoding="utf-8") as file:
        file.write(to_json(config))
        file.flush()
        os.fsync(file.fileno())
    os.replace(file.name, path)


def keep_compiled(config: Config) -> None:
    """Lets JAX keep what it compiles beside the prepared corpora, for the next start."""
    cache = Path(config.data.cache or CACHE) / "compiled"
    jax.config.update("jax_compilation_cache_dir", str(cache.absolute()))


def check_store(run_dir: Path, store: TokenStore) -> None:
    """Refuses a token store that is not the one that the run in a directory was started with.

    Raises:
        UserError: it has another tokenizer, or other text.
    """
    if not (run_dir / "config.json").exists():
        return
    kept = run_dir / "manifest.json"
    if load_tokenizer(run_dir).fingerprint != store.tokenizer.fingerprint:
        what = "tokenizer"
    elif not kept.exists() or kept.read_text(encoding="utf-8") != store.manifest.to_json():
        what = "text"
    else:
        return
    raise UserError(
        f"the {what} of {store.place} is not the one that {shown(run_dir)} was trained with; "
        "restore the corpus as it was, or train in another --run-dir"
    )


def place_like(tree: PyTree) -> PyTree:
    """Shapes with the layout that a run gives its arrays, to restore into."""
    return jax.tree.map(
        lambda leaf, layout: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=layout),
        tree,
        shardings(tree),
    )


def open_run(run_dir: Path) -> tuple[Config, Tokenizer, LanguageModel, int]:
    """Config, tokenizer, the newest whole checkpoint's model for the mesh in force, and its step.

    Raises:
        UserError: the directory holds no run, or the run has no checkpoint yet.
    """
    keep_freed_pages()
    config = read_run_config(run_dir)
    keep_compiled(config)
    tokenizer = load_tokenizer(run_dir)
    checkpoints = checkpoints_of(run_dir)
    if not checkpoints.steps():
        raise UserError(f"{shown(run_dir)} has no checkpoint yet; train it for longer")
    restored = checkpoints.restore({"model": place_like(shapes(config.model))})
    assert restored is not None
    items, step = restored
    return config, tokenizer, items["model"], step
