"""EleutherAI's lm-evaluation-harness on a model of JAX, over all devices of the mesh in force."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import torch
from jaxtyping import Array, Bool, Float, Int

# The `eval` extra is not among what tests of the rest need.
from lm_eval import simple_evaluate  # pyright: ignore[reportMissingImports]
from lm_eval.api.model import TemplateLM  # pyright: ignore[reportMissingImports]
from lm_eval.models.huggingface import HFLM  # pyright: ignore[reportMissingImports]
from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]
from lm_eval.utils import (  # pyright: ignore[reportMissingImports]
    get_rolling_token_windows,
    make_disjoint_window,
)
from tqdm import tqdm

from latte.config import MeshConfig
from latte.data.tokenizer import Tokenizer
from latte.errors import UserError
from latte.generate import Sampling, generate_ids
from latte.mesh import make_mesh, put_rows
from latte.model import LanguageModel
from latte.run import open_run

_SHORTEST = 32
_TABLE = 256
"""Tokens of a row whose logits are held at once."""


class _Scored(NamedTuple):
    """Of each row: log-probability of its targets in nats, and whether each was the likeliest."""

    logprob: Float[Array, " B"]
    greedy: Bool[Array, " B"]


@eqx.filter_jit
def _score(
    model: LanguageModel,
    tokens: Int[Array, "B T"],
    targets: Int[Array, "B T"],
    counted: Bool[Array, "B T"],
) -> _Scored:
    """Scores the targets that are counted; rows begin a document and are filled up on the right."""
    hidden, _ = model.backbone(tokens)
    parts = max(tokens.shape[1] // _TABLE, 1)

    def part(item: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        hidden, targets, counted = item
        logits = model.logits(hidden)
        logprobs = jax.nn.log_softmax(logits, axis=-1)
        chosen = jnp.take_along_axis(logprobs, targets[..., None], axis=-1)[..., 0]
        greedy = (jnp.argmax(logits, axis=-1) == targets) | ~counted
        return jnp.sum(jnp.where(counted, chosen, 0), axis=1), jnp.all(greedy, axis=1)

    items = (jnp.stack(jnp.split(x, parts, axis=1)) for x in (hidden, targets, counted))
    logprob, greedy = jax.lax.map(part, tuple(items))
    return _Scored(logprob.sum(axis=0), greedy.all(axis=0))


class LatteLM(TemplateLM):
    """A model as the harness asks for it.

    Every text begins with the tokenizer's separator, as documents do in training and as the
    exported tokenizer writes it, so that the harness's own class for transformers gives the same
    scores on the exported folder.

    Args:
        length: most tokens of a context with its continuation; longer ones lose their beginning.
        batch_size: rows of a batch; a multiple of the devices.
    """

    def __init__(
        self, model: LanguageModel, tokenizer: Tokenizer, *, length: int, batch_size: int
    ) -> None:
        super().__init__()
        self._model, self._tokenizer = model, tokenizer
        self.max_length, self.batch_size = length, batch_size

    @property
    def eot_token_id(self) -> int:
        return self._tokenizer.separator

    @property
    def tokenizer_name(self) -> str:
        return self._tokenizer.fingerprint

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """The tokens of a text, after a separator unless that is declined."""
        begin = [] if add_special_tokens is False else [self._tokenizer.separator]
        return [*begin, *self._tokenizer.encode(string).tolist()]

    def _loglikelihood_tokens(
        self, requests: list[Any], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Scores (texts, context's tokens, continuation's tokens), the longest first."""
        order = sorted(range(len(requests)), key=lambda i: -len(requests[i][1] + requests[i][2]))
        found: dict[int, tuple[float, bool]] = {}
        with tqdm(total=len(requests), disable=disable_tqdm, desc="loglikelihood") as bar:
            for start in range(0, len(order), self.batch_size):
                some = order[start : start + self.batch_size]
                pairs = [requests[i][1:] for i in some]
                found |= dict(zip(some, self._batch(pairs), strict=True))
                bar.update(len(some))
        return [found[i] for i in range(len(requests))]

    def _batch(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        rows = [(context + goal)[-(self.max_length + 1) :] for context, goal in pairs]
        length = max(_SHORTEST, 1 << (max(map(len, rows)) - 2).bit_length())
        shape = self.batch_size, length
        tokens, targets = np.zeros((2, *shape), np.int32)
        counted = np.zeros(shape, bool)
        for i, (row, (_, goal)) in enumerate(zip(rows, pairs, strict=True)):
            tokens[i, : len(row) - 1], targets[i, : len(row) - 1] = row[:-1], row[1:]
            counted[i, max(len(row) - 1 - len(goal), 0) : len(row) - 1] = True
        batch = put_rows((tokens, targets, counted), self.batch_size)
        scored = _score(self._model, *batch)
        return list(
            zip(
                np.asarray(scored.logprob)[: len(pairs)].tolist(),
                np.asarray(scored.greedy)[: len(pairs)].tolist(),
                strict=True,
            )
        )

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-probabilities of whole texts, each token once, in windows of `max_length` tokens."""
        windows, owners = [], []
        for owner, request in enumerate(requests):
            for window in get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0], add_special_tokens=False),
                prefix_token=self.eot_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            ):
                windows.append((None, *make_disjoint_window(window)))
                owners.append(owner)
        totals = np.zeros(len(requests))
        scores = self._loglikelihood_tokens(windows, disable_tqdm=disable_tqdm)
        for owner, (logprob, _) in zip(owners, scores, strict=True):
            totals[owner] += logprob
        return totals.tolist()

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Texts up to a stop string, the likeliest token at a time unless a request samples."""
        texts: dict[int, str] = {}
        groups: dict[str, list[int]] = {}
        for i, request in enumerate(requests):
            groups.setdefault(repr(request.args[1]), []).append(i)
        with tqdm(total=len(requests), disable=disable_tqdm, desc="generate_until") as bar:
            for group in groups.values():
                asked = _Asked.of(requests[group[0]].args[1])
                for start in range(0, len(group), self.batch_size):
                    some = group[start : start + self.batch_size]
                    contexts = [requests[i].args[0] for i in some]
                    texts |= dict(zip(some, self._write(contexts, asked), strict=True))
                    bar.update(len(some))
        return [texts[i] for i in range(len(requests))]

    def _write(self, contexts: list[str], asked: "_Asked") -> list[str]:
        most = self.max_length - asked.tokens
        if most < 1:
            raise UserError(
                f"a task asks for {asked.tokens} tokens, but the length is {self.max_length}; "
                f"take --max-length {asked.tokens + 1} or more"
            )
        prompts = [self.tok_encode(context)[-most:] for context in contexts]
        written = [b""] * len(prompts)
        for drawn in generate_ids(
            self._model,
            prompts,
            tokens=asked.tokens,
            sampling=asked.sampling,
            end=self.eot_token_id,
            vocab=self._tokenizer.vocab_size,
        ):
            for i, row in enumerate(drawn.tolist()):
                ids = [token for token in row if token != self.eot_token_id]
                written[i] += self._tokenizer.decode_bytes(ids)
            if all(asked.cut(text) is not None for text in written):
                break
        texts = [text.decode(errors="replace") for text in written]
        return [
            min((text.split(stop)[0] for stop in asked.stops), key=len, default=text)
            for text in texts
        ]


class _Asked(NamedTuple):
    """How a task wants its texts."""

    stops: list[str]
    tokens: int
    sampling: Sampling

    @classmethod
    def of(cls, settings: dict[str, Any]) -> "_Asked":
        until = settings.get("until") or []
        stops = [until] if isinstance(until, str) else list(until)
        tokens = settings.get("max_gen_toks", 256)
        sampled = settings.get("do_sample", settings.get("temperature", 0) > 0)
        temperature = settings.get("temperature", 1.0) if sampled else 0.0
        sampling = Sampling(temperature, settings.get("top_k", 0), settings.get("top_p", 1.0))
        return cls([stop for stop in stops if stop], tokens, sampling)

    def cut(self, written: bytes) -> int | None:
        """Where the first stop string begins; None for nowhere."""
        found = [at for stop in self.stops if (at := written.find(stop.encode())) >= 0]
        return min(found, default=None)


def run_tasks(
    run_dir: Path,
    tasks: Sequence[str],
    *,
    task_path: Path | None = None,
    limit: int | None = None,
    length: int = 0,
    batch_size: int = 8,
    beside: Path | None = None,
) -> dict[str, Any]:
    """Scores of a run's newest checkpoint on tasks of the harness.

    Args:
        task_path: a folder of task files of one's own.
        limit: items of each task; None for all.
        length: as of `LatteLM`; 0 takes the training length.
        beside: an exported folder, which the harness's own class for transformers scores too.

    Raises:
        UserError: there is no such run or task.
    """
    manager = TaskManager(include_path=None if task_path is None else str(task_path))
    unknown = [task for task in tasks if task not in manager.all_tasks]
    if unknown:
        raise UserError(
            f"the harness has no task {unknown[0]!r}; name a folder of your own with --task-path, "
            "or see `lm-eval ls tasks`"
        )
    evaluate = partial(
        simple_evaluate,
        tasks=list(tasks),
        task_manager=manager,
        limit=limit,
        log_samples=True,
        bootstrap_iters=0,
    )
    with jax.set_mesh(make_mesh(MeshConfig())):
        config, tokenizer, model, step = open_run(run_dir)
        length = length or config.model.max_length or config.train.sequence_length
        devices = len(jax.devices())
        batch_size = -(-batch_size // devices) * devices
        own = evaluate(LatteLM(model, tokenizer, length=length, batch_size=batch_size))
    found: dict[str, Any] = {"step": step, "tasks": _scores(own)}
    if beside is not None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        settings: dict[str, Any] = {"trust_remote_code": True, "dtype": "float32", "device": device}
        settings |= {"pretrained": str(beside), "batch_size": batch_size, "max_length": length}
        other = HFLM(**settings)
        theirs = evaluate(other)
        found |= {"exported": _scores(theirs), "items_that_differ": _differences(own, theirs)}
    return found


def _scores(results: Any) -> dict[str, dict[str, float]]:
    """Numbers of each task, without the harness's filters in their names."""
    return {
        task: {
            name.partition(",")[0]: value
            for name, value in scores.items()
            if isinstance(value, float) and "stderr" not in name
        }
        for task, scores in results["results"].items()
    }


def _differences(own: Any, theirs: Any) -> int:
    """Items on which a metric of the two differs by more than rounding."""
    count = 0
    for task, samples in own["samples"].items():
        for one, other in zip(samples, theirs["samples"][task], strict=True):
            count += any(not _same(one[name], other[name]) for name in one["metrics"])
    return count


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, str) or isinstance(other, str):
        return one == other
    return bool(np.allclose(np.asarray(one, float), np.asarray(other, float), rtol=1e-3, atol=1e-3))
