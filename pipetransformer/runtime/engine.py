"""Runs a plan on this rank: forward, backward and the gradient mean, through ``torch.distributed.pipelining``."""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle
from torch.nn.parallel import DistributedDataParallel

from pipetransformer.autodp.topology import Position, pipeline_ranks, replica_ranks
from pipetransformer.autopipe.plan import Plan
from pipetransformer.runtime.batch import Batch
from pipetransformer.runtime.gradients import all_reduce_gradients
from pipetransformer.runtime.groups import Groups
from pipetransformer.runtime.precision import Precision
from pipetransformer.runtime.single_stage import SingleStageSchedule
from pipetransformer.runtime.stage import Stage
from pipetransformer.runtime.tied import TiedWeights
from pipetransformer.runtime.timed_stage import TracedStage
from pipetransformer.runtime.tracing import Recorder

TORCH_SCHEDULES: dict[str, type[PipelineScheduleSingle] | type[PipelineScheduleMulti]] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved1f1b": ScheduleInterleaved1F1B,
}
"""A row for each of :data:`~pipetransformer.autopipe.schedules.SCHEDULES`."""

Runner = SingleStageSchedule | PipelineScheduleSingle | PipelineScheduleMulti


@dataclass(frozen=True)
class Objective:
    """What the head's output is for.

    Attributes:
        loss: Loss of each sample: ``loss(output, targets) -> (B,)``.
        output_shape: Maps the shape (B, T, D) between layers to that of the head's output.
    """

    loss: Callable[[Tensor, Tensor], Tensor]
    output_shape: Callable[[tuple[int, ...]], tuple[int, ...]]


