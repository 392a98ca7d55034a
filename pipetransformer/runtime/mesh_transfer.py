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
from pipetransformer.runtime.resident import ResidentLayers, as_bytes, from_bytes

Tensors = dict[str, Tensor]
Packed = tuple[dict[str, tuple[torch.Size, torch.dtype]], Tensor]
"""The shapes and types of tensors by name, and their bytes one after another (num_bytes,)."""


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
    dist.gather_object(pack(own if rank in _senders(resident, placement, layer) else {}), gathered, target)
    return None if gathered is None else _together(resident, layer, gathered)


def all_gather_layer(resident: ResidentLayers, placement: Placement, layer: int) -> Tensors:
    """Gathers the weights and buffers of a layer on every rank, by original name. All ranks of the world call it."""
    gathered: list[Any] = [None] * dist.get_world_size()
    is_sender = dist.get_rank() in _senders(resident, placement, layer)
    dist.all_gather_object(gathered, pack(dict(resident.stack[layer].tensors()) if is_sender else {}))
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
        own = resident.stack[layer].original_state() if resident.holds(layer) else {}
        state |= gather_layer(resident, placement, layer, own, target=0) or {}
    return state if dist.get_rank() == 0 else None


def _senders(resident: ResidentLayers, placement: Placement, layer: int) -> tuple[int, ...]:
    return lowest_of_each_part(placement[layer], resident.cuts.held_as[layer].num_ranks)


def pack(tensors: Mapping[str, Tensor]) -> Packed:
    """Packs tensors into one in host memory, to be sent as one object; pickling each takes longer than to move it."""
    forms = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
    return forms, as_bytes(tensors.values(), torch.device("cpu"))


def unpack(packed: Packed) -> Tensors:
    """Returns the tensors that :func:`pack` packed, in host memory."""
    forms, data = packed
    return dict(zip(forms, from_bytes(data, forms.values()), strict=True))


def _together(resident: ResidentLayers, layer: int, gathered: Iterable[Packed]) -> Tensors:
    """Puts the parts of a layer together, by the rank that sent them."""
    parts, mesh, whole = resident.cuts.parts(layer), resident.cuts.held_as[layer], Tensors()
    for rank, sent in enumerate(gathered):
        for path, own in unpack(sent).items():
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
