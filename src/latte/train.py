"""The training loop. A step is a pure function: (state, batch) → (state, report).

The host never waits for the step that runs: it reads a step's report a few steps later. Before a
checkpoint it reads all reports, so that metrics.jsonl is complete up to every checkpoint and a run
that goes on from one writes the same lines again, to the bit.
"""

import contextlib
import shutil
import signal
import time
from collections import deque
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from latte import optim, processes
from latte.checkpoint import Checkpoints, Keep, fingerprints
from latte.config import Config
from latte.cost import count_parameters, shapes, training_flops_per_token
from latte.data.batch import Batch
from latte.data.loader import Loader
from latte.data.prepare import prepare
from latte.data.store import TokenStore
from latte.errors import RunFailedError, UserError
from latte.memory import keep_freed_pages
from latte.mesh import check_rows, make_mesh, put_flag, put_rows, rows_here, shardings
from latte.metrics import Metrics, NoMetrics, heldout_losses
from latte.mirror import remote, send, shown
from latte.model import LanguageModel
from latte.monitor import Monitor
from latte.replay import replay
from latte.report import report_heldout
from latte.run import (
    check_store,
    checkpoints_of,
    keep_compiled,
    place_like,
    resolve,
    start_run,
)
from latte.speed import Speed

_LATE = 2
"""Steps that are under way while the host reads an earlier one's report."""


class TrainState(NamedTuple):
    """Everything that a step changes."""

    model: LanguageModel
    optim: optim.OptimState
    step: Int[Array, ""]


class StepReport(NamedTuple):
    """What a step says of itself; read late.

    loss: nats a target. skipped: bad steps in a row, this one included; 0 where it was applied.
    """

    loss: Float[Array, ""]
    grad_norm: Float[Array, ""]
    learning_rate: Float[Array, ""]
    skipped: Int[Array, ""]


def initial_state(config: Config) -> TrainState:
    """The state before the first step: a function of the seed."""
    model = LanguageModel(config.model, key=jax.random.key(config.train.seed))
    return TrainState(model, optim.init(config.optim, model), jnp.zeros((), jnp.int32))


def loss_and_gradients(
    config: Config, model: LanguageModel, batch: Batch, step: Int[Array, ""]
) -> tuple[Float[Array, ""], LanguageModel]:
    """Mean loss of a batch (nats a target), and gradients of it with the z-loss.

    Microbatches add up sums over targets, so that however a batch is split its mean is the same.
    """
    train = config.train
    key = jax.random.fold_in(jax.random.key(train.seed), step)

    def total(model: LanguageModel, batch: Batch, key: Array) -> tuple[Array, Array]:
        arrays = map(jnp.asarray, batch)
        dropout = key if config.model.dropout else None
        sums = model.loss(*arrays, z_loss=config.optim.z_loss, key=dropout)
        return sums.loss, sums.nll

    def one(sums: tuple[Array, LanguageModel], item: tuple) -> tuple[tuple, None]:
        (_, nll), grads = jax.value_and_grad(total, has_aux=True)(model, *item)
        return jax.tree.map(jnp.add, sums, (nll, grads)), None

    keys = jax.random.split(key, train.accumulate)
    if train.accumulate == 1:
        (_, nll), grads = jax.value_and_grad(total, has_aux=True)(model, batch, keys[0])
    else:
        # Every microbatch takes rows from all over the batch, so that devices share each evenly.
        micro = jax.tree.map(
            lambda x: x.reshape(-1, train.accumulate, *x.shape[1:]).swapaxes(0, 1), batch
        )
        zero = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, model))
        (nll, grads), _ = jax.lax.scan(one, zero, (micro, keys))
    targets = jnp.maximum(jnp.sum(batch.weights), 1)
    return nll / targets, jax.tree.map(lambda grad: grad / targets, grads)


def train_step(config: Config, state: TrainState, batch: Batch) -> tuple[TrainState, StepReport]:
    """One step, or none where it would be a bad one."""
    loss, grads = loss_and_gradients(config, state.model, batch, state.step)
    rate = optim.learning_rate(config.optim, config.train.steps, state.step)
    update = optim.update(config.optim, state.model, grads, state.optim, rate=rate, loss=loss)
    report = StepReport(loss, update.grad_norm, rate, update.state.skipped)
    return TrainState(update.model, update.state, state.step + 1), report


class _Stop:
    """Notes that the process was asked to end (SIGTERM: a pod that is taken back)."""

    def __init__(self) -> None:
        self.asked = False

    def _ask(self, *_: Any) -> None:
        self.asked = True

    def __enter__(self) -> "_Stop":
        self._before = signal.signal(signal.SIGTERM, self._ask)
        return self

    def __exit__(self, *_: Any) -> None:
        signal.signal(signal.SIGTERM, self._before)


