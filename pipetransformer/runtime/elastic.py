"""The elastic runtime of one rank: runs steps under a plan and goes from one plan to the next."""

import gc
import math
import time
from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from pipetransformer.autodp.topology import Topology
from pipetransformer.autodp.transition import Placement, Transition, first_transition, next_transition
from pipetransformer.autopipe.plan import Plan
from pipetransformer.host_copies import trim_pinned
from pipetransformer.models.stack import LayerStack
from pipetransformer.optim.base import OptimizerSpec
from pipetransformer.runtime import gradients, host_memory
from pipetransformer.runtime.agreement import Agreement
from pipetransformer.runtime.batch import Batch, Loader
from pipetransformer.runtime.embedding_gradients import embedding_weights
from pipetransformer.runtime.engine import Engine, Objective, Predict
from pipetransformer.runtime.fsdp import FsdpLayers
from pipetransformer.runtime.groups import RankContext, ResolvedTopology
from pipetransformer.runtime.held_model import HeldModel
from pipetransformer.runtime.mesh_gradients import CopiedGradients
from pipetransformer.runtime.mesh_layers import MeshLayers, check_mesh
from pipetransformer.runtime.piece_transfer import change_holders
from pipetransformer.runtime.precision import LossScale
from pipetransformer.runtime.result import (
    NO_REQUESTS,
    Evaluated,
    Requests,
    StepResult,
    TransitionReport,
    UpdateObserver,
)
from pipetransformer.runtime.snapshot import LayerSource
from pipetransformer.runtime.stage import ParametersByLayer
from pipetransformer.runtime.stage_kinds import make_stage
from pipetransformer.runtime.update import WeightUpdate


