"""Runs a plan on this rank: forward, backward and the mean gradient, through ``torch.distributed.pipelining``."""

import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import fields
from functools import partial
from itertools import chain
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pipetransformer.runtime.batch import Batch, SampleLoss, total_loss
from pipetransformer.runtime.carrier import CarryingStage, carries
from pipetransformer.runtime.embedding_gradients import all_reduce_embeddings
from pipetransformer.runtime.gradients import TiedWeights, all_reduce_gradients
from pipetransformer.runtime.groups import RankContext, ResolvedTopology
from pipetransformer.runtime.mesh import RankMesh
from pipetransformer.runtime.mesh_gradients import CopiedGradients
from pipetransformer.runtime.pipeline_stage import EarlyReceivingStage, Reduce, TracedStage
from pipetransformer.runtime.result import Requests
from pipetransformer.runtime.schedules import Schedule, SingleStageSchedule, pipeline_schedule, receives_early
from pipetransformer.runtime.stage import Stage

NUM_TOLD = 1 + len(fields(Requests))
"""Numbers that a rank tells the others with each step: its loss and its requests."""


class Objective(Protocol):
    """The part of a task that the runtime knows."""

    @property
    def loss(self) -> SampleLoss:
        """Loss of each sample."""
        ...

    @property
    def output_shape(self) -> Callable[[tuple[int, ...]], tuple[int, ...]]:
        """Maps the shape (B, T, D) between layers to that of the head's output."""
        ...


Predict = Callable[[Tensor, list[int]], Tensor]
"""``predict(outputs, ids)``: predicts samples (n, ...) from their outputs (n, ...)."""


