"""A stage whose layers a mesh of ranks runs together.

Between layers each rank has its part of the hidden state (B, T, D)::

                    rows                tokens      width
    1d              B / dp_shard        T / cp      D
    2d              B / dp_shard        T / cp      D / tp
    3d              B / (x y)           T           D / z

The embedding gives the width in parts in every algorithm, and the head is whole. So the width is all-gathered behind
the embedding in 1d and before the head in 2d and 3d, and tokens are cut behind the one and gathered before the other.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipetransformer.errors import UserError
from pipetransformer.models.split import head_counts
from pipetransformer.runtime.mesh import RankMesh
from pipetransformer.runtime.mesh_rng import ShardedRng
from pipetransformer.runtime.precision import Precision
from pipetransformer.runtime.stage import LayerCall, ParametersByLayer, Stage
from pipetransformer.runtime.tensor_parallel import all_gather, own_slice


class MeshStage(Stage):
    """Contiguous layers of which each rank of a mesh has its part.

    Args:
        layers: The layers by their index in the model, sharded.
        active_parameters: For each layer that takes a gradient the parameters that train.
        precision: The types in which the layers compute.
        recompute: Recomputes each active layer in backward.
        mesh: This rank's view.
        num_layers: Of the whole model; the last one is the head.
        reads_features: The stage gets whole features (B, T, D) of cached layers, and not what a stage below sends.
    """

    def __init__(
        self, layers: dict[int, nn.Module], active_parameters: ParametersByLayer, precision: Precision, recompute: bool,
        mesh: RankMesh, num_layers: int, reads_features: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(layers, active_parameters, precision, recompute)
        self._mesh, self._head, self._reads_features = mesh, num_layers - 1, reads_features

    def forward(self, x: Tensor, *, keys: Tensor, **context: Tensor) -> Tensor:
        """Runs the stage on this rank's part of a micro-batch.

        Args:
            x: Inputs or whole features (B, ...) of the rows that the mesh shares out, or this rank's part of the hidden
                state from the stage below.
            keys: (B,), of the same rows.
            context: (B, ...), of the same rows.

        Returns:
            This rank's part of the hidden state; of the head the outputs for its rows.
        """
        self._token_sizes = self._mesh.token_sizes(self._mesh.num_tokens)
        if self._reads_features:
            x = self._cut_tokens(self._cut_width(self._mesh.rows(x)))
        return super().forward(x, keys=keys, **context)

    def _run_frozen(self, x: Tensor, keys: Tensor, context: dict[str, Tensor]) -> Tensor:
        return self._run(self._frozen, x, keys, context)

    def _run(self, layers: list[int], x: Tensor, keys: Tensor, context: dict[str, Tensor]) -> Tensor:
        """Runs layers, also in evaluation in the context that leads attention around the ring."""
        with ShardedRng(keys, self._mesh, self._token_sizes) as numbers:
            return self._run_all(layers, self._plain, x, context, numbers.layer)

    def _run_layer(self, index: int, call: LayerCall, x: Tensor, context: dict[str, Tensor]) -> Tensor:
        mesh = self._mesh
        if index == 0:
            mesh.place = "embed"
            own = {name: mesh.rows(tensor) for name, tensor in context.items()}
            return self._cut_tokens(self._to_hidden_width(self._precision.run_layer(call, mesh.rows(x), own)))
        if index == self._head:
            mesh.place = "whole"
            own = {name: mesh.rows(tensor) for name, tensor in context.items()}
            return self._precision.run_layer(call, self._gather_tokens(self._to_whole_width(x)), own)
        mesh.place, rings = "hidden", mesh.num_rings
        own = {name: mesh.inner_rows(tensor) for name, tensor in context.items()}
        output = self._precision.run_layer(call, x, own)
        if mesh.tokens.size > 1 and mesh.num_rings == rings:
            self._check_heads(index)
        return output

    def _check_heads(self, index: int) -> None:
        """Refuses a block that has heads, none of which have gone around the ring."""
        layer = self.layers[str(index)]
        if head_counts(layer):
            raise UserError(
                f"`cp`={self._mesh.tokens.size} splits the tokens, and layer {index} computes its attention without "
                "torch's scaled_dot_product_attention, so that tokens would not see each other; call that, or take "
                "`cp`=1"
            )

    def _to_hidden_width(self, x: Tensor) -> Tensor:
        return x if self._mesh.mesh.splits_hidden else all_gather(x, self._mesh.hidden, -1)

    def _cut_width(self, x: Tensor) -> Tensor:
        axis = self._mesh.hidden
        return x.chunk(axis.size, -1)[axis.index] if self._mesh.mesh.splits_hidden else x

    def _to_whole_width(self, x: Tensor) -> Tensor:
        return all_gather(x, self._mesh.hidden, -1) if self._mesh.mesh.splits_hidden else x

    def _cut_tokens(self, x: Tensor) -> Tensor:
        axis, sizes = self._mesh.tokens, self._token_sizes
        return x if axis.size == 1 else own_slice(x, 1, sum(sizes[: axis.index]), sizes[axis.index])

    def _gather_tokens(self, x: Tensor) -> Tensor:
        """All-gathers (B, t, D) to (B, T, D); parts are padded to one size on the way."""
        axis, sizes = self._mesh.tokens, self._token_sizes
        if axis.size == 1:
            return x
        most = max(sizes)
        padded = all_gather(F.pad(x, (0, 0, 0, most - x.shape[1])), axis, 1)
        return torch.cat([part[:, :size] for part, size in zip(padded.split(most, 1), sizes, strict=True)], 1)
