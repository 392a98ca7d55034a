"""Layers in one piece, put together from the parts that the ranks of a mesh hold: to save, and to lend frozen ones.

Tensors have names of the original model, or of a snapshot: ``weights/<name>`` and ``optimizer/<name>/<key>``.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipetransformer.autodp.transition import Placement, lowest_of_each_part
from pipetransformer.models.layer import Layer
from pipetransformer.runtime.resident import ResidentLayers

Tensors = dict[str, Tensor]


def gather_layer(
    resident: ResidentLayers, placement: Placement, layer: int, own: Mapping[str, Tensor], target: int
) -> Tensors | None:
    """Gathers a layer on one rank. Every rank of the world calls it.

    Args:
        placement: The ranks that hold a part of each layer.
        own: What this rank has of it; not looked at on a rank that has nothing.
        target: The rank that gets the layer.

    Returns:
        The whole tensors in host memory, on the target; ``None`` on the others.
    """
    rank = dist.get_rank()
    gathered: list[Any] | None = [None] * dist.get_world_size() if rank == target else None
    dist.gather_object(dict(own) if rank in _senders(resident, placement, layer) else None, gathered, target)
    return None if gathered is None else _together(resident, layer, gathered)


def all_gather_layer(resident: ResidentLayers, placement: Placement, layer: int) -> Tensors:
    """Gathers the weights and buffers of a layer on every rank, by original name. All ranks of the world call it."""
    gathered: list[Any] = [None] * dist.get_world_size()
    is_sender = dist.get_rank() in _senders(resident, placement, layer)
    own = {name: tensor.detach().cpu() for name, tensor in resident.stack[layer].tensors()} if is_sender else None
    dist.all_gather_object(gathered, own)
    return _together(resident, layer, gathered)


def whole_layers(resident: ResidentLayers, placement: Placement, layers: Iterable[int]) -> dict[int, Layer]:
    """Returns layers in one piece on every rank, from the parts that ranks hold. All ranks of the world call it."""
    found: dict[int, Layer] = {}
    for layer in layers:
        tensors = all_gather_layer(resident, placement, layer)
        found[layer] = resident.cuts.whole_twin(layer)
        found[layer].fill(tensors.items(), resident.device)
    return found


def gather_sharded_state_dict(resident: ResidentLayers, placement: Placement) -> Tensors | None:
    """Gathers all weights under their original names on rank 0, a layer at a time. All ranks of the world call it."""
    state: Tensors = {}
    for layer in range(len(resident.stack)):
        own: Tensors = {}
        if resident.holds(layer):
            own = {name: tensor.detach().cpu() for name, tensor in resident.stack[layer].original_state().items()}
        state |= gather_layer(resident, placement, layer, own, target=0) or {}
    return state if dist.get_rank() == 0 else None


def _senders(resident: ResidentLayers, placement: Placement, layer: int) -> tuple[int, ...]:
    return lowest_of_each_part(placement[layer], resident.cuts.held_as[layer].num_ranks)


def _together(resident: ResidentLayers, layer: int, gathered: list[Any]) -> Tensors:
    """Puts the parts of a layer together, by the rank that sent them."""
    parts, mesh, whole = resident.cuts.parts(layer), resident.cuts.held_as[layer], Tensors()
    for rank, sent in enumerate(gathered):
        for path, own in (sent or {}).items():
            name = parameter_name(path)
            if name not in parts or not own.ndim:
                whole[path] = own
                continue
            part, shape = parts[name]
            if path not in whole:
                whole[path] = torch.empty(shape, dtype=own.dtype)
            part.paste(whole[path], mesh.box(part.style, rank % mesh.num_ranks), own)
    return whole


def parameter_name(path: str) -> str:
    """Returns the original name of the parameter that a tensor of a snapshot belongs to."""
    kind, _, rest = path.partition("/")
    if kind == "weights":
        return rest
    return rest.rpartition("/")[0] if kind == "optimizer" else path
