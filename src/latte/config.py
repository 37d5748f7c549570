"""Every setting of a run, as frozen dataclasses; nothing else parses a setting.

The command line calls, in this order: `load` (a file in configs/), `apply_overrides`, `validate`.
A run directory keeps the result (`to_json`, `from_json`), and `difference` tells whether a later
command means the same run. This module imports no JAX, so that a wrong setting is answered at once.
"""

import ast
import dataclasses
import difflib
import functools
import importlib.util
import itertools
import json
import re
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_origin, get_type_hints

from latte.errors import UserError
from latte.values import fits, kind_name, parse, parse_mixture, show

Mixer = Literal[
    "attention",
    "swa",
    "r_swa",
    "latte",
    "latte_conv",
    "latte_r",
    "latte_swa",
    "latte_conv_swa",
    "latte_r_swa",
]


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a model."""

    vocab_size: int = 0
    """Rows of the embedding; 0 takes the tokenizer's size."""
    width: int = 768
    """Width of the residual stream."""
    layers: int = 12
    """Blocks (a mixer and an MLP each); a multiple of the pattern's length."""
    pattern: tuple[Mixer, ...] = ("latte_r_swa",)
    """Token mixers, repeated until there are `layers` of them; several make a hybrid."""
    heads: int = 8
    """Heads of every mixer, H."""
    kv_heads: int = 0
    """Key-value heads of attention and of the window; 0 means as many as heads."""
    latents: int = 16
    """Latent states a head, N (the paper's L is heads × latents)."""
    window: int = 128
    """Keys that a token sees through the sliding window, itself included, W."""
    conv_size: int = 3
    """Taps of the short convolution, K."""
    ff: int = 3072
    """Hidden width of the MLP."""
    mlp: Literal["gelu", "glu"] = "glu"
    """GELU MLP (Vaswani et al.) or gated linear unit with SiLU (two input projections)."""
    norm: Literal["layer", "rms"] = "rms"
    """LayerNorm or RMSNorm, before each mixer and MLP and at the end."""
    position: Literal["rope", "vapor", "sinusoidal", "learned", "none"] = "rope"
    """rope: attention and windows rotate q and k. vapor: as rope, and Latte rotates its values.
    sinusoidal, learned: added to the embedding. none."""
    rope_theta: float = 10_000.0
    """Base wavelength of the rotations and of sinusoidal positions."""
    max_length: int = 0
    """Rows of the learned position table; 0 takes the training length."""
    tied: bool = True
    """The output projection is the embedding."""
    causal: bool = True
    """False makes an encoder: every mixer sees both directions."""
    dropout: float = 0.0
    """Probability of dropping an element of the embedding and of each block's two outputs."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of activations and matrix products; parameters, states and softmax sums are float32."""
    remat: Literal["none", "dots", "full"] = "full"
    """What a block keeps for its backward pass: everything, what matrix products and GPU kernels
    gave, or its input only."""
    unroll: bool = False
    """Compile each block by itself, not one that is looped over: that takes so many times longer,
    and what blocks keep is not copied into arrays of all blocks and out again (a tenth of a step on
    a GPU)."""


