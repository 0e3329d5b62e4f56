"""`fit`: the training loop, from a config and an experiment to a finished run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from purestep.functional.data import BatchOrder, loader
from purestep.functional.steps import train_step
from purestep.sharding.config import ConfigError
from purestep.sharding.initialization import abstract_state, init
from purestep.sharding.pure_module import PureModule, shard
from purestep.sharding.runtime import Runtime, start
from purestep.state.checkpoints import Checkpoints
from purestep.state.collective import from_rank_zero
from purestep.state.digests import check_replicas
from purestep.state.integrity import describe
from purestep.state.keys import key
from purestep.state.manifest import CheckpointError
from purestep.state.train_state import TrainState
from purestep.training.config import Experiment, TrainConfig, check_trackers
from purestep.training.evaluation import evaluator, to_device
from purestep.training.metrics import StepClock, eval_record, step_record, to_floats
from purestep.training.plot import plot_losses
from purestep.training.reporting import Reporter, say
from purestep.training.resuming import check_order
from purestep.training.run_directory import RunDirectory, read_metrics

T = TypeVar("T")


class RunError(RuntimeError):
    """A run that cannot go on, for the reason that the message gives."""


@dataclass(frozen=True)
class Run:
    """A finished run."""

    config: TrainConfig
    runtime: Runtime
    module: PureModule
    state: TrainState
    metrics: Mapping[str, Any]
    """The last values of everything in metrics.jsonl, on every rank; those of evaluations are named `eval/...`."""


def fit(config: TrainConfig, experiment: Experiment, runtime: Runtime | None = None) -> Run:
    """Train to step `config.steps`, from the start or from the newest valid checkpoint, and leave a run directory.

    Interrupted anywhere and resumed on the same topology, a run is bit for bit the one that was never interrupted.

    Args:
        config: what to do.
        experiment: what to do it to.
        runtime: from `ps.start(config.parallelism, config.accelerator)`; default: started here, and closed at the end
            (what then needs every rank, such as a sharded state's digest, belongs into the experiment's `on_end`).

    Raises:
        ConfigError: the config does not fit the experiment, the processes or the run to resume; nothing is written.
        CheckpointError: every checkpoint of the run to resume is damaged, or a checkpoint cannot be written.
        RunError: ranks that should hold the same values do not.
    """
    check_trackers(config)
    if runtime is None:
        log_with: list[str] | None = list(config.log_with) or None
        with start(config.parallelism, config.accelerator, log_with=log_with, project_dir=config.output_dir) as runtime:
            return fit(config, experiment, runtime)

    check_fit(config, experiment, runtime)
    module = shard(experiment.model, experiment.spec, runtime)
    order = BatchOrder(len(experiment.data), config.batch_size, key(config.seed).fold_in("order"))
    directory = RunDirectory(config.output_dir)
    checkpoints = Checkpoints(directory.checkpoints_path, format=config.checkpoint_format)
    if config.resume:
        state = _resume(config, experiment, module, order, directory, checkpoints)
    else:
        state = _begin(config, experiment, module, directory)
    if state.step >= config.steps:
        say(runtime, f"nothing to do: {directory.path} is at step {state.step} and --steps is {config.steps}")
        return Run(config, runtime, module, state, _on_rank_zero(lambda: _last_values(directory)))

    with Reporter(config, directory, runtime, start=state.step) as reporter:
        state = _train(config, experiment, module, state, order, reporter, checkpoints)
    _plot(directory, runtime)
    run = Run(config, runtime, module, state, reporter.last)
    if experiment.on_end is not None:
        experiment.on_end(run)
    return run


def _train(
    config: TrainConfig,
    experiment: Experiment,
    module: PureModule,
    state: TrainState,
    order: BatchOrder,
    reporter: Reporter,
    checkpoints: Checkpoints,
) -> TrainState:
    """The steps from `state` to the last one, with what is due after each: record, evaluation, checkpoint."""
    runtime = module.runtime
    accumulate = config.accelerator.gradient_accumulation.steps
    step = train_step(module, experiment.loss, experiment.optimizer, accumulate=accumulate, donate=True)
    evaluate = _evaluator(config, experiment, module)
    clock = StepClock()
    for batch in _batches(config, experiment, runtime, order, start=state.step):
        clock.data_ready()
        state, values = step(state, to_device(batch, runtime.device))
        measure = evaluate is not None and _is_due(state.step, config.eval_every, config.steps)
        log = measure or _is_due(state.step, config.log_every, config.steps)
        if log:
            values = to_floats(values)
        clock.step_done(values["weight"])
        reporter.step_done()
        if log:
            record = step_record(state.step, config.batch_size, values, clock.take(runtime))
            reporter.write({**record, **eval_record(evaluate(state))} if measure else record)
        if _is_due(state.step, config.checkpoint.every, config.steps):
            reporter.sync()
            _save(checkpoints, state, order)
        clock.skip()
    return state


def _batches(
    config: TrainConfig, experiment: Experiment, runtime: Runtime, order: BatchOrder, *, start: int
) -> Iterable[Any]:
    return loader(
        experiment.data,
        order,
        start=start,
        stop=config.steps,
        rank=runtime.dp_rank,
        num_ranks=runtime.dp_size,
        num_workers=config.data.num_workers,
        collate_fn=experiment.collate_fn,
        pin_memory=runtime.device.type == "cuda",
    )


def check_fit(config: TrainConfig, experiment: Experiment, runtime: Runtime) -> None:
    """Raise `ConfigError` unless the config fits the data, the processes and the runtime."""
    accumulate = config.accelerator.gradient_accumulation.steps
    if config.batch_size % (runtime.dp_size * accumulate):
        raise ConfigError(
            f"--batch-size {config.batch_size} cannot be divided evenly over {runtime.dp_size} data-parallel "
            f"process{'es' * (runtime.dp_size != 1)} (--parallelism.dp-replicate x --parallelism.dp-shard) times "
            f"{accumulate} microbatches (--accelerator.gradient-accumulation.steps); use a multiple of "
            f"{runtime.dp_size * accumulate}"
        )
    for name in ("data", "eval"):
        dataset = getattr(experiment, name)
        if dataset is not None and len(dataset) == 0:
            raise ConfigError(f"Experiment.{name} is empty: check --data.path")
    topology = config.parallelism.resolve(runtime.world_size)
    if topology != runtime.topology or config.accelerator != runtime.config:
        raise ConfigError(
            f"the runtime ({runtime.topology}) was not started from this config ({topology}); start it with "
            "ps.start(config.parallelism, config.accelerator)"
        )
    active = [] if runtime.accelerator is None else [str(tracker) for tracker in runtime.accelerator.log_with]
    if missing := [tracker for tracker in config.log_with if tracker not in active]:
        raise ConfigError(
            f"--log-with {' '.join(missing)}: the runtime was started without it; pass log_with=list(config.log_with) "
            "to ps.start"
        )


def _begin(config: TrainConfig, experiment: Experiment, module: PureModule, directory: RunDirectory) -> TrainState:
    """The first state, and the run's directory, made last: a start that fails leaves nothing."""
    _on_rank_zero(directory.refuse_existing)
    state = init(module, experiment.optimizer, key(config.seed))
    _on_rank_zero(lambda: directory.create(config))
    return state


