"""The layers of a rank of a mesh: their stages, their gradients, and what they give in evaluation."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from pipetransformer.errors import UserError
from pipetransformer.models.stack import LayerStack
from pipetransformer.optim.base import OptimizerSpec
from pipetransformer.runtime.batch import Batch
from pipetransformer.runtime.engine import Engine
from pipetransformer.runtime.mesh import RankMesh
from pipetransformer.runtime.mesh_gradients import CopiedGradients
from pipetransformer.runtime.mesh_stage import MeshStage
from pipetransformer.runtime.precision import Precision
from pipetransformer.runtime.result import Evaluated
from pipetransformer.runtime.stage import ParametersByLayer, Stage


def check_mesh(optimizer: OptimizerSpec, compiles: bool) -> None:
    """Refuses what does not go with a mesh.

    Raises:
        UserError: With what to change.
    """
    optimizer.check_parts()
    if compiles:
        raise UserError("a mesh runs without compile=true")


class MeshLayers:
    """A rank's layers under a plan whose stages run on meshes.

    Args:
        stack: The model, the layers that the rank runs cut to its part.
        mesh: This rank's view.
    """

    def __init__(self, stack: LayerStack, mesh: RankMesh) -> None:
        self._stack, self._mesh = stack, mesh

    def stage(
        self, layers: dict[int, nn.Module], active: ParametersByLayer, precision: Precision, recompute: bool,
        reads_features: bool,
    ) -> Stage:  # fmt: skip
        """Returns a stage of sharded layers; the arguments are those of :class:`MeshStage`."""
        return MeshStage(layers, active, precision, recompute, self._mesh, len(self._stack), reads_features)

    def copied_gradients(self, stages: Iterable[Stage], embeddings: Iterable[nn.Parameter]) -> CopiedGradients:
        """Returns the gradients of which several ranks have copies; of embeddings, those of touched rows."""
        stack, active = self._stack, [layer for stage in stages for layer in stage.active_parameters]
        named = ((name, p, stack[layer].cuts) for layer in active for name, p in stack[layer].by_name().items())
        # what takes no part in a pass keeps no gradient: with one of zeros it would decay
        parts = {p: cuts[name][0] for name, p, cuts in named if p.requires_grad and name not in stack.idle}
        return CopiedGradients(self._mesh, parts, embeddings)

    def evaluated(self, engine: Engine, batch: Batch, outputs: Tensor) -> Evaluated | None:
        """Returns the outputs of this rank's rows, on one rank of those that computed them."""
        kept = engine.rows_of_outputs(batch.weights) > 0  # the others are padding
        if not self._mesh.is_first_copy_of_rows or not kept.any():
            return None
        ids = engine.rows_of_outputs(torch.from_numpy(batch.ids))
        return Evaluated(ids[kept].numpy(), outputs[kept.to(outputs.device)])