@dataclass(frozen=True)
class DataConfig:
    """What a run trains on."""

    store: str = ""
    """A prepared token store, a folder or gs:// or s3://, to train on instead of what corpus, path
    and tokenizer say."""
    corpus: str = "stdlib"
    """Name of a file in data/ that says where a corpus is; unused where a path is given."""
    path: str = ""
    """A file or folder, or the URL of one, to train on instead: texts (one document each; hidden
    ones are left out), or .jsonl, .jsonl.gz, .jsonl.zst and .parquet with a document a record. For
    a corpus of data/ that may lie anywhere, such as slimpajama, the place of its copy."""
    tokenizer: str = "sentencepiece"
    """sentencepiece (trained on the corpus), bytes, the path of a sentencepiece .model file or of a
    tokenizer.json, or a name on the Hugging Face hub, such as openai-community/gpt2."""
    tokenizer_vocab: int = 4096
    """Size of the vocabulary of a sentencepiece tokenizer that is trained on the corpus."""
    heldout: float = 0.05
    """Share kept for evaluation, where the corpus has no files for that: of texts a share of the
    bytes, whole documents or the end of a lone one; of records those of certain hashes."""
    skip_bad: int = 0
    """Bad documents that may be left out, and are named, instead of stopping."""
    mixture: str = ""
    """Weights of subsets, such as "RedPajamaC4=0.7, RedPajamaBook=0.3, @20000, RedPajamaBook=1",
    where @STEP begins the weights from that step on. By default the corpus' published proportions,
    or else every subset by its size."""
    mixture_by: Literal["tokens", "documents"] = "tokens"
    """What the weights are shares of."""
    packing: Literal["cut", "fit"] = "cut"
    """cut: documents are joined and cut into rows. fit: documents no longer than a row are kept
    whole, and packed into rows by best fit; what is left of a row is padding."""
    cache: str = ""
    """Folder of prepared token stores; by default .cache/latte under the working directory."""


@dataclass(frozen=True)
class OptimConfig:
    """AdamW, its schedule, and what is done about bad steps."""

    lr: float = 6e-4
    """Peak learning rate."""
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """After the warm-up: cosine or straight line to the final rate; wsd stays, then falls."""
    warmup: int = 2000
    """Steps of linear warm-up."""
    decay: float = 0.2
    """Share of the steps in which wsd falls."""
    final: float = 0.1
    """Final learning rate as a share of the peak."""
    beta1: float = 0.9
    """Decay of the mean of gradients."""
    beta2: float = 0.95
    """Decay of the mean of squared gradients."""
    epsilon: float = 1e-8
    """Added to the root of the mean of squared gradients."""
    weight_decay: float = 0.1
    """Decoupled decay of matrices; norms, biases, gates' Λ and position tables are left out."""
    clip: float = 1.0
    """Largest global gradient norm; 0 leaves gradients as they are."""
    z_loss: float = 0.0
    """Weight of the squared log-normaliser of the output softmax."""
    spike: float = 10.0
    """A step whose gradient norm is this many times the running mean is skipped; 0 skips none."""
    max_skips: int = 20
    """A run of this many skipped steps ends the run."""


@dataclass(frozen=True)
class TrainConfig:
    """The loop."""

    steps: int = 100_000
    """Updates of the parameters."""
    batch_size: int = 80
    """Rows of a global batch."""
    sequence_length: int = 1024
    """Tokens of a row, T."""
    accumulate: int = 1
    """Microbatches a step; divides the batch size."""
    seed: int = 0
    """Decides the parameters at the start, the order of the data and dropout."""
    log_every: int = 10
    """Steps between lines of progress where there is no terminal."""
    eval_every: int = 1000
    """Steps between evaluations on the held-out documents; the last step is always evaluated."""
    eval_tokens: int = 1_000_000
    """Most held-out tokens that an evaluation during training reads; the last one reads all."""
    checkpoint_every: int = 1000
    """Steps between checkpoints; the last step always writes one."""
    keep: int = 3
    """Newest checkpoints that are kept."""
    keep_every: int = 0
    """Checkpoints of steps that this divides are kept for good; 0 keeps none of them so."""
    keep_best: bool = False
    """Keep the checkpoint with the lowest held-out loss too."""
    replay_every: int = 0
    """Steps between two that are run twice, to find devices that compute wrongly; 0 for none. A
    replay holds a second copy of the parameters and moments."""
    patience: int = 60
    """Seconds without a sign of life after which another process of the run counts as lost."""
    sample_tokens: int = 200
    """Tokens of the sample that is written after each evaluation; 0 writes none."""
    tensorboard: bool = True
    """Write TensorBoard events into the run directory."""
    wandb: str = ""
    """Project on Weights & Biases; empty logs nothing there."""