class Engine:
    """One rank's part of a plan.

    A schedule of torch fixes the shapes that it receives, so there is one for each shape of batch; all run the same
    stages. The shapes between stages are known, so no trial pass is needed to find them.

    Args:
        resolved: This rank's view of the plan with its groups; not idle.
        stages: The stages of this rank by their index in the plan.
        tied: The tied weights of these stages.
        objective: Loss and output shape of the last stage.
        context: Device, precision and recorder of this rank.
        first_trained: The lowest layer of the model with a parameter that trains.
        mesh: This rank's view of the ranks that run its stages together; ``None`` where it runs them alone.
        copied: The gradients of what ranks of the mesh have copies of.
        embeddings: Weights of which replicas average the rows that a batch touches; without FSDP.
        idle: Parameters that get no gradient, for which DistributedDataParallel would wait; without FSDP.

    Attributes:
        topology: This rank's view of the plan.
        active_parameters: For each of this rank's active layers the parameters that train.
        norm_group: The ranks over which squared gradient norms are summed.
    """

    def __init__(
        self, resolved: ResolvedTopology, stages: dict[int, Stage], tied: TiedWeights, objective: Objective,
        context: RankContext, first_trained: int, mesh: RankMesh | None = None, copied: CopiedGradients | None = None,
        embeddings: Sequence[nn.Parameter] = (), idle: Sequence[nn.Parameter] = (),
    ) -> None:  # fmt: skip
        self._mesh, self._copied = mesh, copied
        self._first_trained = first_trained
        self.topology, self.plan, self._resolved, self.stages = resolved.topology, resolved.plan, resolved, stages
        self.norm_group, self._tied, self._objective = resolved.norm_group, tied, objective
        self._device, self._precision, self._recorder = context.device, context.precision, context.recorder
        self._keys_on_host = context.randomness == "device" and mesh is None  # it seeds by them, but not on a mesh
        # FSDP averages in its reduce-scatter; pipelines all-reduce after the last backward
        has_ddp = self.plan.num_stages == 1 and not self.plan.fsdp and mesh is None and not self.plan.chunk_bytes
        self._carrier: CarryingStage | None = None
        self.active_parameters = {i: p for stage in stages.values() for i, p in stage.active_parameters.items()}
        self._modules: dict[int, nn.Module] = {**stages}
        if has_ddp and resolved.replicas.size() > 1 and stages[0].trains:
            self._modules[0] = self._data_parallel(stages[0], (*embeddings, *idle))
        self._embeddings, apart = embeddings, set(embeddings)
        own = idle if has_ddp or self.plan.fsdp else chain.from_iterable(self.active_parameters.values())
        self._averaged = [parameter for parameter in own if parameter not in apart]
        self._schedules: dict[tuple[object, ...], Schedule] = {}
        self._reduce: Reduce = _unchanged

    def _data_parallel(self, stage: Stage, apart: Sequence[nn.Parameter]) -> nn.Module:
        """Wraps the only stage of a plan into DistributedDataParallel, which averages its gradients bucket by bucket.

        The gradients of weights that are given apart stay those of this replica.

        Nothing is synchronized at the start or in between: weights and buffers come exact from the moves of a
        transition.
        """
        module, replicas = stage, self._resolved.replicas
        if replicas.size() == dist.get_world_size() and carries(replicas):
            like = next(chain.from_iterable(self.active_parameters.values()))
            module = self._carrier = CarryingStage(stage, replicas, like, NUM_TOLD)
        # A micro-batch of one sample gives gradients with other strides; DDP copies them and says so.
        warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
        ignored = [name for name, _ in module.named_buffers()]
        ignored += [name for name, parameter in module.named_parameters() if any(parameter is one for one in apart)]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ignored)
        return DistributedDataParallel(module, process_group=replicas, gradient_as_bucket_view=True, init_sync=False)

    @property
    def sums_for_world(self) -> bool:
        """True where all ranks are replicas of one stage, whose gradients carry what they tell each other."""
        return self._carrier is not None

    def step(self, batch: Batch, loss_scale: float, numbers: Tensor) -> Tensor:
        """Runs forward and backward on this replica's part of a global batch.

        Args:
            batch: This replica's samples.
            loss_scale: The factor of the loss in backward, a power of two.
            numbers: What this rank tells the others, (:data:`NUM_TOLD` - 1,), float64.

        Returns:
            This replica's part of the global batch's mean loss, zero on all but its last stage, and the numbers,
            (:data:`NUM_TOLD`,), float64; or their sums over the world, see :attr:`sums_for_world`. The gradients of the
            stage's parameters are those of the global mean times the scale.
        """
        batch = self._on_device(batch)
        self._set_mode(train=True)
        losses: list[Tensor] = []
        schedule = self._schedule(batch, train=True)
        # the mean over the replicas is taken later
        copies = self.plan.mesh.loss_copies
        factor = self.plan.num_replicas / batch.loss_divisor * loss_scale / copies
        target = batch.loss_targets(factor) if self.topology.is_last else None
        options = {"target": target, "losses": losses, "return_outputs": False}
        told = partial(self._told, losses, loss_scale, numbers)
        if self._carrier is not None:
            self._carrier.told = lambda: told() if len(losses) == self.plan.num_microbatches else None
        casts_once = not (self.plan.fsdp or self.plan.chunk_bytes)  # a cast would stay when its weight has left
        with self._precision.cached_autocast(self._device) if casts_once else nullcontext():
            schedule.step(*self._inputs(batch), **options, **self._context(batch))
        self._end_step()
        if self._copied is not None:
            with self._recorder.span("all-reduce"):
                self._copied.all_reduce()
        if self.plan.num_replicas > 1 and (self._averaged or self._embeddings):
            with self._recorder.span("all-reduce"):
                all_reduce_gradients(self._averaged, self._resolved.replicas)
                all_reduce_embeddings(self._embeddings, self._resolved.replicas)
        self._tied.all_reduce()
        return told() if self._carrier is None else self._carrier.sums()

    def _told(self, losses: Sequence[Tensor], loss_scale: float, numbers: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for loss in losses:
            total += loss.detach()
        return torch.cat([total[None] / (self.plan.num_replicas * loss_scale), numbers])

    @torch.no_grad()
    def forward(self, batch: Batch, predict: Predict | None = None) -> Tensor | None:
        """Runs forward in evaluation mode.

        Args:
            batch: This replica's samples.
            predict: Predicts of each micro-batch at once, whose outputs are not kept: those of a vocabulary take more
                than all else.

        Returns:
            Outputs (B, ...) or predictions of them on the last stage, ``None`` on the others.
        """
        batch = self._on_device(batch)
        self._set_mode(train=False)
        if predict is None:
            self._reduce = _unchanged
        else:
            ids = iter(self.rows_of_microbatches(torch.from_numpy(batch.ids)))
            self._reduce = lambda output: predict(output, next(ids).tolist())
        outputs = self._schedule(batch, train=False).step(*self._inputs(batch), **self._context(batch))
        self._end_step()
        return outputs

    def _end_step(self) -> None:
        for stage in self.stages.values():
            stage.end_step()

    def _on_device(self, batch: Batch) -> Batch:
        if self._mesh is not None:
            self._mesh.num_tokens = batch.hidden_shape[1]
        return batch.to(self._device, self._precision.param_dtype, self._keys_on_host)

    def _set_mode(self, train: bool) -> None:
        for stage in self.stages.values():
            if stage.training != train:  # switching walks over all modules, which takes its time
                stage.train(train)

    def _inputs(self, batch: Batch) -> tuple[Tensor, ...]:
        return (batch.inputs,) if self.topology.is_first and batch.inputs is not None else ()

    def _context(self, batch: Batch) -> dict[str, Any]:
        return {"keys": batch.keys, **batch.context}

    def _schedule(self, batch: Batch, train: bool) -> Schedule:
        key = (train, len(batch), *batch.hidden_shape)
        if key not in self._schedules:
            self._schedules[key] = self._new_schedule(batch, train)
        return self._schedules[key]

    def _new_schedule(self, batch: Batch, train: bool) -> Schedule:
        num_microbatches = self.plan.num_microbatches
        assert len(batch) % num_microbatches == 0, "the sampler pads to whole micro-batches"
        loss = self._recorder.extending(self._loss) if train else None
        if self.plan.num_stages == 1:
            reduce = None if train else self._reduced
            return SingleStageSchedule(self._modules[0], num_microbatches, loss, self._recorder, reduce)
        stages = [self._pipeline_stage(index, batch, train) for index in self.stages]
        return pipeline_schedule(self.plan.schedule, stages, num_microbatches, loss)

    def _pipeline_stage(self, index: int, batch: Batch, train: bool) -> TracedStage:
        size = len(batch) // self.plan.num_microbatches
        whole = (size, *batch.hidden_shape[1:])  # (B / M, T, D)
        shape = whole if self._mesh is None else self._mesh.hidden_shape(whole)
        is_last = index == self.plan.num_stages - 1
        output = self._objective.output_shape((shape[0], *whole[1:])) if is_last else shape
        first, last = self.plan.stages[index]
        inputs = batch.inputs[:size].to("meta") if index == 0 and batch.inputs is not None else self._meta(shape)
        kind: Callable[..., TracedStage] = TracedStage
        if self._device.type == "cpu" and receives_early(self.plan.schedule, train):  # nccl's messages have no tags
            kind = partial(EarlyReceivingStage, self.plan.num_microbatches)
        return kind(
            self._recorder,
            None if train else self._reduced,
            self._modules[index],
            index,
            self.plan.num_stages,
            self._device,
            input_args=inputs.requires_grad_(train and index > 0 and self._has_gradient(first)),
            output_args=self._meta(output).requires_grad_(train and self._has_gradient(last + 1)),
            group=self._resolved.pipeline,
        )

    def _reduced(self, output: Tensor) -> Tensor:
        """Returns what is kept of a micro-batch's output; a schedule outlives the batch, which says what."""
        return self._reduce(output)

    def _meta(self, shape: tuple[int, ...]) -> Tensor:
        return torch.empty(shape, dtype=self._precision.param_dtype, device="meta")

    def _has_gradient(self, layer: int) -> bool:
        """Returns ``True`` when the input of a layer takes a gradient: a layer below it trains."""
        return layer > self._first_trained

    def rows_of_outputs(self, values: Tensor) -> Tensor:
        """Returns of one value for each row of a batch (B, ...) those of the rows whose outputs this rank has."""
        return values if self._mesh is None else torch.cat(self.rows_of_microbatches(values))

    def rows_of_microbatches(self, values: Tensor) -> list[Tensor]:
        """Returns the same for each micro-batch."""
        chunks = values.chunk(self.plan.num_microbatches)
        return [*chunks] if self._mesh is None else [self._mesh.rows(chunk) for chunk in chunks]

    def _loss(self, output: Tensor, loss_targets: Tensor) -> Tensor:
        """Computes the loss of a micro-batch.

        Args:
            output: The head's output (B / M, ...).
            loss_targets: Rows of :meth:`Batch.loss_targets`, (B / M, k + 2).
        """
        if self._mesh is not None:
            loss_targets = self._mesh.rows(loss_targets)
        return total_loss(self._objective.loss, output, loss_targets)


def _unchanged(output: Tensor) -> Tensor:
    """Returns all of the output."""
    return output
