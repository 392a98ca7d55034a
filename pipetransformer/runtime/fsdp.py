"""Layers of which every rank keeps a shard, by torch's FSDP2 (Zhao et al., VLDB 2023; Rajbhandari et al., SC 2020).

A rank has a layer whole only while it runs; gradients and optimizer state are sharded as the weights are::

    forward    gather 0, run, drop    gather 1, run, drop    gather 2, run, drop
    backward   gather 2, run, drop, deal out its gradient    gather 1, ...

The gradient is dealt out after each micro-batch, so that no rank ever holds more of it than its shard and two layers.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from pipetransformer.runtime.parts import gather
from pipetransformer.runtime.precision import Precision
from pipetransformer.runtime.resident import ResidentLayers
from pipetransformer.runtime.signals import ByLayer
from pipetransformer.runtime.stage import Stage


class FsdpLayers(nn.Module):
    """All layers of the model, sharded over all ranks of the world from the first plan to the end of the run.

    Freezing does not touch the shards: a frozen layer runs without gradient, a cached one does not run, and both keep
    their shard where it is. FSDP fetches a layer while another runs where both run under one module, which is this one.

    Args:
        resident: Each layer is loaded whole, sharded, and only then the next one, so that a large model starts.
    """

    def __init__(self, resident: ResidentLayers) -> None:
        super().__init__()
        self.stack = resident.stack
        world = dist.group.WORLD
        assert world is not None
        mesh = DeviceMesh.from_group(world, resident.device.type)
        for index in range(len(self.stack)):
            resident.load([index])
            sharded = fully_shard(self.stack[index], mesh=mesh, reshard_after_forward=True)
            # asked for a mean, gloo gives the sum in some versions of torch, without an error (its issue 162338)
            sharded.set_force_sum_reduction_for_comms(resident.device.type == "cpu")
        fully_shard(self, mesh=mesh)

    def forward(self, run: Callable[..., Tensor], x: Tensor, **context: Tensor) -> Tensor:
        """Runs layers."""
        return run(x, **context)

    @contextmanager
    def whole(self, layers: range) -> Iterator[None]:
        """Brings layers together on every rank; all ranks call it.

        Inside, ``layer.forward`` runs a layer as often as a rank likes; calling the layer would exchange shards again.
        """
        chosen = [cast("FSDPModule", self.stack[index]) for index in layers]
        for layer in chosen:
            layer.unshard()
        try:
            yield
        finally:
            for layer in chosen:
                layer.reshard()

    def gather_state_dict(self) -> dict[str, Tensor] | None:
        """All weights under their original names, in host memory on rank 0; ``None`` on the other ranks.

        One tensor is brought together at a time.
        """
        state: dict[str, Tensor] = {}
        for index in range(len(self.stack)):
            for name, tensor in self.stack[index].original_state().items():
                gathered = gather(tensor)
                if dist.get_rank() == 0:
                    state[name] = gathered.detach().cpu().clone()
        return state if dist.get_rank() == 0 else None


class ShardedStage(Stage):
    """A stage whose layers are sharded.

    Args:
        shards: All layers of the model; the rest is as in :class:`Stage`.
    """

    def __init__(
        self, layers: dict[int, nn.Module], active_parameters: ByLayer, precision: Precision, recompute: bool,
        shards: FsdpLayers,
    ) -> None:  # fmt: skip
        super().__init__(layers, active_parameters, precision, recompute)
        self._under_shards: Callable[..., Tensor] = shards.__call__

    def forward(self, x: Tensor, **context: Any) -> Tensor:
        return self._under_shards(super().forward, x, **context)
