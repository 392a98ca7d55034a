"""Snapshots of a rank's layers in host memory, and the way back: what a checkpoint holds of the runtime.

Tensors have names of the original model, whatever the plan::

    weights/bert.encoder.layer.0.output.dense.weight
    optimizer/bert.encoder.layer.0.output.dense.weight/exp_avg
"""

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from pipetransformer.autodp.transition import Placement
from pipetransformer.host_copies import HostCopies
from pipetransformer.models.stack import Layer
from pipetransformer.runtime.fsdp import gather
from pipetransformer.runtime.mesh_transfer import gather_layer, pack, unpack
from pipetransformer.runtime.resident import REFERENCE, OptimizerState, ResidentLayers

WEIGHTS, OPTIMIZER = "weights/", "optimizer/"
State = Mapping[Tensor, Mapping[str, Tensor]]
"""State of an optimizer by parameter."""


class LayerSource(Protocol):
    """Layers of a checkpoint."""

    def weights(self, layer: int) -> Iterator[tuple[str, Tensor]]:
        """Yields the initial tensors of a layer, as :attr:`LayerStack.source` does."""
        ...

    def optimizer_state(self, layer: int) -> OptimizerState:
        """Returns the optimizer's tensors by the names of the layer's own parameters and by key."""
        ...


def writers(placement: Placement, fsdp: bool) -> list[int]:
    """Returns for each layer the rank that writes it: one that holds it, in turns where several do.

    With FSDP a layer is all-gathered to every rank, and any one can.
    """
    world_size = dist.get_world_size()
    return [layer % world_size if fsdp else ranks[layer % len(ranks)] for layer, ranks in enumerate(placement)]


def snapshot(resident: ResidentLayers, state: State, placement: Placement, fsdp: bool) -> dict[int, dict[str, Tensor]]:
    """Copies weights and optimizer state of the layers that this rank writes to host memory. Collective with FSDP.

    One layer is all-gathered at a time. The device copies while the host goes on to the next one.
    """
    if resident.cuts.any:
        return _snapshot_of_parts(resident, state, placement)
    copies, host = dict[int, dict[str, Tensor]](), HostCopies(resident.device)
    for layer, writer in enumerate(writers(placement, fsdp)):
        if writer == dist.get_rank():
            copies[layer] = {name: host.copy(gather(tensor)) for name, tensor in _tensors(resident.stack[layer], state)}
        elif fsdp:
            for _, tensor in _tensors(resident.stack[layer], state):
                gather(tensor)
    host.wait()
    return copies


def _snapshot_of_parts(resident: ResidentLayers, state: State, placement: Placement) -> dict[int, dict[str, Tensor]]:
    """Gathers each layer on the rank that writes it, from those that have a part of it. Collective."""
    copies = dict[int, dict[str, Tensor]]()
    for layer, writer in enumerate(writers(placement, fsdp=False)):
        own: dict[str, Tensor] = {}
        if resident.holds(layer):
            own = dict(_tensors(resident.stack[layer], state))
        found = gather_layer(resident, placement, layer, own, writer)
        if found is not None:
            copies[layer] = found
    return copies


def _tensors(layer: Layer, state: State) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in layer.tensors():
        yield WEIGHTS + name, tensor.detach()
        own = state.get(tensor, {}) if isinstance(tensor, nn.Parameter) else {}
        for key, value in sorted(own.items()):  # ranks gather in the same order, whatever that of a file was
            yield f"{OPTIMIZER}{name}/{key}", _as_sharded(tensor, value)


def gather_optimizer_state(
    copies: Mapping[int, Mapping[str, Tensor]], placement: Placement, fsdp: bool
) -> OptimizerState:
    """Gathers the optimizer state of all ranks' snapshots on rank 0; empty on the others. Every rank calls it.

    Returns:
        Tensors by the parameter's original name and by key.
    """
    gathered: OptimizerState = {}
    for layer, writer in enumerate(writers(placement, fsdp)):
        own = {path: tensor for path, tensor in copies.get(layer, {}).items() if path.startswith(OPTIMIZER)}
        if writer != 0 and dist.get_rank() == writer:
            dist.send_object_list([pack(own)], 0)
        elif writer != 0 and dist.get_rank() == 0:
            part: list[Any] = [None]
            dist.recv_object_list(part, writer)
            own = unpack(part[0])
        for path, tensor in own.items() if dist.get_rank() == 0 else ():
            name, _, key = path.removeprefix(OPTIMIZER).rpartition("/")
            gathered.setdefault(name, {})[key] = tensor
    return gathered


@torch.no_grad()
def load_layers(
    resident: ResidentLayers, weights: Mapping[str, Tensor], state: OptimizerState
) -> Iterator[tuple[int, OptimizerState]]:
    """Copies rank 0's weights into the layers that each rank holds, a layer at a time. Every rank iterates.

    Args:
        weights: By original names; used on rank 0.
        state: Optimizer state by original names; used on rank 0.

    Yields:
        Each layer that this rank holds, with its optimizer state by the names of its own parameters.
    """
    for index in range(len(resident.stack)):
        layer = resident.stack[index]
        aliases = layer.alias_names()
        names = [name for name in layer.original_state() if name not in aliases]
        part: list[Any] = [None]
        if dist.get_rank() == 0:
            part = [({name: weights[name] for name in names}, {name: state[name] for name in names if name in state})]
        dist.broadcast_object_list(part)
        if resident.holds(index):
            given, state_of_layer = part[0]
            for name, tensor in layer.tensors():
                if name in given:  # the others are buffers that do not change
                    tensor.copy_(_shard(tensor, layer.own_part(name, given[name]), keep_dtensor=True))
            copies = {name: {key: value.clone() for key, value in own.items()} for name, own in state_of_layer.items()}
            yield index, to_own_names(layer, copies)  # what was given stays as it is when training goes on


def _as_sharded(parameter: Tensor, value: Tensor) -> Tensor:
    """Returns optimizer state of a shard as a DTensor like its parameter and beside it; any other state as it is."""
    if not isinstance(parameter, DTensor) or not value.ndim:
        return value
    value = value.to(parameter.device)  # what is parked, and references, are in host memory
    if isinstance(value, DTensor):
        return value
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(value, mesh, placements, shape=parameter.shape, stride=parameter.stride())


def to_own_names(layer: Layer, state: OptimizerState) -> OptimizerState:
    """Renames optimizer state from names of the original model to those of a layer's own parameters."""
    own = {layer.original_name(name): name for name, _ in layer.named_parameters()}
    return {own[name]: tensors for name, tensors in state.items()}


@torch.no_grad()
def shard_state(layer: Layer, state: OptimizerState, keep_dtensors: bool) -> OptimizerState:
    """Returns this rank's shard of whole optimizer state, for parameters that FSDP has sharded.

    Args:
        keep_dtensors: The optimizer runs on DTensors and not on local shards.
    """
    parameters = dict(layer.named_parameters())
    return {
        name: {
            key: _shard(parameters[name], value, keep_dtensors)
            if key != REFERENCE
            else _shard(parameters[name], value, keep_dtensor=False).cpu()
            for key, value in tensors.items()
        }
        for name, tensors in state.items()
    }


def _shard(parameter: Tensor, value: Tensor, keep_dtensor: bool) -> Tensor:
    if not isinstance(parameter, DTensor) or not value.ndim:
        return value
    whole = value.to(parameter.device)
    sharded = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
    return sharded if keep_dtensor else sharded.to_local().clone()