def train(config: Config, run_dir: Path) -> None:
    """Trains a run to its last step, from where its newest whole checkpoint left it.

    Every process of the run calls this, with the same config and a directory that all can reach.

    Raises:
        UserError: bad input, before anything is compiled.
        RunFailedError: too many bad steps in a row, or a disk that filled up.
    """
    processes.start(config.train.patience)
    keep_freed_pages()
    with Monitor(run_dir, config.train.patience) as monitor:
        processes.check_same(config)
        _train(config, run_dir, monitor)


def _train(config: Config, run_dir: Path, monitor: Monitor) -> None:
    store = prepare(config.data)
    config = resolve(config, store.tokenizer)
    mesh = make_mesh(config.mesh)
    with jax.set_mesh(mesh):
        loader = _loader(config, store)
    check_rows(mesh, config.train.batch_size // config.train.accumulate)
    processes.first_alone(partial(_begin, config, run_dir, store))
    keep_compiled(config)
    keep = Keep(config.train.keep, config.train.keep_every)
    checkpoints = checkpoints_of(run_dir, keep)
    with jax.set_mesh(mesh), contextlib.closing(checkpoints):
        state = _restore(config, checkpoints)
        done = int(state.step)
        if config.train.keep_best:
            for at, loss in heldout_losses(run_dir / "metrics.jsonl", done):
                keep.note(at, loss)
        with metrics_of(run_dir, config, done) as metrics, _Stop() as stop:
            loop = _Loop(config, run_dir, store, checkpoints, keep, metrics, monitor, state)
            loop.run(loader.iterate(done), stop)
        if processes.is_first():
            send(run_dir)


def metrics_of(run_dir: Path, config: Config, done: int) -> Metrics | NoMetrics:
    """What the first process keeps and shows; the others say nothing."""
    return Metrics(run_dir, config, done) if processes.is_first() else NoMetrics()


def _begin(config: Config, run_dir: Path, store: TokenStore) -> None:
    check_store(run_dir, store)
    _check_room(config, run_dir)
    start_run(config, run_dir, store)


def _check_room(config: Config, run_dir: Path) -> None:
    """Refuses a run whose checkpoints the disk has no room for."""
    if remote(run_dir):
        return
    parameters = count_parameters(shapes(config.model))
    # Model and two moments in float32; a new one is whole before the oldest goes.
    needed = 3 * 4 * parameters * (config.train.keep + 1)
    existing = next(p for p in (run_dir, *run_dir.absolute().parents) if p.exists())
    taken = sum(p.stat().st_size for p in run_dir.glob("checkpoints/**/*") if p.is_file())
    free = shutil.disk_usage(existing).free + taken
    if free < needed:
        raise UserError(
            f"the disk of {run_dir} has {free / 1e6:.0f} MB free, but {config.train.keep + 1} "
            f"checkpoints of {parameters:,} parameters take {needed / 1e6:.0f} MB; make room, "
            "choose another --run-dir or lower --train.keep"
        )


def _loader(config: Config, store: TokenStore) -> Loader:
    """The rows of each batch that this process's devices take."""
    train = config.train
    rows = rows_here(train.batch_size)
    size = train.batch_size, train.sequence_length
    return Loader(store, "train", train.seed, *size, rows, config.data)


def _restore(config: Config, checkpoints: Checkpoints) -> TrainState:
    """The newest checkpoint's state, or the initial one."""
    target = eqx.filter_eval_shape(initial_state, config)
    restored = checkpoints.restore(place_like(target._asdict()))
    if restored is not None:
        return TrainState(**restored[0])
    return jax.jit(partial(initial_state, config), out_shardings=shardings(target))()


class _Late(NamedTuple):
    """A step whose report has not been read yet, and whether any process was asked to stop in it.

    All processes read it after the same step, so that they stop after the same one.
    """

    step: int
    report: StepReport
    batch: UInt32[Array, ""]
    stop: Bool[Array, ""]


def _heard_step(
    config: Config, state: TrainState, batch: Batch, asked: Bool[Array, " devices"]
) -> tuple[TrainState, tuple[StepReport, UInt32[Array, ""], Bool[Array, ""]]]:
    """A step that also says which batch it saw, and whether any process was asked to stop."""
    state, report = train_step(config, state, batch)
    sums = jnp.stack(fingerprints(list(batch)))
    odd = 2 * jnp.arange(len(batch), dtype=jnp.uint32) + 1
    return state, (report, jnp.sum(sums * odd, dtype=jnp.uint32), jnp.any(asked))


class _Loop:
    """The steps of one process's part of a run, and what happens between them."""

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        store: TokenStore,
        checkpoints: Checkpoints,
        keep: Keep,
        metrics: Metrics | NoMetrics,
        monitor: Monitor,
        state: TrainState,
    ):
        self.config, self.run_dir, self.store = config, run_dir, store
        self.checkpoints, self.metrics, self.state = checkpoints, metrics, state
        self.keep, self.monitor = keep, monitor
        self.late: deque[_Late] = deque()
        self.skipped, self.stopping = 0, False
        self.waited: dict[str, float] = {}
        device = jax.devices()[0].device_kind
        self.speed = Speed(
            config.train.batch_size * config.train.sequence_length,
            training_flops_per_token(config.model, config.train.sequence_length),
            device,
            len(jax.devices()),
        )

    def run(self, batches: Iterator[Batch], stop: _Stop) -> None:
        train = self.config.train
        done = int(self.state.step)
        evaluated = processes.first_says("heldout_loss" in self.metrics.last)
        if self._shows(done) and not evaluated:
            self._evaluate(done)  # what a kill came before
        if done == train.steps:
            self.metrics.say(f"all {done} steps of {shown(self.run_dir)} are done")
        here = rows_here(train.batch_size)
        step_function = jax.jit(
            partial(_heard_step, self.config),
            donate_argnums=0,
            out_shardings=(shardings(self.state), None),
        )
        run_step = replay(processes.compile_together(step_function), train.replay_every)
        for step in range(done + 1, train.steps + 1):
            batch = put_rows(next(batches), train.batch_size, here)
            self.state, heard = run_step(step, self.state, batch, put_flag(stop.asked))
            self.late.append(_Late(step, *heard))
            self._read_reports(_LATE)
            self.monitor.step(step)
            last = step == train.steps or self.stopping
            if step % train.checkpoint_every == 0 or last:
                self._save(step, even_if_skipped=last)
            if self.stopping:
                self.checkpoints.wait()
                self.metrics.say(
                    f"asked to stop: saved step {step}; the same command goes on from there"
                )
                return
            if self._shows(step):
                self._evaluate(step)

    def _shows(self, step: int) -> bool:
        """Whether the run is evaluated after `step`."""
        train = self.config.train
        return step > 0 and (step % train.eval_every == 0 or step == train.steps)

    def _read_reports(self, keep: int) -> None:
        while len(self.late) > keep:
            step, report, batch, stop = self.late.popleft()
            loss, grad_norm, rate, skipped = jax.device_get(report)
            self.stopping |= bool(stop)
            self.metrics.log_step(
                step,
                {
                    "loss": float(loss),
                    "grad_norm": float(grad_norm),
                    "learning_rate": float(rate),
                    "skipped": int(skipped),
                    "batch": f"{int(batch):08x}",
                    **self.speed.update(step),
                    **self.waited,
                },
            )
            self.waited = {}
            self.skipped = int(skipped)
            if skipped:
                self._note_skip(step, float(loss), float(grad_norm), int(skipped))

    def _note_skip(self, step: int, loss: float, grad_norm: float, skipped: int) -> None:
        self.metrics.say(f"step {step} skipped: loss {loss:.4g}, gradient norm {grad_norm:.4g}")
        if skipped < self.config.optim.max_skips:
            return
        self.checkpoints.wait()
        # Of the model that the last applied step left, no later step has shown that it is sound.
        left = [s for s in self.checkpoints.steps() if s < step - skipped]
        good = f"the last good checkpoint is {left[-1]}" if left else "there is no good checkpoint"
        raise RunFailedError(
            f"{skipped} steps in a row were skipped, up to step {step}: {good} in "
            f"{self.checkpoints.folder}; look at the data of these steps, or train in another "
            "--run-dir with a lower --optim.lr"
        )

    def _save(self, step: int, even_if_skipped: bool) -> None:
        """Saves, but not in a run of bad steps: their model would take the place of good ones.

        The next step reports how many seconds it had to wait for that.
        """
        self.monitor.rest()
        self._read_reports(0)
        if self.skipped and not even_if_skipped:
            return
        start = time.perf_counter()
        self.metrics.sync()
        if processes.is_first():
            send(self.run_dir)
        self.checkpoints.save(step, self.state._asdict())
        self.waited = {"checkpoint_wait": time.perf_counter() - start}
        if step == self.config.train.steps:
            self.checkpoints.wait()
        self.speed.restart()

    def _evaluate(self, step: int) -> None:
        self.monitor.rest()
        self._read_reports(0)
        self.metrics.sync()
        arguments = self.config, self.run_dir, self.store, self.metrics, self.state.model, step
        loss = report_heldout(*arguments)
        if self.config.train.keep_best:
            self.keep.note(step, loss)
        self.speed.restart()
