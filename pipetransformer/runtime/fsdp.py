"""Layers of which every rank keeps a shard, by torch's FSDP2 (Zhao et al., VLDB 2023; Rajbhandari et al., SC 2020).

A rank has a layer whole only while it runs; gradients and optimizer state are sharded as the weights are::

    forward    all-gather 0, run, reshard    all-gather 1, run, reshard    ...
    backward   all-gather 2, run, reshard, reduce-scatter its gradient    all-gather 1, ...

FSDP reduce-scatters after each micro-batch, so no rank ever holds more of the gradient than its shard and two layers.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from pipetransformer.optim.base import OptimizerSpec
from pipetransformer.optim.sharded import LocalShardOptimizer
from pipetransformer.runtime.resident import ResidentLayers
from pipetransformer.runtime.stage import ParametersByLayer, Stage


class FsdpLayers(nn.Module):
    """All layers of the model, sharded over all ranks of the world from the first plan to the end of the run.

    Freezing does not touch the shards: a frozen layer runs without gradient, a cached one does not run, and both keep
    their shard where it is. FSDP prefetches a layer while another runs where both run under one module: this one.

    Args:
        resident: Each layer is loaded whole, sharded, and only then the next one, so that a large model starts.
        group: All ranks of the world.
    """

    def __init__(self, resident: ResidentLayers, group: ProcessGroup) -> None:
        super().__init__()
        self.stack = resident.stack
        mesh = _mesh_of_its_own(group, resident.device.type)
        for index in range(len(self.stack)):
            resident.load([index])
            sharded = fully_shard(self.stack[index], mesh=mesh, reshard_after_forward=True)
            # asked for a mean, gloo gives the sum in some versions of torch, without an error (its issue 162338)
            sharded.set_force_sum_reduction_for_comms(resident.device.type == "cpu")
        fully_shard(self, mesh=mesh)

    def forward(self, run: Callable[..., Tensor], x: Tensor, **context: Tensor) -> Tensor:
        """Runs layers."""
        return run(x, **context)

    def build_optimizer(self, spec: OptimizerSpec, parameters: ParametersByLayer, own_rates: bool) -> Optimizer | None:
        """Builds the optimizer over sharded parameters; an elementwise one updates local shards."""
        if spec.is_elementwise:
            return LocalShardOptimizer.build(spec, parameters, own_rates)
        return spec.build_layers(parameters, own_rates)

    @contextmanager
    def whole(self, layers: range) -> Iterator[None]:
        """All-gathers layers, and reshards them at the end. All ranks call it.

        Inside, ``layer.forward`` runs a layer as often as a rank likes; calling the layer would all-gather it again.
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
        """Gathers all weights under their original names, one tensor at a time. All ranks call it.

        Returns:
            The weights in host memory on rank 0; ``None`` on the other ranks.
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
        shards: All layers of the model; the other arguments are those of :class:`Stage`.
    """

    def __init__(self, *arguments: Any, shards: FsdpLayers) -> None:
        super().__init__(*arguments)
        self._under_shards: Callable[..., Tensor] = shards.__call__

    def forward(self, x: Tensor, *, keys: Tensor, **context: Tensor) -> Tensor:
        # FSDP moves the tensors that it is given to the device, where the host cannot read keys without waiting
        return self._under_shards(partial(super().forward, keys=keys), x, **context)


def _mesh_of_its_own(group: ProcessGroup, device_type: str) -> DeviceMesh:
    """Builds a mesh that equals no earlier one of this process.

    DTensor caches what its operations return by their meshes, and meshes with the same ranks and names are equal to
    it whatever their groups are. In a second run of one process it would return tensors on groups that are destroyed.
    """
    return DeviceMesh.from_group(group, device_type, mesh_dim_names=(f"dp_shard_{next(_runs)}",))


_runs = count()


def local_part(tensor: Tensor) -> Tensor:
    """Returns a rank's part of a tensor, on the same memory: its shard, or all of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def gather(tensor: Tensor) -> Tensor:
    """Returns a whole tensor on every rank; all-gathers it where it is sharded. All ranks call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
