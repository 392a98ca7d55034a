"""The layers of a rank of a mesh: their stages and gradients, and the whole of them where it is needed."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from pipetransformer.autodp.transition import Placement
from pipetransformer.errors import UserError
from pipetransformer.models.stack import Layer
from pipetransformer.optim.base import OptimizerSpec
from pipetransformer.runtime.batch import Batch
from pipetransformer.runtime.engine import Engine
from pipetransformer.runtime.groups import ResolvedTopology
from pipetransformer.runtime.mesh_gradients import CopiedGradients
from pipetransformer.runtime.mesh_stage import MeshStage
from pipetransformer.runtime.mesh_transfer import all_gather_layer
from pipetransformer.runtime.precision import Precision
from pipetransformer.runtime.resident import ResidentLayers
from pipetransformer.runtime.result import Evaluated
from pipetransformer.runtime.stage import ParametersByLayer, Stage


def check_mesh(optimizer: OptimizerSpec, compiles: bool) -> None:
    """Refuses what does not go with a mesh.

    Raises:
        UserError: With what to change.
    """
    if not optimizer.is_elementwise:
        kind = type(optimizer).__name__
        raise UserError(f"{kind} needs each weight in one piece, and a mesh has them in parts; take AdamW or SGD")
    if compiles:
        raise UserError("a mesh runs without compile=true")


class MeshLayers:
    """Cuts a rank's layers to its part. A run keeps its mesh from the first plan in which the rank takes part.

    Args:
        resident: The layers of this rank.
        resolved: The plan with its groups; the rank is not idle.

    Raises:
        UserError: The model has a layer that cannot be split.
    """

    def __init__(self, resident: ResidentLayers, resolved: ResolvedTopology) -> None:
        mesh = resolved.rank_mesh()
        assert mesh is not None, "several ranks run a stage"
        self._resident, self._mesh = resident, mesh
        resident.shard(mesh)

    def stage(
        self, layers: dict[int, nn.Module], active: ParametersByLayer, precision: Precision, recompute: bool,
        reads_features: bool,
    ) -> Stage:  # fmt: skip
        """Returns a stage of sharded layers; the arguments are those of :class:`MeshStage`."""
        return MeshStage(layers, active, precision, recompute, self._mesh, len(self._resident.stack), reads_features)

    def copied_gradients(self, stages: Iterable[Stage]) -> CopiedGradients:
        """Returns the gradients of which several ranks have copies."""
        stack, active = self._resident.stack, [layer for stage in stages for layer in stage.active_parameters]
        named = {p: stack[layer].cuts[name][0] for layer in active for name, p in stack[layer].by_name().items()}
        return CopiedGradients(self._mesh, {p: part for p, part in named.items() if p.requires_grad})

    def evaluated(self, engine: Engine, batch: Batch, outputs: Tensor) -> Evaluated | None:
        """Returns the outputs of this rank's rows, on one rank of those that computed them."""
        kept = engine.rows_of_outputs(batch.weights) > 0  # the others are padding
        if not self._mesh.is_first_copy_of_rows or not kept.any():
            return None
        ids = engine.rows_of_outputs(torch.from_numpy(batch.ids))
        return Evaluated(ids[kept].numpy(), outputs[kept.to(outputs.device)])

    def whole(self, numbers: Iterable[int], placement: Placement) -> dict[int, Layer]:
        """Returns layers in one piece on every rank, from the parts that ranks hold. All ranks of the world call it."""
        layers: dict[int, Layer] = {}
        for number in numbers:
            tensors = all_gather_layer(self._resident, placement, number)
            layers[number] = self._resident.whole_twin(number)
            layers[number].fill(tensors.items(), self._resident.device)
        return layers
