"""The elastic runtime of one rank: runs steps under a plan and goes from one plan to the next."""

import gc
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from pipetransformer.autodp.topology import Topology
from pipetransformer.autodp.transition import Placement, Transition, first_transition, next_transition
from pipetransformer.autopipe.plan import Plan
from pipetransformer.errors import NotFinite
from pipetransformer.models.stack import LayerStack
from pipetransformer.runtime import signals
from pipetransformer.runtime.batch import Batch
from pipetransformer.runtime.engine import Engine, Objective
from pipetransformer.runtime.fsdp import FsdpLayers, ShardedStage
from pipetransformer.runtime.groups import Groups
from pipetransformer.runtime.loss_scale import LossScale
from pipetransformer.runtime.precision import Precision
from pipetransformer.runtime.prefix import Compute, evaluated
from pipetransformer.runtime.resident import ResidentLayers
from pipetransformer.runtime.results import StepResult, TransitionReport
from pipetransformer.runtime.stage import Stage
from pipetransformer.runtime.tied import TiedWeights, tied_groups
from pipetransformer.runtime.tracing import Recorder
from pipetransformer.runtime.transfer import borrowed, gather_state_dict, send_layers

OptimizerBuilder = Callable[[Iterator[nn.Parameter]], Optimizer | None]