@dataclass(frozen=True)
class MeshConfig:
    """How the devices share the work; the product of the four is their number."""

    data: int = 0
    """Copies of the parameters, each with rows of its own; 0 takes the devices that are left."""
    fsdp: int = 1
    """Devices that share the parameters and optimizer state, each with rows of its own."""
    context: int = 1
    """Devices that share each row: T is spread over them."""
    tensor: int = 1
    """Devices that share the heads and the MLPs' hidden units of each layer."""


@dataclass(frozen=True)
class Config:
    """A run."""

    name: str
    """Names the run directory, runs/NAME, and its plots."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """The shape of the model."""
    data: DataConfig = field(default_factory=DataConfig)
    """What it trains on."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """How its parameters are updated."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """The loop."""
    mesh: MeshConfig = field(default_factory=MeshConfig)
    """How the devices share the work."""


CONFIGS = Path(__file__).resolve().parents[2] / "configs"
"""The folder of named configs, beside src/."""

SAME_LOSSES = frozenset(
    {
        "name",
        "data.cache",
        "data.skip_bad",
        "data.store",
        "train.log_every",
        "train.eval_every",
        "train.eval_tokens",
        "train.checkpoint_every",
        "train.keep",
        "train.keep_every",
        "train.keep_best",
        "train.replay_every",
        "train.patience",
        "train.sample_tokens",
        "train.tensorboard",
        "train.wandb",
        "mesh.data",
        "mesh.fsdp",
        "mesh.context",
        "mesh.tensor",
    }
)
"""Settings that may change when a run goes on, because no training loss depends on them, or by
rounding alone."""


# --- fields ------------------------------------------------------------------------------------


class Setting(NamedTuple):
    """One field of a config: its dotted key, declared type, value and docstring."""

    key: str
    kind: Any
    value: Any
    doc: str


def settings(config: Config) -> Iterator[Setting]:
    """All settings, in the order in which they are declared."""
    docs = _docstrings()
    for section in dataclasses.fields(config):
        value = getattr(config, section.name)
        if not dataclasses.is_dataclass(value):
            yield Setting(section.name, str, value, docs["Config", section.name])
            continue
        kinds = get_type_hints(type(value))
        for f in dataclasses.fields(value):
            doc = docs[type(value).__name__, f.name]
            yield Setting(f"{section.name}.{f.name}", kinds[f.name], getattr(value, f.name), doc)


@functools.cache
def _docstrings() -> dict[tuple[str, str], str]:
    """(class, field) → the string under that field: Python keeps it nowhere but in the source."""
    docs = {}
    for node in ast.parse(Path(__file__).read_text(encoding="utf-8")).body:
        if not isinstance(node, ast.ClassDef):
            continue
        for declared, below in itertools.pairwise(node.body):
            if isinstance(declared, ast.AnnAssign) and isinstance(declared.target, ast.Name):
                text = below.value if isinstance(below, ast.Expr) else None
                doc = text.value if isinstance(text, ast.Constant) else ""
                docs[node.name, declared.target.id] = " ".join(str(doc).split())
        last = node.body[-1]
        if isinstance(last, ast.AnnAssign) and isinstance(last.target, ast.Name):
            docs[node.name, last.target.id] = ""
    return docs


def _replace(config: Config, changes: dict[str, Any]) -> Config:
    """`config` with dotted keys set."""
    top, sections = {}, {}
    for key, value in changes.items():
        section, _, name = key.rpartition(".")
        (sections.setdefault(section, {}) if section else top)[name] = value
    for section, values in sections.items():
        top[section] = dataclasses.replace(getattr(config, section), **values)
    return dataclasses.replace(config, **top)


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """The end of a sentence that says which known word is nearest to `word`; may be empty."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return f"; did you mean {near[0]}?" if near else ""