def _resume(
    config: TrainConfig,
    experiment: Experiment,
    module: PureModule,
    order: BatchOrder,
    directory: RunDirectory,
    checkpoints: Checkpoints,
) -> TrainState:
    """The newest valid state, and the run's directory brought back to it, last: a resume that fails changes nothing."""
    runtime = module.runtime
    _on_rank_zero(directory.refuse_missing)
    unfinished = _on_rank_zero(lambda: _unfinished(directory))
    for name in unfinished:
        say(runtime, f"skipping {name}: it has no SHA256SUMS, so it is not a whole checkpoint")
    if checkpoints.steps():
        state = checkpoints.restore_latest(abstract_state(module, experiment.optimizer), device=runtime.device)
        path = checkpoints.path(state.step)
        check_order(from_rank_zero(lambda: describe(path).metadata["batch_order"]), order.describe())
        say(runtime, f"resuming from {path}")
    elif unfinished:
        raise CheckpointError(
            f"no whole checkpoint in {directory.checkpoints_path}: {unfinished[-1]} has no SHA256SUMS; put it back, or "
            "remove that directory to start again from step 0"
        )
    else:
        state = init(module, experiment.optimizer, key(config.seed))
        say(runtime, f"{directory.path} has no checkpoint yet: starting from step 0")
    if state.step < config.steps:
        topology = str(runtime.topology)
        changed = _on_rank_zero(lambda: directory.continue_from(state.step, config, topology=topology))
        for name, (old, new) in changed.items():
            say(runtime, f"  {name}: {old} -> {new}")
    return state


def _on_rank_zero(function: Callable[[], T]) -> T:
    """`from_rank_zero`, with what the file system refuses told as a failure of the whole run."""
    try:
        return from_rank_zero(function)
    except OSError as error:
        raise RunError(str(error)) from error


def _unfinished(directory: RunDirectory) -> list[str]:
    """Checkpoints without the file that is written last. A kill leaves none: something was removed."""
    paths = sorted(directory.checkpoints_path.glob("step-*"))
    return [str(path) for path in paths if path.is_dir() and not (path / "SHA256SUMS").exists()]


def _evaluator(config: TrainConfig, experiment: Experiment, module: PureModule) -> Any:
    if experiment.eval is None:
        return None
    return evaluator(
        module,
        experiment.loss,
        experiment.eval,
        # As many samples at a time as a microbatch of training has: what fits there fits here.
        batch_size=config.batch_size // config.accelerator.gradient_accumulation.steps,
        num_workers=config.data.num_workers,
        collate_fn=experiment.collate_fn,
    )


def _save(checkpoints: Checkpoints, state: TrainState, order: BatchOrder) -> None:
    try:
        check_replicas(state)
    except RuntimeError as error:
        raise RunError(f"step {state.step}: {error}; no checkpoint was written") from error
    checkpoints.save(state, metadata={"batch_order": order.describe()})


def _is_due(step: int, every: int, last: int) -> bool:
    return step == last or (every > 0 and step % every == 0)


def _last_values(directory: RunDirectory) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for record in read_metrics(directory.metrics_path):
        values.update(record)
    return values


def _plot(directory: RunDirectory, runtime: Runtime) -> None:
    if not runtime.is_main:
        return
    try:
        plot_losses(directory.metrics_path, directory.plot_path, title=directory.path.resolve().name)
    except ImportError:
        say(runtime, 'no loss.png: matplotlib is not installed (pip install "purestep[plot]")')
