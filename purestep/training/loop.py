"""`fit`: the training loop, from a config and an experiment to a finished run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from purestep.functional.data import BatchOrder, loader
from purestep.functional.implementations import implementation_change, implementations
from purestep.functional.steps import train_step
from purestep.sharding.config import ConfigError
from purestep.sharding.initialization import abstract_state, init
from purestep.sharding.pure_module import PureModule, shard
from purestep.sharding.rules import ShardingSpec
from purestep.sharding.runtime import Runtime, start
from purestep.state.checkpoint.checkpoints import Checkpoints
from purestep.state.collective import from_rank_zero
from purestep.state.files.integrity import describe
from purestep.state.files.manifest import CheckpointError
from purestep.state.keys import key
from purestep.state.train_state import TrainState
from purestep.training.config import Experiment, TrainConfig, check_trackers
from purestep.training.evaluation import evaluator, to_device
from purestep.training.metrics import StepClock, eval_record, step_record, to_floats
from purestep.training.plot import plot_losses
from purestep.training.reporting import Reporter, say
from purestep.training.resuming import check_order
from purestep.training.run_directory import RunDirectory, read_metrics
from purestep.training.stopping import SIGTERM_CODE, StopRequest

T = TypeVar("T")
_EVAL = "eval/"


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
        CheckpointError: every checkpoint of the run to resume is damaged; or a checkpoint cannot be written, because
            ranks that should hold the same values do not, say; or another process goes on with this run.
        RunError: the run's directory cannot be read or written.
        SystemExit: 143 after SIGTERM, which ends the run at the next step, once its state is saved.
    """
    check_trackers(config)
    if runtime is None:
        log_with: list[str] | None = list(config.log_with) or None
        with start(config.parallelism, config.accelerator, log_with=log_with, project_dir=config.output_dir) as runtime:
            return fit(config, experiment, runtime)

    check_fit(config, experiment, runtime)
    module = shard(experiment.model, _spec(config, experiment), runtime)
    order = BatchOrder(len(experiment.data), config.batch_size, key(config.seed).fold_in("order"))
    directory = RunDirectory(config.output_dir)
    with _checkpoints(config, directory, module) as checkpoints, StopRequest(runtime) as stop:
        if config.resume:
            state = _resume(config, experiment, module, order, directory, checkpoints)
        else:
            state = _begin(config, experiment, module, directory, checkpoints)
        if state.step >= config.steps:
            say(runtime, f"nothing to do: {directory.path} is at step {state.step} and --steps is {config.steps}")
            return Run(config, runtime, module, state, _on_rank_zero(lambda: _last_values(directory)))
        begun_at = state.step
        with Reporter(config, directory, runtime, start=begun_at) as reporter:
            state = _train(config, experiment, module, state, order, reporter, checkpoints, stop)
    if state.step < config.steps:
        if state.step > begun_at:
            say(runtime, f"saved {checkpoints.path(state.step)}")
        say(runtime, f"stopped by SIGTERM; continue with --resume --output-dir {directory.path}")
        raise SystemExit(SIGTERM_CODE)
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
    stop: StopRequest,
) -> TrainState:
    """The steps from `state` to the last one, with what is due after each: record, evaluation, checkpoint.

    After SIGTERM the state that is returned, and saved, is that of the step it came in. Before the first step nothing
    is new, and nothing is saved.
    """
    runtime = module.runtime
    accumulate = config.accelerator.gradient_accumulation.steps
    step = train_step(module, experiment.loss, experiment.optimizer, accumulate=accumulate, donate=True)
    evaluate = _evaluator(config, experiment, module)
    clock = StepClock()
    if stop.agreed():
        return state
    for batch in _batches(config, experiment, runtime, order, start=state.step):
        clock.data_ready()
        state, values = step(state, to_device(batch, runtime.device))
        measure = evaluate is not None and _is_due(state.step, config.eval_every, config.steps)
        log = measure or _is_due(state.step, config.log_every, config.steps)
        if log:
            values = to_floats(values)
        clock.step_done(values["weight"])
        reporter.step_done()
        record = step_record(state.step, config.batch_size, values, clock.take(runtime)) if log else {}
        measured = eval_record(evaluate(state)) if measure else {}
        _refuse_unknown(config.checkpoint.keep_best, values, measured)
        if log:
            reporter.write({**record, **measured})
        stopped = stop.agreed()
        if stopped or _is_due(state.step, config.checkpoint.every, config.steps):
            reporter.sync()
            metadata = {"batch_order": order.describe(), "implementations": _implementations(module, experiment, state)}
            _save(config, checkpoints, state, metadata, {**to_floats(values), **measured})
        if stopped:
            break
        clock.skip()
    checkpoints.wait()
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
    _check_best(config, experiment)
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