class ElasticRuntime:
    """Holds this rank's layers, optimizer and engine. Every rank of the world makes the same calls.

    Args:
        stack: The whole model, equal on every rank; layers without storage are loaded where the first plan has them.
        groups: Process groups.
        objective: What the head's output is for.
        build_optimizer: Makes the optimizer over a stage's parameters.
        clip_norm: Largest norm of the whole gradient.

    Attributes:
        recorder: Notes what this rank does in a step, when it is asked to.
        loss_scale: Goes on through transitions.
    """

    def __init__(
        self, stack: LayerStack, groups: Groups, objective: Objective, build_optimizer: OptimizerBuilder,
        clip_norm: float | None, device: torch.device, precision: Precision,
    ) -> None:  # fmt: skip
        self.device, self.precision = device, precision
        self.loss_scale = LossScale(precision)
        self.resident = ResidentLayers(stack, device)
        self._groups, self._objective = groups, objective
        self._build_optimizer, self._clip_norm = build_optimizer, clip_norm
        self.recorder = Recorder(device)
        self.transition: Transition | None = None  # the last one
        self.engine: Engine | None = None
        self.optimizer: Optimizer | None = None
        self._measured: signals.ByLayer = {}  # each weight once, also one that layers share
        self._shards: FsdpLayers | None = None

    @property
    def num_layers(self) -> int:
        return len(self.resident.stack)

    @property
    def plan(self) -> Plan | None:
        """The plan in force; ``None`` before the first transition."""
        return self.transition.after if self.transition else None

    @property
    def placement(self) -> Placement:
        """The ranks that hold each layer; empty before the first transition."""
        return self.transition.placement if self.transition else ()

    def apply_plan(self, plan: Plan) -> TransitionReport:
        """Carries out the transition from the plan in force to another, for callers without a planner."""
        last = self.transition
        return self.apply(next_transition(last, plan) if last else first_transition(plan))

    def apply(self, transition: Transition) -> TransitionReport:
        """Carries out a transition; nothing but the arrangement changes (design promise 3).

        Layers and the optimizer state of active ones move from a rank that has them to the ranks that need them; the
        rest stays where it is::

            4 stages x 1                   2 stages x 2 (blocks 1-4 frozen and cached: parked on rank 0)
            rank 0  E 1 2 3                rank 0  [E 1 2 3] 5 6 7  <- 5 6 from 1, 7 from 2
            rank 1  4 5 6          ->      rank 1  8 9 10 H         <- 8 9 from 2, 10 H from 3
            rank 2  7 8 9                  rank 2  5 6 7            <- 5 6 from 1
            rank 3  10 H                   rank 3  8 9 10 H         <- 8 9 from 2
        """
        plan, first = transition.after, transition.before is None
        assert transition.before == self.plan, "a transition begins where the last one ended"
        start = time.perf_counter()
        self.resident.stash_optimizer_state(self.optimizer, plan.first_active_layer)
        self._drop_engine()
        dropped = time.perf_counter()
        self._groups.prepare(Topology(plan, dist.get_rank()).all_groups())
        self._groups.prepare(tied_groups(self.resident.stack, plan))
        grouped = time.perf_counter()
        assert first or plan.fsdp == (self._shards is not None), "a run is sharded from its start to its end"
        assert not plan.fsdp or plan.num_devices == dist.get_world_size(), "every rank has a shard"
        if first and plan.fsdp:
            self._shards = FsdpLayers(self.resident)
        elif first:
            self.resident.load(layer for layer, ranks in enumerate(transition.placement) if dist.get_rank() in ranks)
        bytes_moved = send_layers(self.resident, transition.moves)
        moved = time.perf_counter()
        self.transition = transition
        self._rebuild(plan, transition.placement)
        return TransitionReport(
            group_s=grouped - dropped,
            move_s=moved - grouped,
            rebuild_s=time.perf_counter() - moved + dropped - start,
            num_moves=len(transition.moves),
            bytes_moved=bytes_moved,
        )

    def _drop_engine(self) -> None:
        self.engine, self.optimizer, self._measured = None, None, {}
        for parameter in self.resident.stack.parameters():
            parameter.grad = None
        gc.collect()  # DDP sits in reference cycles, and its hooks would still fire on the parameters

    def _rebuild(self, plan: Plan, placement: Placement) -> None:
        rank = dist.get_rank()
        place = Topology(plan, rank).position
        own = plan.device_layers(place.device) if place else []
        offloaded = [layer for layer, ranks in enumerate(placement) if rank in ranks and layer not in own]
        if not plan.fsdp:
            self.resident.keep(own, offloaded)
        if place is None:
            return
        stages = {index: self._stage(plan, index) for index in plan.device_stages(place.device)}
        self.optimizer = self._build_optimizer(p for stage in stages.values() for p in stage.parameters())
        self.resident.restore_optimizer_state(self.optimizer)
        stack, groups = self.resident.stack, self._groups
        ties = TiedWeights(stack, plan, place, groups)
        self.engine = Engine(
            plan, place, stages, ties, groups, self._objective, self.device, self.precision, self.recorder
        )  # fmt: skip
        self._measured = {layer: stack.own_parameters(layer) for layer in self.engine.active_parameters}

    def _stage(self, plan: Plan, index: int) -> Stage:
        stack, first_active = self.resident.stack, plan.first_active_layer
        layers: dict[int, nn.Module] = {layer: stack[layer] for layer in plan.stage_layers(index)}
        active = {layer: stack.trainable(layer, first_active) for layer in layers if layer >= first_active}
        if self._shards is not None:
            return ShardedStage(layers, active, self.precision, plan.recompute, self._shards)
        return Stage(layers, active, self.precision, plan.recompute)

    def step(self, batch: Batch | None, rate: float) -> StepResult:
        """One optimizer step over the global batch.

        Args:
            batch: This replica's share; ``None`` on an idle rank.
            rate: The learning rate.

        Raises:
            NotFinite: On every rank alike, before any weight changes.
        """
        if self.engine is None or batch is None:
            return self._idle_step()
        loss = self.engine.step(batch, self.loss_scale.value)
        own = signals.squared_gradient_norms(self._measured, self.num_layers, self.device)
        squared = self.loss_scale.unscaled(signals.all_reduce_squared_norms(own, self.engine.parts))
        overflowed = not math.isfinite(sum(squared))
        shared = signals.AsyncSum(loss, torch.full_like(loss, overflowed))
        result = self._judge(shared, squared, overflowed)
        self._update(result, rate)
        return result

    def _idle_step(self) -> StepResult:
        """Waits for the loss, so as neither to run ahead of the others nor to miss that they stop or skip."""
        nothing = torch.zeros((), dtype=torch.float64, device=self.device)
        shared = signals.AsyncSum(nothing, nothing)
        overflowed = shared.values()[1] != 0
        return self._judge(shared, [math.inf if overflowed else 0.0] * self.num_layers, overflowed)

    def _judge(self, shared: signals.AsyncSum, squared_norms: list[float], overflowed: bool) -> StepResult:
        """Adapts the loss scale; all ranks know of an overflow, and wait for the loss only then."""
        result = StepResult(shared, squared_norms, self.loss_scale.value, overflowed)
        if not overflowed:
            self.loss_scale.grow()
        elif not math.isfinite(result.loss) or self.loss_scale.is_lowest:
            raise NotFinite(f"the loss ({result.loss:g}) or its gradient (norm {result.total_norm:g}) is not finite")
        else:
            self.loss_scale.shrink()
        return result

    def _update(self, result: StepResult, rate: float) -> None:
        assert self.engine is not None
        if self.optimizer is None:
            return
        with self.recorder.span("optimizer"):
            if not result.skipped:
                parameters = self.engine.active_parameters
                signals.unscale_and_clip(parameters, result.total_norm, self._clip_norm, result.loss_scale)
                for group in self.optimizer.param_groups:
                    group["lr"] = rate
                self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)

    @contextmanager
    def prefix(self, first: int, last: int) -> Iterator[Compute]:
        """Lends layers ``first`` to ``last`` to every rank, to compute the features of frozen layers.

        Yields:
            ``compute(inputs, context)``: runs them in evaluation mode without gradient.
        """
        numbers = range(first, last + 1)
        layers = [self.resident.stack[number] for number in numbers]
        with self._lent(numbers), evaluated(layers, self.precision, self.device) as compute:
            yield compute

    def layer_state(self, layer: int) -> dict[str, Tensor]:
        """The weights of a layer that this rank has, or is lent, by name."""
        return {name: tensor.detach() for name, tensor in self.resident.stack[layer].original_state().items()}

    def _lent(self, layers: range) -> AbstractContextManager[None]:
        if self._shards is not None:
            return self._shards.whole(layers)
        return borrowed(self.resident, self.placement, layers)

    def weights(self) -> dict[str, Tensor] | None:
        """All weights under their original names, in host memory on rank 0; ``None`` on the other ranks."""
        return (
            self._shards.gather_state_dict()
            if self._shards is not None
            else gather_state_dict(self.resident, self.placement)
        )
