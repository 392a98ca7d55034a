"""A model of which each rank holds a part: what the ranks gather, take from a checkpoint, and lend each other."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import Tensor
from torch.optim import Optimizer

from pipetransformer.autodp.topology import Topology
from pipetransformer.autodp.transition import Placement, Transition
from pipetransformer.autopipe.plan import Plan
from pipetransformer.models.layer import Layer
from pipetransformer.models.stack import LayerStack
from pipetransformer.optim.base import OptimizerSpec
from pipetransformer.runtime.compiled import BlockCompiler
from pipetransformer.runtime.fsdp import FsdpLayers
from pipetransformer.runtime.groups import RankContext
from pipetransformer.runtime.mesh_transfer import gather_sharded_state_dict, whole_layers
from pipetransformer.runtime.resident import OptimizerState, ResidentLayers
from pipetransformer.runtime.snapshot import gather_optimizer_state, load_layers, shard_state, snapshot
from pipetransformer.runtime.stage import FrozenForward, eval_forward
from pipetransformer.runtime.transfer import borrowed, gather_state_dict, on_device
from pipetransformer.runtime.update import swap_averages


class HeldModel:
    """The layers of a model and their optimizer state, where the last transition has put them.

    Args:
        stack: The whole model; layers without storage are held by other ranks.
        optimizer: Builds the optimizer over a rank's parameters.
        context: Device and precision of this rank.
        parks: Optimizer state of layers that freeze waits in host memory until they train again; else it is dropped.

    Attributes:
        resident: The layers that this rank holds.
        optimizer: Over the parameters that this rank trains; ``None`` where it trains none.
        transition: The last transition; ``None`` before the first plan.
        topology: This rank's view of the plan in force; ``None`` before the first plan.
    """

    def __init__(self, stack: LayerStack, optimizer: OptimizerSpec, context: RankContext, parks: bool) -> None:
        self.device, self.precision = context.device, context.precision
        self.resident = ResidentLayers(stack, context.device, parks)
        self.optimizer: Optimizer | None = None
        self.transition: Transition | None = None
        self.topology: Topology | None = None
        self._spec = optimizer
        self._compiler = BlockCompiler(len(stack)) if context.compiles else None
        self._shards: FsdpLayers | None = None
        self._computing: dict[int, Layer] = {}  # whole layers of a mesh that are lent to compute features

    @property
    def num_layers(self) -> int:
        return len(self.resident.stack)

    @property
    def plan(self) -> Plan | None:
        """The plan in force; ``None`` before the first transition."""
        return None if self.transition is None else self.transition.after

    @property
    def placement(self) -> Placement:
        """The ranks that hold each layer; empty before the first transition."""
        return () if self.transition is None else self.transition.placement

    def _has_state(self, layer: int, plan: Plan) -> bool:
        return self.resident.parks or layer >= plan.first_active_layer

    def _keep_state(self, layer: int, whole: OptimizerState) -> None:
        """Keeps the optimizer state of a layer for the next optimizer, this rank's shard of it with FSDP."""
        state = self.resident.own_state(layer, whole)
        if self._shards is not None:
            state = shard_state(self.resident.stack[layer], whole, not self._spec.is_elementwise)
        self.resident.optimizer_state[layer] = state

    def gather_optimizer_state(self) -> OptimizerState:
        """Gathers the optimizer state on rank 0, by original name and key; empty on the others. Every rank calls it."""
        return gather_optimizer_state(self.snapshot(), self.placement, self._shards is not None)

    def load(self, weights: Mapping[str, Tensor], state: OptimizerState) -> None:
        """Gives the layers where they are the weights and the optimizer state that rank 0 has. Every rank calls it."""
        assert self.topology is not None, "apply a plan first"
        plan = self.topology.plan
        self.resident.optimizer_state.clear()
        if self.optimizer is not None:
            self.optimizer.state.clear()
        for layer, own in load_layers(self.resident, weights, state):
            if self._has_state(layer, plan):
                self._keep_state(layer, own)
        self.resident.restore_optimizer_state(self.optimizer, plan.first_active_layer)

    def snapshot(self) -> dict[int, dict[str, Tensor]]:
        """Copies the layers that this rank writes to a checkpoint to host memory, by name. Every rank calls it."""
        state = {} if self.optimizer is None else self.optimizer.state
        return snapshot(self.resident, {**state, **self.resident.parked()}, self.placement, self._shards is not None)

    @contextmanager
    def frozen_forward(self, first: int, last: int) -> Iterator[FrozenForward]:
        """Gives every rank layers ``first`` to ``last``, to compute the features of frozen layers. All ranks enter it.

        Yields:
            ``forward(inputs, context)``: runs them in evaluation mode without gradient.
        """
        numbers = range(first, last + 1)
        layers = {number: self.resident.stack[number] for number in numbers}
        compiler = self._compiler if self._shards is None else None
        lend = on_device if self._is_chunked else None  # a layer at a time, as the device has room for
        before = self._computing
        if self.resident.cuts.any:
            layers = whole_layers(self.resident, self.placement, numbers)
            self._computing = {**before, **layers}
        try:
            with (
                self._borrowed(numbers),
                eval_forward(layers, self.precision, self.device, compiler, lend) as forward,
            ):
                yield forward
        finally:
            self._computing = before

    @property
    def _is_chunked(self) -> bool:
        return self.plan is not None and bool(self.plan.chunk_bytes)

    def _borrowed(self, layers: range) -> AbstractContextManager[None]:
        if self.resident.cuts.any:
            return nullcontext()
        if self._shards is not None:
            return self._shards.whole(layers)
        return borrowed(self.resident, self.placement, layers, at_once=not self._is_chunked)

    def layer_state(self, layer: int) -> dict[str, Tensor]:
        """Returns the whole weights of a layer inside :meth:`frozen_forward`, by name, the same on every rank."""
        whole = self._computing.get(layer, self.resident.stack[layer])
        return {name: tensor.detach() for name, tensor in whole.original_state().items()}

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Gives the parameters their average inside, where there is one, and their own numbers back at the end."""
        swap_averages(self.optimizer)
        try:
            yield
        finally:
            swap_averages(self.optimizer)

    def weights(self) -> dict[str, Tensor] | None:
        """Gathers all weights under their original names. All ranks call it.

        Returns:
            The weights in host memory on rank 0; ``None`` on the other ranks.
        """
        if self._shards is not None:
            return self._shards.gather_state_dict()
        if self.resident.cuts.any:
            return gather_sharded_state_dict(self.resident, self.placement)
        return gather_state_dict(self.resident, self.placement)