def _spec(config: TrainConfig, experiment: Experiment) -> ShardingSpec | None:
    """The config's spec, completed by the experiment's where it leaves something open."""
    if config.sharding is None or experiment.spec is None:
        return config.sharding or experiment.spec
    return config.sharding.over(experiment.spec)


def _checkpoints(config: TrainConfig, directory: RunDirectory, module: PureModule) -> Checkpoints:
    rules = config.checkpoint
    return Checkpoints(
        directory.checkpoints_path,
        format=config.checkpoint_format,
        keep_last=rules.keep_last,
        keep_every=rules.keep_every,
        keep_best=rules.keep_best,
        async_save=rules.async_save,
        ties=module.ties,
    )


def _refuse_unknown(best: tuple[str, str] | None, values: Mapping[str, Any], measured: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if what was measured after a step lacks the metric that the best checkpoint is chosen by."""
    if best is None:
        return
    names = measured if best[0].startswith(_EVAL) else values
    if names and best[0] not in names:
        raise ConfigError(
            f"--checkpoint.keep-best {' '.join(best)}: there is no metric of this name, but {', '.join(names)}; those "
            f"of evaluations begin with {_EVAL}"
        )


def _check_best(config: TrainConfig, experiment: Experiment) -> None:
    """Raise `ConfigError` if checkpoints would lack the metric that the best one is chosen by."""
    best, every = config.checkpoint.keep_best, config.checkpoint.every
    if best is None or not best[0].startswith(_EVAL):
        return
    flag = f"--checkpoint.keep-best {' '.join(best)}"
    if experiment.eval is None:
        raise ConfigError(f"{flag}: there is no evaluation to take it from (Experiment.eval is None)")
    if every and (not config.eval_every or every % config.eval_every):
        raise ConfigError(
            f"{flag}: a checkpoint is judged by the evaluation of its own step, so --checkpoint.every {every} must be "
            f"a multiple of --eval-every {config.eval_every}"
        )


def _begin(
    config: TrainConfig, experiment: Experiment, module: PureModule, directory: RunDirectory, checkpoints: Checkpoints
) -> TrainState:
    """The first state, and the run's directory, made last: a start that fails leaves nothing."""
    _on_rank_zero(directory.refuse_existing)
    state = init(module, experiment.optimizer, key(config.seed))
    _on_rank_zero(lambda: directory.create(config))
    checkpoints.lock()
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
    checkpoints.lock()  # before anything is read or changed: the run may still be going on
    unfinished = _on_rank_zero(lambda: _unfinished(directory))
    for name in unfinished:
        say(runtime, f"skipping {name}: it has no SHA256SUMS, so it is not a whole checkpoint")
    if checkpoints.steps():
        state = checkpoints.restore_latest(abstract_state(module, experiment.optimizer), device=runtime.device)
        path = checkpoints.path(state.step)
        saved = from_rank_zero(lambda: describe(path).metadata)
        check_order(saved["batch_order"], order.describe())
        say(runtime, f"resuming from {path}")
        other = implementation_change(saved.get("implementations"), _implementations(module, experiment, state))
        if other:
            say(runtime, f"warning: {other}")
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


def _implementations(module: PureModule, experiment: Experiment, state: TrainState) -> dict[str, str]:
    return implementations(experiment.optimizer, {name: state.params[name] for name in module.trainable})


def _save(
    config: TrainConfig,
    checkpoints: Checkpoints,
    state: TrainState,
    metadata: Mapping[str, Any],
    metrics: Mapping[str, float],
) -> None:
    best = config.checkpoint.keep_best
    # A state that was not evaluated (after SIGTERM there is no time for that) does not count for the best.
    measured = metrics if best is None or best[0] in metrics else None
    checkpoints.save(state, metrics=measured, metadata=metadata, check_replicas=True)


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
