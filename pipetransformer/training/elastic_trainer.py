"""The trainer for a script of your own, with your own model and data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipetransformer.checkpoint.folder import FOLDER, CheckpointFolder
from pipetransformer.config.kinds import RUN, check_config
from pipetransformer.config.schema import Config
from pipetransformer.config.sections import Cache, Checkpointing, Evaluation, Guard, Loading, Parallel, Resume
from pipetransformer.config.validate import validate
from pipetransformer.data.map_style import Loss, MapStyleData, Metrics
from pipetransformer.errors import UserError
from pipetransformer.freeze.base import FreezePolicy
from pipetransformer.freeze.pipetransformer import PaperRule
from pipetransformer.kinds import Kind, check_kinds
from pipetransformer.models.adapters import AdapterSpec, NoAdapters
from pipetransformer.models.instance import ModelInstance, give_back
from pipetransformer.optim.base import OptimizerSpec
from pipetransformer.report.event_log import EVENT_LOG, SUMMARY, JsonLines, write_json
from pipetransformer.report.reporter import Reporter
from pipetransformer.report.sinks import LoggedWarnings, Sink
from pipetransformer.report.trace import remove_traces
from pipetransformer.runtime.groups import barrier, broadcast_from_rank0
from pipetransformer.training.best_weights import weights_to_save
from pipetransformer.training.build import prepare
from pipetransformer.training.resume import wanted_checkpoint
from pipetransformer.training.start_event import report_start
from pipetransformer.training.trainer import Callback, StepResult, Trainer
from pipetransformer.training.trainer_arguments import (
    check_arguments,
    check_callbacks,
    check_samples,
    check_without_folder,
)
from pipetransformer.training.world import open_world


class ElasticTrainer(Trainer):
    """Trains a model elastically: in one process, or on every rank of ``torchrun``.

    Iterating it yields one optimizer step at a time. The decisions of the freeze policy and the transitions that follow
    happen inside::

        with pt.ElasticTrainer(
            model, loss=loss, train=train, optimizer=pt.AdamW(lr=2e-5), batch_size=64, epochs=3
        ) as trainer:
            for step in trainer:
                print(step.loss, trainer.plan)
            trainer.save("model")

    Every rank makes the same calls. All ranks begin with the weights of rank 0, as with DDP. The model keeps its first
    weights while it is trained, unless :meth:`save` fills it; at the end of the context it gets the trained ones, on
    every rank. Warnings go to the logger ``pipetransformer`` on rank 0.

    Args:
        model: A timm or transformers model, an ``nn.Sequential`` (embedding, blocks, head), or a
            :class:`~pipetransformer.models.stack.LayerStack`.
        loss: Loss of each sample, ``loss(output, target) -> (B,)``, such as ``nn.CrossEntropyLoss(reduction="none")``.
        train: Map-style dataset of pairs ``(input, target)``, or of dictionaries with ``labels``; see
            :class:`~pipetransformer.data.map_style.MapStyleSplit`.
        evaluation: Datasets to score, by name; the first is the main one.
        metrics: ``metrics(predictions, targets) -> {name: value}`` over all samples; accuracy and loss by default.
        optimizer: The optimizer and its learning-rate schedule.
        batch_size: Samples of one optimizer step over all replicas, at every topology.
        epochs: Passes over ``train``.
        batching: ``bucketed`` takes batches of about one length from inputs of different lengths.
        freeze: Freeze policy; the paper's rule by default.
        peft: Adapters, as :class:`~pipetransformer.models.adapters.Lora`; ``save`` writes them in peft's format, and
            at the end the model gets the sum. By default all weights train.
        parallel: Devices, and what is fixed of the plan.
        cache: Budgets and folder of the frozen features.
        loader: Processes that read samples ahead; by default none.
        precision: ``float32``, ``float64``, or ``bfloat16`` and ``float16`` for matrix products.
        randomness: ``device`` lets dropout draw by the device's own kernels: faster where attention drops out, with
            other results at another topology.
        compile: Run blocks as graphs of ``torch.compile``.
        seed: Seed of the sample order and of dropout.
        evaluate: When to evaluate inside the iteration, when to end it early, and by which metric; ``None`` leaves
            evaluations to you.
        callbacks: Hooks, called on every rank.
        run_dir: Folder for the event log, the summary and checkpoints; ``None`` writes none. One with checkpoints of an
            earlier run is refused without ``resume``. The commands that read a run take only folders of ``pt.train``.
        checkpoint: When to write checkpoints, with a ``run_dir``; the defaults of
            :class:`~pipetransformer.config.sections.Checkpointing` otherwise.
        guard: What to do when a loss, a gradient or, with ``freeze.guard``, a freeze goes wrong; the defaults of
            :class:`~pipetransformer.config.sections.Guard` otherwise.
        resume: Go on from the newest checkpoint in ``run_dir``, if there is one. The world may be another one.
        resume_allow: Options that change the result and may differ from those of the run, as ``["optim.lr"]``.

    Raises:
        UserError: Model, data, batch and devices do not fit together.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        loss: Loss,
        train: Any,
        evaluation: Mapping[str, Any] | None = None,
        metrics: Metrics | None = None,
        optimizer: OptimizerSpec,
        batch_size: int,
        epochs: int,
        batching: str = "uniform",
        freeze: FreezePolicy | None = None,
        peft: AdapterSpec | None = None,
        parallel: Parallel | None = None,
        cache: Cache | None = None,
        loader: Loading | None = None,
        precision: str = "float32",
        randomness: str = "sample",
        compile: bool = False,
        seed: int = 1,
        evaluate: Evaluation | None = None,
        callbacks: Sequence[Callback] = (),
        run_dir: str | Path | None = None,
        checkpoint: Checkpointing | None = None,
        guard: Guard | None = None,
        resume: bool = False,
        resume_allow: Sequence[str] = (),
    ) -> None:
        check_arguments(locals())
        spec = ModelInstance.of(model)
        check_samples(spec, train, evaluation or {}, loss)
        data = MapStyleData(
            train=train,
            evaluation=dict(evaluation or {}),
            loss=loss,
            metrics=metrics,
            output_shape=spec.output_shape,
            padding_id=spec.padding_id,
        )
        config = Config(
            model=spec,
            dataset=data,
            freeze=freeze or PaperRule(),
            peft=peft or NoAdapters(),
            optim=optimizer,
            parallel=parallel or Parallel(),
            cache=cache or Cache(),
            loader=loader or Loading(),
            checkpoint=checkpoint or Checkpointing(enabled=run_dir is not None),
            guard=guard or Guard(),
            resume=Resume(run="auto" if resume else None, allow=list(resume_allow)),
            seed=int(seed),  # may be numpy's
            epochs=int(epochs),
            batch_size=int(batch_size),
            batching=batching,
            precision=precision,
            randomness=randomness,
            compile=compile,
            evaluate=evaluate or Evaluation(),
        )
        self._begin(config, run_dir, callbacks)
        self.evaluations.is_on = evaluate is not None

    @classmethod
    def from_config(cls, config: Config, run_dir: str | Path | None = None, callbacks: Sequence[Callback] = ()) -> Self:
        """Makes the trainer of a whole configuration, as the command line does, for an own loop.

        Args:
            config: The run. Its logger and its options of the terminal and of starting processes have no effect here.
            run_dir: Folder for the event log, the summary and checkpoints; by default that of ``resume.run``, or none.
            callbacks: Hooks, called on every rank.
        """
        check_kinds({"config": config, "run_dir": run_dir}, RUN)
        check_config(config)
        check_callbacks(callbacks)
        resumed = None if config.resume.run == "auto" else config.resume.run
        trainer = cls.__new__(cls)
        trainer._begin(config, run_dir if run_dir is not None else resumed, callbacks)
        return trainer

    def _begin(self, config: Config, folder_name: str | Path | None, callbacks: Sequence[Callback]) -> None:
        run_dir = None if folder_name is None else Path(folder_name).resolve()  # the script may go to another folder
        if run_dir is None:  # a checkpoint would have no place where it stays
            check_without_folder(config)
            config = replace(config, checkpoint=replace(config.checkpoint, enabled=False))
        validate(config)
        with ExitStack() as closing:
            device = closing.enter_context(open_world(config.parallel))
            self._summary = None if run_dir is None else run_dir / SUMMARY
            folder = run_dir or Path(closing.enter_context(TemporaryDirectory()))
            _make(folder)
            if isinstance(config.model, ModelInstance):
                _broadcast(config.model.model.state_dict(), device)
            if isinstance(config.dataset, MapStyleData) and isinstance(config.dataset.loss, nn.Module):
                config.dataset.loss.to(device)  # it may have weights of classes
            checkpoint = wanted_checkpoint(config, folder)
            if checkpoint is None:
                _begin_anew(folder)
            sinks: list[Sink] = [LoggedWarnings()] if self.rank == 0 else []
            if run_dir and self.rank == 0:
                sinks.append(JsonLines(folder / EVENT_LOG, goes_on=checkpoint is not None))
            report = Reporter(sinks)
            closing.callback(report.close)
            components = prepare(config, device, folder, closing, report, checkpoint)
            super().__init__(config, components, report, folder, callbacks)
            self._has_failed = self._is_closed = False
            closing.callback(lambda: self.checkpoints.close(give_up=self._has_failed))
            self.start()
            if checkpoint is not None:  # the next process counts it, where this one comes to no checkpoint
                report_start(self, folder)
            self.freeze_at_start()
            self.cache_again()
            closing.callback(self.cache_session.release)
            self._closing = closing.pop_all()

    @property
    def rank(self) -> int:
        """The rank of this process."""
        return dist.get_rank()

    def evaluate(self) -> dict[str, dict[str, float]]:
        """Scores every evaluation split under the current plan. Collective.

        Returns:
            Metrics by split, equal on every rank.

        Raises:
            UserError: The trainer is closed.
        """
        self._check_open("evaluate")
        return super().evaluate()

    def _next_step(self) -> StepResult:
        self._check_open("take steps")
        return super()._next_step()

    def _check_open(self, what: str) -> None:
        if self._is_closed:
            raise UserError(f"the trainer is closed; {what} inside its with block, or before close()")

    def save(self, folder: str | Path) -> None:
        """Writes the last or the best weights (``evaluate``) as the model's library loads them. Collective.

        The library writes the model itself, which gets these weights for it on rank 0.

        Raises:
            UserError: The trainer is closed, or the place is no folder.
        """
        check_kinds({"folder": folder}, {"folder": Kind((str, PathLike), "the path of a folder")})
        self._check_open("save")
        if Path(folder).exists() and not Path(folder).is_dir():
            raise UserError(f"{folder} is a file; give a folder for the model")
        with self.runtime.averaged():
            state, _ = weights_to_save(self)
        if state is not None:
            self.config.peft.save(self.config.model, self.components.stack, state, Path(folder))
        barrier(self.runtime.device)  # the folder is whole when any rank goes on

    def save_checkpoint(self) -> Path:
        """Writes a checkpoint of this step, and waits for it. Collective.

        Returns:
            Its folder, in ``<run_dir>/checkpoints``.

        Raises:
            UserError: It could not be written, or has no place where it would stay.
        """
        self._check_open("save_checkpoint")
        if not self.config.checkpoint.enabled:
            raise UserError("give the trainer a run_dir to write checkpoints to")
        self._log.flush()
        self.checkpoints.save(self.state)
        return self.checkpoints.wait_for_all()

    def state_dict(self) -> dict[str, Any]:
        """Returns all that :meth:`load_state_dict` needs to go on from this step. Collective.

        Returns:
            Under ``model`` the weights and under ``optimizer`` the optimizer's tensors by parameter and key, both by
            the original model's names, in host memory, and empty but on rank 0; under ``train`` the entries of
            :class:`~pipetransformer.planning.state.TrainState`, on every rank.
        """
        self._check_open("state_dict")
        optimizer = self.runtime.gather_optimizer_state()
        return {"model": self.runtime.weights() or {}, "optimizer": optimizer, "train": self.state.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from the step of a state that was taken in any world. Collective.

        Layers move to a plan for the state's frozen blocks, take weights and optimizer state there, and the cache is
        filled anew.

        Args:
            state: From :meth:`state_dict`, in a run with the same model, data, batch size and seed. Rank 0's counts.

        Raises:
            UserError: It is of another release, seed, or length of an epoch, or has not the weights of the model.
        """
        self._check_open("load_state_dict")
        if fault := broadcast_from_rank0(self._fault_of(state)):
            raise UserError(
                f"the state {fault}; give what `state_dict` returned on rank 0, of a run with the same model"
            )
        self.go_to(broadcast_from_rank0(state["train"]), partial(self.runtime.load, state["model"], state["optimizer"]))
        self.checkpoints.go_back_to(self.state.step)
        self.freeze_at_start()
        self.cache_again()

    def _fault_of(self, state: Mapping[str, Any]) -> str | None:
        """Returns what a state lacks of this run, or has in another shape, by one name; ``None`` if nothing."""
        if not isinstance(state, Mapping):
            return f"is a value of type {type(state).__name__}"
        for section in ("train", "optimizer", "model"):
            if not isinstance(state.get(section), Mapping):
                return f"lacks {section}"
        layers = [self.components.stack[index] for index in range(len(self.components.stack))]
        kept = {name for layer in layers for name in layer.original_state()}
        for name, shape in sorted(item for layer in layers for item in layer.shapes().items() if item[0] in kept):
            given = state["model"].get(name)
            if given is None:
                return f"lacks {name}"
            if given.shape != shape:  # torch would repeat a smaller one
                return f"has {name} of shape {tuple(given.shape)} where the model's is {tuple(shape)}"
        return None

    def close(self) -> None:
        """Closes groups, cache and files. Not a collective."""
        self._is_closed = True
        try:
            if not self._has_failed:
                self.flush_log()  # the last step, where the loop was left before its end
            if self._summary is not None and dist.get_rank() == 0:
                write_json(self._summary, self.summary())
        finally:
            self._closing.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._has_failed = error is not None
        try:
            if error is None:
                self._give_back()
        finally:
            self.close()

    def _give_back(self) -> None:
        """Copies the trained weights into the user's model, on every rank. Collective."""
        spec = self.config.model
        if isinstance(spec, ModelInstance):
            with self.runtime.averaged():
                (trained, _), own = weights_to_save(self), spec.model.state_dict()
            if trained is not None:
                give_back(spec.model, self.config.peft.merge(self.components.stack, trained))
            _broadcast(own, self.runtime.device)


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"the run folder {folder} cannot be made ({error.strerror}); give another `run_dir`") from error


def _begin_anew(folder: Path) -> None:
    """Keeps the checkpoints of an earlier run, and removes its traces, of plans that this one may not have. Collective.

    Raises:
        UserError: It has checkpoints, which this run would go back to or be resumed from.
    """
    steps = broadcast_from_rank0(CheckpointFolder(folder / FOLDER).newest_step)
    if steps is not None:
        raise UserError(
            f"{folder} has checkpoints of an earlier run, the newest of step {steps:,}; give `resume`=True to go on "
            "with it, or another `run_dir`"
        )
    if dist.get_rank() == 0:
        remove_traces(folder)


def _broadcast(state: Mapping[str, Tensor], device: torch.device) -> None:
    """Broadcasts rank 0's tensors into those of all ranks."""
    for tensor in state.values():
        if not tensor.is_meta:
            sent = tensor.detach().to(device).contiguous()
            dist.broadcast(sent, 0)
            tensor.copy_(sent)
