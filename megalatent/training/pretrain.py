"""Training: Megatron's ``pretrain()`` with latent models and multi-pass steps.

Nothing here trains. Megatron's trainer, optimisers, checkpoints and logs run as they are; this
file builds the latent model, and replaces the few module attributes through which Megatron looks
up its schedule and its hooks (``_HOOKS``).
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from megalatent import platform
from megalatent.config import Config

__all__ = ["run"]


def run(config: Config, profiler: Any = None) -> None:
    """Train as configured, on this rank of a run that has been launched.

    Args:
        config: loaded and checked. ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``MASTER_ADDR`` and
            ``MASTER_PORT`` are in the environment.
        profiler: a ``RunProfiler``, which records some steps; or None, which costs nothing.

    Raises:
        UserError: the checkpoint does not fit the model.
    """
    platform.install()
    from megatron.core.enums import ModelType
    from megatron.training import training
    from megatron.training.argument_utils import (
        gpt_config_from_args,
        pretrain_cfg_container_from_args,
    )
    from megatron.training.arguments import parse_and_validate_args

    from megalatent.model.layers import layer_spec, unscale_branches
    from megalatent.training.data import dataset_provider
    from megalatent.training.exits import TrainingStopped, why_it_ends

    # Megatron parses the command line, in several places.
    sys.argv = [sys.argv[0], *config.megatron_argv()]
    open_writers = _put_off_writers()
    args = parse_and_validate_args()
    args.latent_config = config.resolved()["latent"]
    if config.latent.passes.recomputes:
        args.recompute_granularity = "full"
        args.recompute_method = "uniform"
        args.recompute_num_layers = 1
    session = Session(config, args, open_writers, profiler)
    model_config = gpt_config_from_args(args)
    unscale_branches(model_config.transformer, config.latent.model)
    model_config.transformer_layer_spec = functools.partial(layer_spec, model=config.latent.model)
    model_config.pre_wrap_hooks.append(session.wrap)
    container = pretrain_cfg_container_from_args(args, model_config)
    session.install_hooks()
    try:
        training.pretrain(
            container, dataset_provider, ModelType.encoder_or_decoder, forward_step_func=None
        )
    except BaseException as error:
        cause = why_it_ends(error)
        # All ranks decide together to stop: none is the cause for the others.
        session.ends(None if isinstance(cause, TrainingStopped) else cause)
        if cause is None or cause is error:
            raise
        raise cause from None
    session.ends(None)


def _put_off_writers() -> Callable[[Any], None]:
    """Keep Megatron from opening TensorBoard and W&B while it reads its arguments.

    Both make folders, and W&B a run on its server: a run that is refused because of its checkpoint
    leaves neither behind.

    Returns:
        A function that opens what Megatron would have.
    """
    from megatron.training import global_vars

    names = ("_set_tensorboard_writer", "_set_wandb_writer")
    originals = [getattr(global_vars, name) for name in names]
    for name in names:
        setattr(global_vars, name, lambda args: None)

    def open_writers(args: Any) -> None:
        for original in originals:
            original(args)

    return open_writers


class Session:
    """What the hooks of one run share.

    Args:
        config: the run's configuration.
        args: Megatron's arguments, validated.
        open_writers: opens TensorBoard and W&B, to be called once the checkpoint is loaded.
        profiler: as for ``run``.
    """

    def __init__(
        self,
        config: Config,
        args: Any,
        open_writers: Callable[[Any], None],
        profiler: Any = None,
    ) -> None:
        from megalatent.training.freeze import FusionFreeze
        from megalatent.training.fusion_norm import FusionGradientNorm
        from megalatent.training.metrics import RunState

        self.config = config
        self.args = args
        self._open_writers = open_writers
        self._profiler = profiler
        self.models: list[Any] = []
        self.iteration = 0  # steps done; 0 before the first of this process
        self.state = RunState()
        self.freeze = FusionFreeze(config.latent.fusion.warmup_iters)
        self.fusion_norm = FusionGradientNorm()
        self.flops: Any = None  # `StepFlops`, once Megatron is hooked
        self._step_flops: list[float] = []  # since Megatron's last line; one number a step
        self._in_log = False
        self._eval_iters = args.eval_iters  # which Megatron replaces with full validation
        self._schedule: Any = None
        self._scheduler: Any = None  # of the learning rate; None if the run does not train
        self._metrics: Any = None
        self._sets: Iterator[str] = iter(())  # names of those still to be evaluated

    # -- model ------------------------------------------------------------------------------

    def wrap(self, chunks: list[Any]) -> list[Any]:
        """Megatron's pre-wrap hook: backbones become latent models."""
        from megatron.training import get_tokenizer

        from megalatent.model.build import latent_model

        vocab_size = get_tokenizer().vocab_size
        self.models = [latent_model(c, self.config.latent, vocab_size) for c in chunks]
        return list(self.models)

    # -- hooks ------------------------------------------------------------------------------

    def install_hooks(self) -> None:
        """Put our functions where Megatron looks its own up."""
        from megatron.training import checkpointing, training
        from megatron.training.models import gpt

        from megalatent.checkpoint.fresh import FreshFusion
        from megalatent.model.layers import mtp_spec
        from megalatent.training import auxiliary_logs, optimizer
        from megalatent.training.optimizer_state import checking_state

        def around(module: Any, name: str, make: Callable[[Any], Any]) -> None:
            setattr(module, name, make(getattr(module, name)))

        optimizer.install(self.config.latent, self.args)
        auxiliary_logs.install(lambda: self.schedule().last_passes)
        around(training, "get_forward_backward_func", lambda _: self._forward_backward_func)
        around(
            gpt,
            "mtp_block_spec",
            lambda _: (
                lambda config, _layers, vp_stage=None: mtp_spec(
                    config, vp_stage=vp_stage, model=self.config.latent.model
                )
            ),
        )
        around(training, "setup_model_and_optimizer", self._setup)
        around(training, "evaluate_and_print_results", self._evaluate_sets)
        around(training, "evaluate", self._evaluate)
        around(training, "training_log", self._after_step)
        if self._profiler is not None:
            around(training, "train_step", self._profiler.train_step)
            around(training, "train", self._profiler.train)
        around(training, "num_floating_point_operations", self._flops)
        around(checkpointing, "check_checkpoint_args", self._checkpoint_args)
        around(
            checkpointing,
            "_load_global_dist_base_checkpoint",
            lambda read: FreshFusion(checking_state(read), _print_rank_0),
        )

    def _forward_backward_func(self, **_: Any) -> Callable[..., Any]:
        return self._step

    def _setup(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
            model, optimizer, scheduler = original(*args, **kwargs)
            self._open_writers(self.args)
            self.freeze.attach(optimizer, self.models)
            self.fusion_norm.attach(optimizer, self.models)  # after it: sees no hidden gradient
            self.freeze.updates = self.state.fusion_updates
            self._scheduler = scheduler
            if scheduler is not None and self.args.no_load_optim:
                # Not loaded either; the decay would come later by what the checkpoint has done.
                scheduler.step(self.args.consumed_train_samples)
            if self._profiler is not None:
                self._profiler.attach(self, optimizer)
            return model, optimizer, scheduler

        return setup_model_and_optimizer

    def _checkpoint_args(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def check_checkpoint_args(checkpoint_args: Any, *args: Any, **kwargs: Any) -> Any:
            from megalatent.training.changes import changes
            from megalatent.training.metrics import RunState

            saved = getattr(checkpoint_args, "latent_state", None)
            if saved is not None and not self.args.finetune:
                self.state.__dict__.update(RunState.from_dict(saved).__dict__)
            for line in changes(checkpoint_args, self.args, self.config.latent.passes.schedule):
                _print_rank_0(line)
            return original(checkpoint_args, *args, **kwargs)

        return check_checkpoint_args

    def _step(self, *, forward_only: bool = False, **kwargs: Any) -> Any:
        schedule, metrics = self.schedule(), self.metrics()
        if not forward_only:
            metrics.step_begins()
            schedule.z_loss = self._scheduler.z_loss
        result = schedule(forward_only=forward_only, **kwargs)
        if not forward_only:
            self.freeze.plain_step = max(schedule.last_passes) == 1
        return result

    def _after_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        # Megatron logs a step as soon as it is done, before it evaluates or saves.
        def training_log(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs).arguments
            iteration = bound["iteration"]
            self._log_step(iteration, bound["learning_rate"], skipped=bool(bound["skipped_iter"]))
            self._in_log = True
            try:
                return original(*args, **kwargs)
            finally:
                self._in_log = False
                # After its first line of a run Megatron goes on with the same interval.
                first = bound.get("is_first_iteration", False)
                if iteration % self.args.log_interval == 0 and not first:
                    self._step_flops.clear()

        signature = inspect.signature(original)
        return training_log

    def _log_step(self, iteration: int, learning_rate: float | None, *, skipped: bool) -> None:
        args, schedule, metrics = self.args, self.schedule(), self.metrics()
        samples = len(schedule.last_passes) * args.micro_batch_size * args.data_parallel_size
        metrics.step_ends(
            schedule.last_passes,
            args.data_parallel_size,
            samples * args.seq_length,
            self._step_flops[-1],
        )
        self.iteration = iteration
        self.fusion_norm.step_ends(fused=not self.freeze.plain_step)
        # On every rank alike, also on those that hold no part of the fusion: Megatron compares
        # what the ranks would save.
        self.freeze.updates += not self.freeze.plain_step and not skipped
        self.state.fusion_updates = self.freeze.updates
        args.latent_state = self.state.to_dict()
        if iteration % args.log_interval == 0 or iteration == 1:
            norm = self.fusion_norm.read(metrics.fused_steps, _groups_of_fusion())
            metrics.train(
                list(schedule.train_sums.values()),
                iteration=iteration,
                total=args.train_iters,
                consumed_samples=args.consumed_train_samples,
                writers=_writers(),
                fusion_gradient_norm=norm,
                learning_rate=learning_rate,
            )
            schedule.train_sums.clear()

    def _evaluate_sets(self, original: Callable[..., Any]) -> Callable[..., Any]:
        from megalatent.training.evaluated_sets import one_set, set_names

        # Megatron evaluates the sets one by one, and says which they are only here.
        def evaluate_and_print_results(prefix: str, *args: Any, **kwargs: Any) -> Any:
            self._sets = set_names(prefix, self.args)
            if prefix.endswith(" on test set"):
                # Megatron would write the test set's points over those of validation.
                kwargs["write_to_tensorboard"] = False
                with one_set(self.args, self._eval_iters):
                    return original(prefix, *args, **kwargs)
            return original(prefix, *args, **kwargs)

        return evaluate_and_print_results

    def _evaluate(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def evaluate(*args: Any, **kwargs: Any) -> Any:
            schedule = self.schedule()
            schedule.eval_sums.clear()
            result = original(*args, **kwargs)
            self.metrics().evaluation(
                schedule.eval_sums,
                iteration=self.iteration or self.args.iteration,
                writers=_writers(),
                name=next(self._sets, "validation"),
            )
            return result

        return evaluate

    def _flops(self, original: Callable[..., Any]) -> Callable[..., Any]:
        from megalatent.training.flops import StepFlops

        flops = self.flops = StepFlops(self.args, self.config.latent, original)

        def num_floating_point_operations(
            args: Any,
            batch_size: int,
            seqlen_squared_sum_in_batch: float | None = None,
            total_real_tokens_in_batch: float | None = None,
        ) -> float:
            if self._in_log:
                # Megatron divides by the mean time of the steps since its last line, and K varies.
                return sum(self._step_flops) / len(self._step_flops)
            step = flops.step(
                batch_size,
                self.schedule().last_passes,
                squares=seqlen_squared_sum_in_batch,
                tokens=total_real_tokens_in_batch,
            )
            self._step_flops.append(step)
            return step

        return num_floating_point_operations

    def ends(self, error: BaseException | None) -> None:
        """Tell the other ranks how the run ended here, so that none takes this one for dead."""
        if self._schedule is not None and self._schedule.watch is not None:
            self._schedule.watch.close(error)

    # -- made once the process groups exist -------------------------------------------------

    def schedule(self) -> Any:
        if self._schedule is None:
            from megalatent.training.setup import make_schedule

            self._schedule = make_schedule(self.config, self.args)
        return self._schedule

    def metrics(self) -> Any:
        if self._metrics is None:
            from megalatent.training.setup import make_metrics

            self._metrics = make_metrics(self.args, self.state)
        return self._metrics


def _print_rank_0(line: str) -> None:
    from megatron.training import print_rank_0

    print_rank_0(line)


def _writers() -> Any:
    from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

    from megalatent.training.metrics import Writers

    return Writers(get_tensorboard_writer(), get_wandb_writer())


def _groups_of_fusion() -> list[Any]:
    """Ranks that share the fusion's stage, and ranks of all stages."""
    from megatron.core import parallel_state

    return [
        parallel_state.get_data_parallel_group(with_context_parallel=True),
        parallel_state.get_model_parallel_group(),
    ]


def save_folder(args: Any) -> Path | None:
    """Where a run keeps its files beside Megatron's checkpoints, or None if it saves nothing."""
    folder = args.save or args.tensorboard_dir
    return Path(folder) if folder else None


def local_device() -> torch.device:
    """The device this rank computes on."""
    return torch.device(torch.cuda.current_device())