def _unknown(key: str, known: Iterable[str]) -> UserError:
    known = list(known)
    if any(k.startswith(f"{key}.") for k in known):
        return UserError(f"{key!r} is a group of settings; write --{key}.FIELD VALUE")
    near = nearest(key, known)
    if "." not in key:  # the section was left out: compare the last parts
        by_tail = {k.rpartition(".")[2]: k for k in known}
        tails = difflib.get_close_matches(key, list(by_tail), n=1, cutoff=0.6)
        near = f"; did you mean {by_tail[tails[0]]}?" if tails else near
    return UserError(f"unknown setting {key!r}{near or '; `latte train --help` lists them all'}")


def _misfit(key: str, kind: Any, value: Any) -> UserError:
    return UserError(f"{key} is {value!r}, but it must be {kind_name(kind)}")


# --- a named config ----------------------------------------------------------------------------


def load(name_or_path: str) -> Config:
    """The config called NAME (configs/NAME.py), or the one that a path ending in .py defines."""
    path = Path(name_or_path)
    if path.suffix != ".py":
        path = CONFIGS / f"{name_or_path}.py"
    if not path.is_file():
        known = sorted(p.stem for p in CONFIGS.glob("*.py"))
        if Path(name_or_path).suffix == ".py":
            raise UserError(f"there is no config file {name_or_path}")
        near = nearest(name_or_path, known) or f"; there are {', '.join(known) or 'none'}"
        raise UserError(f"there is no config {name_or_path!r} in {CONFIGS}{near}")
    config = getattr(_run(path), "config", None)
    if not isinstance(config, Config):
        raise UserError(f"{path} defines no `config = Config(...)`")
    for setting in settings(config):
        if not fits(setting.kind, setting.value):
            raise _misfit(f"{path}: {setting.key}", setting.kind, setting.value)
    return config