class ElasticRuntime(HeldModel):
    """A model in parts that trains under one plan after another. Every rank of the world makes the same calls.

    As a context manager it destroys the process groups of its plans at the end, also after a failure.

    Args:
        stack: The whole model, equal on every rank; layers without storage are loaded where the first plan has them.
        objective: Loss and output shape of the head.
        optimizer: Builds the optimizer over a rank's parameters.
        context: Device, precision, process groups and recorder of this rank.
        own_rates: Layers have learning rates of their own, which the steps are given.
        parks: Optimizer state of layers that freeze waits in host memory until they train again; else it is dropped.

    Attributes:
        loss_scale: The scale of the loss; it survives transitions.
        measured: For each active layer of this rank the parameters that train, each weight once, also one that layers
            share.
        observer: Measures updates; ``None`` where nobody asks for them.
        engine: Runs the plan; ``None`` on an idle rank.
    """

    def __init__(
        self, stack: LayerStack, objective: Objective, optimizer: OptimizerSpec, context: RankContext,
        own_rates: bool = False, parks: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(stack, optimizer, context, parks)
        self.recorder, self.loss_scale = context.recorder, LossScale(context.precision)
        self._agreement = Agreement(len(stack), context.device, self.loss_scale)
        self._objective, self._context = objective, context
        self.engine: Engine | None = None
        self.measured: ParametersByLayer = {}
        self._trained: ParametersByLayer = {}
        self.observer: UpdateObserver | None = None
        self._own_rates, self._update = own_rates, WeightUpdate(self, optimizer, self._agreement)
        self._mesh: MeshLayers | None = None

    def __enter__(self) -> "ElasticRuntime":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Destroys the process groups of all plans. Not a collective."""
        self._context.groups.close()

    def apply_plan(self, plan: Plan) -> TransitionReport:
        """Carries out the transition from the plan in force to another, for callers without a planner."""
        last = self.transition
        return self.apply(first_transition(plan) if last is None else next_transition(last, plan))

    def apply(self, transition: Transition, source: LayerSource | None = None) -> TransitionReport:
        """Carries out a transition; nothing but the arrangement changes (design promise 3).

        Layers and the optimizer state of active ones, with that of frozen ones where it is parked, move from a rank
        that holds them to the ranks that need them; all others stay where they are::

            4 stages x 1                   2 stages x 2 (blocks 1-4 frozen and cached: offloaded on rank 0)
            rank 0  E 1 2 3                rank 0  [E 1 2 3] 5 6 7  <- 5 6 from 1, 7 from 2
            rank 1  4 5 6          ->      rank 1  8 9 10 H         <- 8 9 from 2, 10 H from 3
            rank 2  7 8 9                  rank 2  5 6 7            <- 5 6 from 1
            rank 3  10 H                   rank 3  8 9 10 H         <- 8 9 from 2

        Args:
            transition: Begins where the last one ended.
            source: Where the layers of the first transition get their optimizer state from; new ones have none.
        """
        assert transition.before == self.plan, "a transition begins where the last one ended"
        start, plan = time.perf_counter(), transition.after
        self.resident.stash_optimizer_state(self.optimizer, plan.first_active_layer)
        self._drop_engine()
        dropped = time.perf_counter()
        topology = Topology(plan, dist.get_rank())
        tied = gradients.tied_layers(self.resident.stack, plan)
        resolved = self._context.groups.resolve(topology, self.device.type, tied)
        grouped = time.perf_counter()
        self._enter_mesh(resolved)
        self.resident.home = torch.device("cpu") if plan.chunk_bytes else self.device
        bytes_moved = change_holders(self.resident, self.transition, transition)
        if transition.before is None:
            self._load(resolved, transition.placement, source)
        assert plan.fsdp == (self._shards is not None), "a run is sharded from its start to its end"
        moved = time.perf_counter()
        self.topology, self.transition = topology, transition
        self._rebuild(resolved)
        return TransitionReport(
            group_s=grouped - dropped,
            move_s=moved - grouped,
            rebuild_s=time.perf_counter() - moved + dropped - start,
            moves=tuple((move.layer, move.source, move.target) for move in transition.moves),
            bytes_moved=bytes_moved,
        )

    def _enter_mesh(self, resolved: ResolvedTopology) -> None:
        """Makes this rank one of the mesh that runs its stages, where there is one."""
        view = resolved.rank_mesh()
        if view is not None:
            check_mesh(self._spec, self._compiler is not None)
        self.resident.cuts.enter(view)
        mesh = self.resident.cuts.mesh
        self._mesh = None if mesh is None else MeshLayers(self.resident.stack, mesh)

    def _load(self, resolved: ResolvedTopology, placement: Placement, source: LayerSource | None) -> None:
        """Gives the layers of the first plan their weights and, from a checkpoint, their optimizer state."""
        if resolved.plan.fsdp:
            assert resolved.plan.num_devices == dist.get_world_size(), "every rank has a shard"
            self._shards = FsdpLayers(self.resident, resolved.replicas)
        else:
            self.resident.load(layer for layer, ranks in enumerate(placement) if dist.get_rank() in ranks)
        if source is not None:
            for layer in self.resident.held():
                if self._has_state(layer, resolved.plan):
                    self._keep_state(layer, source.optimizer_state(layer))

    def _drop_engine(self) -> None:
        self.engine, self.optimizer, self.measured, self._trained = None, None, {}, {}
        for parameter in self.resident.stack.parameters():
            parameter.grad = None
        gc.collect()  # DDP sits in reference cycles, and its hooks would still fire on the parameters
        host_memory.trim()
        trim_pinned()

    def _rebuild(self, resolved: ResolvedTopology) -> None:
        topology, plan, stack = resolved.topology, resolved.plan, self.resident.stack
        own = topology.layers
        offloaded = [n for n, ranks in enumerate(self.placement) if topology.rank in ranks and n not in own]
        if not plan.fsdp:
            self.resident.keep(own, offloaded)
        if topology.stages is None:
            self.resident.restore_optimizer_state(None, plan.first_active_layer)
            return
        kind = self.resident, self._context, self._compiler, self._shards, self._mesh
        stages = {index: make_stage(plan, index, *kind) for index in topology.stages}
        embeddings = [] if plan.fsdp else list(chain.from_iterable(embedding_weights(stack, layer) for layer in own))
        idle = [] if plan.fsdp else list(chain.from_iterable(map(stack.idle_parameters, own)))
        copied = None if self._mesh is None else self._mesh.copied_gradients(stages.values(), embeddings)
        active = (layer for stage in stages.values() for layer in stage.active_parameters)
        self.optimizer = self._build_optimizer(active, copied)
        self.resident.restore_optimizer_state(self.optimizer, plan.first_active_layer)
        tied = gradients.TiedWeights(stack, resolved)
        first_trained = stack.first_trained(plan.first_active_layer)
        mesh = self.resident.cuts.mesh
        self.engine = Engine(
            resolved, stages, tied, self._objective, self._context, first_trained, mesh, copied, embeddings, idle
        )
        self._trained = {layer: stack.own_parameters(layer) for layer in self.engine.active_parameters}
        self.measured = self._trained if copied is None else copied.counted(self._trained)

    def _build_optimizer(self, layers: Iterable[int], copied: CopiedGradients | None) -> Optimizer | None:
        """Builds the optimizer over layers; a weight that layers share has the rate of the lowest."""
        parameters: ParametersByLayer = {}
        for parameter, owner in chain.from_iterable(self.resident.stack.owners(layer).items() for layer in layers):
            parameters.setdefault(owner, []).append(parameter)
        if self._shards is not None:
            return self._shards.build_optimizer(self._spec, parameters, self._own_rates)
        return self._spec.build_layers(parameters, self._own_rates, None if copied is None else copied.sum_over_parts)

    def train_step(
        self, loader: Loader, ids: np.ndarray, step: int, rate: float | Sequence[float],
        requests: Requests = NO_REQUESTS, max_norm: float = math.inf,
    ) -> StepResult:  # fmt: skip
        """Loads this rank's part of a global batch and takes one optimizer step.

        Args:
            loader: Loads the samples.
            ids: Sample ids of the global batch, the same on every rank.
            step: The optimizer step, for the samples' random streams.
            rate: The learning rate of the head, from which that of each layer follows; or one of each layer.
            requests: This rank's.
            max_norm: Largest norm of the whole gradient, the same on every rank that has a part of it.

        Raises:
            StepRefused: On every rank alike, before any weight changes: :class:`~pipetransformer.errors.NotFinite` or
                :class:`~pipetransformer.errors.Exploding`.
        """
        assert self.topology is not None, "apply a plan first"
        batch = None if self.topology.is_idle else loader.batch(ids, self.topology, step)
        return self.step(batch, rate, requests, max_norm)

    def step(
        self, batch: Batch | None, rate: float | Sequence[float], requests: Requests = NO_REQUESTS,
        max_norm: float = math.inf,
    ) -> StepResult:  # fmt: skip
        """Takes one optimizer step over the global batch.

        Args:
            batch: This replica's part; ``None`` on an idle rank.
            rate: As for :meth:`train_step`.
            requests: This rank's.
            max_norm: Largest norm of the whole gradient, the same on every rank that has a part of it.

        Raises:
            StepRefused: On every rank alike, before any weight changes.
        """
        if self.engine is None or batch is None:
            return self._agreement.idle(requests)
        told = self.engine.step(batch, self.loss_scale.value, self._agreement.numbers(requests))
        return self._update.after(told, rate, max_norm)

    @property
    def measured_blocks(self) -> ParametersByLayer:
        """The part of :attr:`measured` that belongs to blocks, without embedding and head."""
        return self._of_blocks(self.measured)

    @property
    def trained_blocks(self) -> ParametersByLayer:
        """The same with copies of weights that another rank of the mesh measures: what is kept of them moves, too."""
        return self._of_blocks(self._trained)

    def _of_blocks(self, parameters: ParametersByLayer) -> ParametersByLayer:
        return {layer: own for layer, own in parameters.items() if 0 < layer < self.num_layers - 1}

    def sum_over_parts(self, values: Tensor) -> Tensor:
        """Sums values over the ranks that have the model between them, each another part. All of them call it.

        Args:
            values: Of this rank's part.
        """
        if self.engine is not None and self.engine.norm_group.size() > 1:
            dist.all_reduce(values, group=self.engine.norm_group)
        return values

    @property
    def is_stateless(self) -> bool:
        """True when the optimizer keeps nothing from step to step."""
        return self._spec.state_factor == 0

    def evaluate(self, loader: Loader, ids: np.ndarray, predict: Predict | None = None) -> Evaluated | None:
        """Loads this rank's part of a global batch and runs forward in evaluation mode.

        Args:
            loader: Loads the samples.
            ids: Sample ids of the global batch, the same on every rank.
            predict: Predicts of the outputs of each micro-batch, which are not kept.

        Returns:
            The outputs or predictions on the last stage of each replica; ``None`` on other ranks, and where a replica
            has no sample.
        """
        if self.engine is None:
            return None
        batch = loader.batch(ids, self.engine.topology, targets=False)
        outputs = self.engine.forward(batch, predict)
        if outputs is None:
            return None
        if self._mesh is not None:
            return self._mesh.evaluated(self.engine, batch, outputs)
        num_samples = int(batch.weights.sum())  # in front, padding behind them
        return Evaluated(batch.ids[:num_samples], outputs[:num_samples]) if num_samples else None
