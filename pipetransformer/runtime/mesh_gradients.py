"""Gradients on a mesh: copies of a parameter get the sum of their gradients, and a norm counts each number once.

A copy has the gradient of what its rank computed, so the sum, and never the mean, is the gradient. Equal sums and equal
optimizer state keep copies equal bit for bit.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from pipetransformer.models.tp_plan import Part
from pipetransformer.runtime.embedding_gradients import sum_embedding
from pipetransformer.runtime.gradients import gradient_or_zero, numbers_on_device, sum_gradients
from pipetransformer.runtime.mesh import RankMesh
from pipetransformer.runtime.stage import ParametersByLayer


class CopiedGradients:
    """The gradients of a rank's parameters on a mesh.

    Args:
        mesh: This rank's view.
        parts: What this rank has of each parameter that trains.
        embeddings: Weights of large embeddings, of which only the rows that a batch touches are summed.
    """

    def __init__(
        self, mesh: RankMesh, parts: Mapping[nn.Parameter, Part], embeddings: Iterable[nn.Parameter] = ()
    ) -> None:
        self._embeddings = frozenset(embeddings)
        self._by_group: dict[ProcessGroup, list[nn.Parameter]] = {}
        for parameter, part in parts.items():
            group = mesh.copies(part.style)
            if group is not None:
                self._by_group.setdefault(group, []).append(parameter)
        self._mesh_group = mesh.groups[tuple(mesh.mesh.shape)]
        self._first_copies = {parameter for parameter, part in parts.items() if mesh.is_first_copy(part.style)}

    def all_reduce(self) -> None:
        """Gives every copy the sum, equal bit for bit. All ranks of the mesh call it."""
        for group, parameters in self._by_group.items():
            sum_gradients([gradient_or_zero(p) for p in parameters if p not in self._embeddings], group)
            for parameter in parameters:
                if parameter in self._embeddings:
                    sum_embedding(gradient_or_zero(parameter), group)

    def sum_over_parts(self, parameters: Sequence[Tensor], values: Tensor) -> Tensor:
        """Sums numbers of each parameter over its parts, the same on every rank. All ranks of the mesh call it.

        Args:
            parameters: That train, as many as ``values`` has columns.
            values: (K, number of parameters), of this rank's parts.
        """
        counts = tuple(int(parameter in self._first_copies) for parameter in parameters)
        total = values * numbers_on_device(counts, values.device)
        dist.all_reduce(total, group=self._mesh_group)
        return total

    def counted(self, parameters: ParametersByLayer) -> ParametersByLayer:
        """Returns the parameters that count in the norm on this rank: over all ranks each number counts once."""
        return {layer: [p for p in own if p in self._first_copies] for layer, own in parameters.items()}