def _run(path: Path) -> Any:
    """The module in a config file; whatever goes wrong in it becomes one sentence."""
    spec = importlib.util.spec_from_file_location(f"latte_config_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except UserError:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [f.lineno for f in frames if f.filename == str(path)]
        line = error.lineno if isinstance(error, SyntaxError) else (lines or ["?"])[-1]
        where = f"{path}, line {line}"
        key = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if key:
            unknown = _unknown(key[1], [s.key for s in settings(Config(""))])
            raise UserError(f"{where}: {unknown}") from error
        message = " ".join(str(error).split())
        raise UserError(f"{where}: {type(error).__name__}: {message}") from error
    return module


# --- overrides ---------------------------------------------------------------------------------


def apply_overrides(config: Config, arguments: Sequence[str]) -> Config:
    """`config` with `--section.field value` or `--section.field=value` applied, the last one wins.

    A lone `--section.field` sets a true-or-false field to true; a list may be several arguments.
    """
    known = {s.key: s for s in settings(config)}
    changes: dict[str, Any] = {}
    left = list(arguments)
    while left:
        argument = left.pop(0)
        if not argument.startswith("--"):
            raise UserError(
                f"unexpected argument {argument!r}; settings are written --section.field VALUE"
            )
        key, equals, text = argument[2:].partition("=")
        key = key.replace("-", "_")
        if key not in known:
            raise _unknown(key, known)
        kind = known[key].kind
        words = [text] if equals else _take_words(kind, left)
        if not words:
            raise UserError(f"{key} has no value; it must be {kind_name(kind)}")
        try:
            changes[key] = parse(kind, " ".join(words))
        except (ValueError, OverflowError):
            raise _misfit(key, kind, " ".join(words)) from None
    return _replace(config, changes)


def _take_words(kind: Any, left: list[str]) -> list[str]:
    """Takes from `left` the arguments that belong to a setting of type `kind`."""
    if kind is bool and (not left or left[0].lower() not in ("true", "false")):
        # Another word is a value of the wrong type, unless the next setting begins there.
        return [left.pop(0)] if left and not left[0].startswith("--") else ["true"]
    words: list[str] = []
    many = get_origin(kind) is tuple
    while left and not left[0].startswith("--") and (many or not words):
        words.append(left.pop(0))
    return words


# --- what must hold ----------------------------------------------------------------------------


def validate(config: Config) -> Config:
    """`config` itself, if a run of it makes sense; else one sentence: settings, values, a mend."""
    _check_ranges(config)
    _check_model(config.model)
    _check_training(config)
    _check_mesh(config)
    return config


_AT_LEAST = {
    "model": {
        1: "width layers heads latents window conv_size ff",
        0: "vocab_size kv_heads max_length",
    },
    "data": {1: "tokenizer_vocab", 0: "skip_bad"},
    "optim": {1: "max_skips", 0: "warmup weight_decay clip z_loss spike"},
    "train": {
        1: "steps batch_size sequence_length accumulate log_every eval_every eval_tokens "
        "checkpoint_every keep patience",
        0: "seed sample_tokens keep_every replay_every",
    },
    "mesh": {1: "fsdp context tensor", 0: "data"},
}
_ABOVE_ZERO = ("model.rope_theta", "optim.lr", "optim.epsilon")
_SHARES = {
    "model.dropout": "at least 0 and below 1",
    "optim.beta1": "at least 0 and below 1",
    "optim.beta2": "at least 0 and below 1",
    "data.heldout": "above 0 and below 1",
    "optim.decay": "above 0 and at most 1",
    "optim.final": "at least 0 and at most 1",
}


def _check_ranges(config: Config) -> None:
    value = {s.key: s.value for s in settings(config)}
    least = {
        f"{section}.{name}": bound
        for section, bounds in _AT_LEAST.items()
        for bound, names in bounds.items()
        for name in names.split()
    }
    for key, bound in least.items():
        if value[key] < bound:
            raise UserError(f"{key} is {value[key]}, but it must be at least {bound}")
    for key in _ABOVE_ZERO:
        if value[key] <= 0:
            raise UserError(f"{key} is {value[key]}, but it must be above 0")
    for key, words in _SHARES.items():
        low = value[key] >= 0 if words.startswith("at least") else value[key] > 0
        high = value[key] <= 1 if words.endswith("most 1") else value[key] < 1
        if not (low and high):
            raise UserError(f"{key} is {value[key]}, but it must be {words}")


def _check_model(model: ModelConfig) -> None:
    width, heads = model.width, model.heads
    if width % heads:
        counts = _near(heads, [n for n in range(1, width + 1) if width % n == 0])
        step = 2 * heads if _rotates(model) else heads
        widths = _near(width, [width // step * step, (width // step + 1) * step])
        raise UserError(
            f"model.heads ({heads}) does not divide model.width ({width}); "
            f"take model.heads {counts} or model.width {widths}"
        )
    if not model.pattern:
        raise UserError("model.pattern is empty; name at least one mixer, such as latte_r_swa")
    if model.layers % len(model.pattern):
        size = len(model.pattern)
        below = model.layers // size * size
        layers = _near(model.layers, [below, below + size])
        raise UserError(
            f"model.layers ({model.layers}) is no multiple of the {size} mixers of model.pattern; "
            f"take model.layers {layers}"
        )
    if model.kv_heads and heads % model.kv_heads:
        counts = _near(model.kv_heads, [n for n in range(1, heads + 1) if heads % n == 0])
        raise UserError(
            f"model.kv_heads ({model.kv_heads}) does not divide model.heads ({heads}); "
            f"take model.kv_heads {counts}"
        )
    if (width // heads) % 2 and _rotates(model):
        even = _near(heads, [n for n in range(1, width + 1) if width % (2 * n) == 0])
        mend = f"model.heads {even}" if even else f"model.width {2 * width}"
        raise UserError(
            f"model.position {model.position} turns pairs of features, but a head has "
            f"{width // heads} (model.width {width} / model.heads {heads}); take {mend}"
        )
    if model.latents % 2 and "r_swa" in model.pattern and model.position in ("rope", "vapor"):
        raise UserError(
            f"model.position {model.position} turns pairs of features, but r_swa's queries and "
            f"keys have model.latents ({model.latents}); take model.latents {model.latents + 1}"
        )


def _rotates(model: ModelConfig) -> bool:
    softmax = any(m == "attention" or m.endswith("swa") for m in model.pattern)
    return model.position == "vapor" or (model.position == "rope" and softmax)


def _check_training(config: Config) -> None:
    model, data, optim, train = config.model, config.data, config.optim, config.train
    if not model.causal:
        raise UserError(
            "model.causal is false, which makes an encoder: it would see the tokens that it is "
            "trained to predict; take model.causal true"
        )
    if train.batch_size % train.accumulate:
        counts = [n for n in range(1, train.batch_size + 1) if train.batch_size % n == 0]
        raise UserError(
            f"train.accumulate ({train.accumulate}) does not divide train.batch_size "
            f"({train.batch_size}); take train.accumulate {_near(train.accumulate, counts)}"
        )
    if optim.warmup > train.steps:
        raise UserError(
            f"optim.warmup ({optim.warmup}) is longer than train.steps ({train.steps}); "
            f"take optim.warmup {max(1, train.steps // 10)}"
        )
    decay = round(optim.decay * train.steps)
    if optim.schedule == "wsd" and optim.warmup + decay > train.steps:
        raise UserError(
            f"optim.warmup ({optim.warmup} steps) and the fall by optim.decay ({optim.decay}, "
            f"{decay} steps) are longer than train.steps ({train.steps}); make one of them smaller"
        )
    if 0 < optim.spike <= 1:
        raise UserError(f"optim.spike is {optim.spike}, but it must be above 1, or 0 for none")
    if model.position == "learned" and 0 < model.max_length < train.sequence_length:
        raise UserError(
            f"model.max_length ({model.max_length}) is shorter than train.sequence_length "
            f"({train.sequence_length}); take model.max_length {train.sequence_length} or 0"
        )
    _check_data(data)


def _check_data(data: DataConfig) -> None:
    name = data.tokenizer
    there = name in ("sentencepiece", "bytes") or Path(name).exists()
    if not there and "/" not in name:
        raise UserError(
            f"data.tokenizer is {name!r}, but it must be sentencepiece, bytes, the path of a "
            "sentencepiece .model file or tokenizer.json, or ORGANISATION/NAME on the Hugging Face "
            "hub" + nearest(name, ("sentencepiece", "bytes"))
        )
    try:
        parse_mixture(data.mixture)
    except ValueError as error:
        raise UserError(f"data.mixture is {data.mixture!r}, but {error}") from None


def _check_mesh(config: Config) -> None:
    model, train, mesh = config.model, config.train, config.mesh
    kv_heads = model.kv_heads or model.heads
    for name, count in (("heads", model.heads), ("kv_heads", kv_heads), ("ff", model.ff)):
        if count % mesh.tensor:
            shares = [n for n in range(1, count + 1) if count % n == 0]
            raise UserError(
                f"mesh.tensor ({mesh.tensor}) does not divide model.{name} ({count}); "
                f"take mesh.tensor {_near(mesh.tensor, shares)}"
            )
    parts, length = mesh.context * mesh.tensor, train.sequence_length
    if length % parts:
        below = length // parts * parts
        raise UserError(
            f"mesh.context × mesh.tensor ({parts}) does not divide train.sequence_length "
            f"({length}); take train.sequence_length {_near(length, [below, below + parts])}"
        )
    part = length // mesh.context
    reach = max(_reach(name, model) for name in model.pattern)
    if mesh.context > 1 and part < reach:
        raise UserError(
            f"mesh.context ({mesh.context}) cuts rows into {part} tokens, fewer than the {reach} "
            f"that a layer reaches back; take mesh.context {length // reach} or less"
        )


def _reach(mixer: str, model: ModelConfig) -> int:
    """Tokens before a part of a row that a layer gets from its neighbour."""
    parts = mixer.split("_")
    reaches = {"swa": model.window - 1, "conv": model.conv_size - 1}
    return max(reaches.get(part, 0) for part in parts)


def _near(value: int, choices: Iterable[int]) -> str:
    """The nearest choice at or below `value` and the nearest above it, as text."""
    choices = [c for c in choices if c > 0]
    below, above = [c for c in choices if c <= value], [c for c in choices if c > value]
    return " or ".join(str(c) for c in [*below[-1:], *above[:1]])


# --- a run directory's copy --------------------------------------------------------------------


def to_json(config: Config) -> str:
    """The text of a run's config.json: every setting, none left to a default."""
    return json.dumps(dataclasses.asdict(config), indent=2) + "\n"


def from_json(text: str, source: str = "config.json") -> Config:
    """The config in the text of a config.json; `source` names the file in errors."""
    try:
        flat: dict[str, Any] = {}
        for name, value in json.loads(text).items():
            inner = value.items() if isinstance(value, dict) else ()
            flat |= {f"{name}.{key}": v for key, v in inner} or {name: value}
    except (ValueError, AttributeError):
        raise UserError(f"{source} holds no config; is it damaged?") from None
    blank = Config(name="")
    known = {s.key: s.kind for s in settings(blank)}
    for key in flat:
        if key not in known:
            raise UserError(f"{source}: {_unknown(key, known)}")
    for key, kind in known.items():
        if key not in flat:
            raise UserError(f"{source} has no {key}; another version of latte wrote it")
        if isinstance(flat[key], list):
            flat[key] = tuple(flat[key])
        if not fits(kind, flat[key]):
            raise _misfit(f"{source}: {key}", kind, flat[key])
    return _replace(blank, flat)


def difference(old: Config, new: Config) -> tuple[str, Any, Any] | None:
    """The first setting on which two configs would train differently, and both values; else None.

    Settings in `SAME_LOSSES` may differ, and a 0 that stands for a derived size equals that size.
    """
    for before, after in zip(settings(_derived(old)), settings(_derived(new)), strict=True):
        if before.key in SAME_LOSSES or before.value == after.value:
            continue
        if before.key == "model.vocab_size" and 0 in (before.value, after.value):
            continue  # the tokenizer decides, and the token store's manifest answers for that
        return before.key, before.value, after.value
    return None


def _derived(config: Config) -> Config:
    model = config.model
    return _replace(
        config,
        {
            "model.kv_heads": model.kv_heads or model.heads,
            "model.max_length": model.max_length or config.train.sequence_length,
        },
    )


def check_run_dir(run_dir: Path, config: Config) -> None:
    """Refuses a run directory that holds another config's run; a new or empty one is fine."""
    if run_dir.exists() and not run_dir.is_dir():
        raise UserError(f"{run_dir} is a file; choose another --run-dir")
    if not (run_dir / "config.json").exists():
        return
    differs = difference(read_run_config(run_dir), config)
    if differs:
        key, old, new = differs
        raise UserError(
            f"{run_dir} holds a run with {key} {show(old)}, and this one has {show(new)}; "
            f"set --{key} {show(old)} to go on with it, or choose another --run-dir"
        )


def read_run_config(run_dir: Path) -> Config:
    """The config of an existing run."""
    stored = run_dir / "config.json"
    try:
        return from_json(stored.read_text(encoding="utf-8"), str(stored))
    except FileNotFoundError:
        others = sorted(str(p.parent) for p in run_dir.parent.glob("*/config.json"))
        near = nearest(str(run_dir), others)
        raise UserError(f"{run_dir} is no run directory: it has no config.json{near}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{stored} cannot be read: {error}") from None