class Engine:
    """One rank's part of a plan.

    A schedule of torch fixes the shapes of what it receives, so there is one for each shape of batch; all run the same
    stages. The boundary shapes are known, so nothing is tried out to find them.

    Args:
        stages: The stages of this rank by their index in the plan.
        ties: The shared weights of these stages.
        objective: What the last stage computes with the head's output.
        recorder: Is told when passes begin and end.

    Attributes:
        pipeline: The group of this replica's ranks.
        parts: The ranks that have the whole gradient between them, each a part: the pipeline, or all where sharded.
        active_parameters: For each of this rank's active layers the parameters that train.
    """

    def __init__(
        self, plan: Plan, position: Position, stages: dict[int, Stage], ties: TiedWeights, groups: Groups,
        objective: Objective, device: torch.device, precision: Precision, recorder: Recorder,
    ) -> None:  # fmt: skip
        self.plan, self.position, self.stages, self._ties = plan, position, stages, ties
        self._objective, self._device, self._precision, self._recorder = objective, device, precision, recorder
        self.pipeline = groups[pipeline_ranks(plan, position.replica)]
        self._replicas = groups[replica_ranks(plan, position.device)]
        self.parts = self._replicas if plan.fsdp else self.pipeline
        # what is sharded is averaged as it is dealt out, and pipelines when all passes are done
        is_whole = plan.num_stages == 1 and not plan.fsdp
        self._modules = {i: _averaged(stage, self._replicas) if is_whole else stage for i, stage in stages.items()}
        self.active_parameters = {i: p for stage in stages.values() for i, p in stage.active_parameters.items()}
        self._schedules: dict[tuple[object, ...], Runner] = {}
        self._num_samples, self._loss_scale = 1, 1.0

    @property
    def is_first(self) -> bool:
        return self.position.device == 0

    @property
    def is_last(self) -> bool:
        return self.position.device == self.plan.pipeline_size - 1

    def step(self, batch: Batch, loss_scale: float) -> Tensor:
        """Forward and backward of this replica's share.

        Args:
            loss_scale: What the loss is multiplied by before backward.

        Returns:
            This replica's part of the global batch's mean loss, zero on all but its last stage. The gradients of the
            stage's parameters are those of the global mean times the scale.
        """
        batch = batch.to(self._device, self._precision.weights)
        self._set_mode(train=True)
        self._num_samples, self._loss_scale = batch.num_samples, loss_scale
        losses: list[Tensor] = []
        schedule = self._schedule(batch, train=True)
        target = batch.weighted_targets() if self.is_last else None
        options = {"target": target, "losses": losses, "return_outputs": False}
        with nullcontext() if self.plan.fsdp else self._precision.cached_autocast(self._device):
            schedule.step(*self._inputs(batch), **options, **self._context(batch))
        if self.plan.num_stages > 1 and self.plan.num_replicas > 1 and self.active_parameters:
            with self._recorder.span("all-reduce"):
                all_reduce_gradients(chain.from_iterable(self.active_parameters.values()), self._replicas)
        self._ties.add_up()
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for loss in losses:
            total += loss.detach()
        return total / (self.plan.num_replicas * loss_scale)

    @torch.no_grad()
    def forward(self, batch: Batch) -> Tensor | None:
        """Outputs (B, ...) on the last stage, ``None`` on the others; evaluation mode."""
        batch = batch.to(self._device, self._precision.weights)
        self._set_mode(train=False)
        return self._schedule(batch, train=False).step(*self._inputs(batch), **self._context(batch))

    def _set_mode(self, train: bool) -> None:
        for stage in self.stages.values():
            if stage.training != train:  # switching walks over all modules, which takes its time
                stage.train(train)

    def _inputs(self, batch: Batch) -> tuple[Tensor, ...]:
        return (batch.inputs,) if self.is_first and batch.inputs is not None else ()

    def _context(self, batch: Batch) -> dict[str, Any]:
        return {"keys": batch.keys, **batch.context}

    def _schedule(self, batch: Batch, train: bool) -> Runner:
        key = (train, len(batch), *batch.hidden_shape)
        if key not in self._schedules:
            self._schedules[key] = self._new_schedule(batch, train)
        return self._schedules[key]

    def _new_schedule(self, batch: Batch, train: bool) -> Runner:
        num_microbatches = self.plan.num_microbatches
        assert len(batch) % num_microbatches == 0, "the sampler pads to whole micro-batches"
        loss = self._recorder.extending(self._scaled_loss) if train else None
        if self.plan.num_stages == 1:
            return SingleStageSchedule(self._modules[0], num_microbatches, loss, self._recorder)
        stages = [self._pipeline_stage(index, batch, train) for index in self.stages]
        schedule = TORCH_SCHEDULES[self.plan.schedule]
        if issubclass(schedule, PipelineScheduleMulti):
            return schedule([*stages], num_microbatches, loss_fn=loss, scale_grads=False)
        schedule = schedule if train else ScheduleGPipe
        return schedule(stages[0], num_microbatches, loss_fn=loss, scale_grads=False)

    def _pipeline_stage(self, index: int, batch: Batch, train: bool) -> TracedStage:
        size = len(batch) // self.plan.num_microbatches
        shape = (size, *batch.hidden_shape[1:])
        output = self._objective.output_shape(shape) if index == self.plan.num_stages - 1 else shape
        first, last = self.plan.stages[index]
        inputs = batch.inputs[:size].to("meta") if index == 0 and batch.inputs is not None else self._meta(shape)
        return TracedStage(
            self._recorder,
            self._modules[index],
            index,
            self.plan.num_stages,
            self._device,
            input_args=inputs.requires_grad_(train and index > 0 and self._has_gradient(first)),
            output_args=self._meta(output).requires_grad_(train and self._has_gradient(last + 1)),
            group=self.pipeline,
        )

    def _meta(self, shape: tuple[int, ...]) -> Tensor:
        return torch.empty(shape, dtype=self._precision.weights, device="meta")

    def _has_gradient(self, layer: int) -> bool:
        """Whether the tensor that enters a layer takes a gradient: something below it is active."""
        return layer > self.plan.first_active_layer

    def _scaled_loss(self, output: Tensor, weighted_targets: Tensor) -> Tensor:
        """Sum over the micro-batch divided by the global count; times the replicas, whose mean is taken later, and
        times the loss scale.

        A loss that is not finite makes the gradient of every layer and replica NaN, so no rank needs to be told.
        """
        targets, weights = weighted_targets[:, :-1], weighted_targets[:, -1]
        per_sample = self._objective.loss(output, targets.squeeze(1))
        loss = (per_sample * weights.to(per_sample.dtype)).sum() * (self.plan.num_replicas / self._num_samples)
        return loss * (self._loss_scale + 0 * loss.detach())


def _averaged(stage: Stage, replicas: ProcessGroup) -> nn.Module:
    """The only stage of a plan with its gradients averaged over the replicas, bucket by bucket as they come up.

    Nothing is synchronised at the start or in between: weights and buffers come exact from the moves of a transition.
    """
    if replicas.size() == 1 or not stage.trains:
        return stage
    # A micro-batch of one sample gives gradients with other strides; DDP copies them and says so.
    warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
    buffers = [name for name, _ in stage.named_buffers()]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(stage, buffers)
    return DistributedDataParallel(stage, process_group=replicas, gradient_as_bucket_view=True, init_sync=False)
