"""Moves layers between ranks, in memory and straight from sender to receiver."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import TypeVar

import torch
import torch.distributed as dist

from pipetransformer.autodp.transition import Move, Placement
from pipetransformer.models.layer import Layer
from pipetransformer.runtime.resident import Manifest, ResidentLayers

Described = TypeVar("Described")


def send_layers(resident: ResidentLayers, moves: tuple[Move, ...]) -> int:
    """Carries out all moves at once. Every rank of the world calls it with the same moves.

    Args:
        resident: The layers of this rank.
        moves: Layers with their senders and receivers.

    Returns:
        Bytes sent by all ranks together.
    """
    if not moves:
        return 0
    rank = dist.get_rank()
    sent = {move.layer for move in moves if move.source == rank}
    manifests = gather_manifests({layer: resident.manifest(layer) for layer in sent})
    packed = {layer: resident.pack(layer) for layer in sent}
    received: dict[int, torch.Tensor] = {}
    operations = []
    for move in moves:
        if _num_bytes(manifests[move.layer]) == 0:
            if move.target == rank:
                received[move.layer] = torch.empty(0, dtype=torch.uint8, device=resident.device)
        elif move.source == rank:
            operations.append(dist.P2POp(dist.isend, packed[move.layer], move.target))
        elif move.target == rank:
            buffer = torch.empty(_num_bytes(manifests[move.layer]), dtype=torch.uint8, device=resident.device)
            received[move.layer] = buffer
            operations.append(dist.P2POp(dist.irecv, buffer, move.source))
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()
    for layer, buffer in received.items():
        resident.unpack(layer, manifests[layer], buffer)
    return sum(_num_bytes(manifests[move.layer]) for move in moves)


def gather_manifests(own: dict[int, Described]) -> dict[int, Described]:
    """All-gathers what there is of layers, each of which one rank or several alike describe."""
    gathered: list[dict[int, Described]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, own)
    return {layer: manifest for part in gathered for layer, manifest in part.items()}


def _num_bytes(manifest: Manifest) -> int:
    return sum(shape.numel() * dtype.itemsize for _, _, shape, dtype in manifest)


@contextmanager
def borrowed(resident: ResidentLayers, placement: Placement, layers: range, at_once: bool = True) -> Iterator[None]:
    """Broadcasts the weights of layers to every rank, and frees the borrowed ones at the end.

    All ranks enter it together; each leaves alone.

    Args:
        at_once: A rank's own layers are on its device inside; otherwise they stay where they are.
    """
    borrowed = _broadcast_layers(resident, placement, layers)
    owned = [resident.stack[layer] for layer in layers if at_once and layer not in borrowed]
    try:
        with on_device(owned, resident.device):
            yield
    finally:
        for index in borrowed:
            resident.stack[index].to("meta")


@contextmanager
def on_device(layers: Sequence[Layer], device: torch.device) -> Iterator[None]:
    """Keeps layers on a device inside: offloaded ones, and those of chunks, lie in host memory otherwise."""
    # the weights of chunks lie in host memory, and their buffers on the device
    homes = [(each, each.data) for own in layers for each in chain(own.parameters(), own.buffers())]
    try:
        for layer in layers:
            layer.to(device)
        yield
    finally:
        for tensor, home in homes:
            if tensor.device != home.device:
                tensor.data = home  # a view of its chunk, in which averages and the next pass look for it


def _broadcast_layers(resident: ResidentLayers, placement: Placement, layers: range) -> list[int]:
    """Broadcasts the weights of layers from their lowest holder to every rank that lacks them.

    Returns:
        The layers that this rank borrowed.
    """
    rank = dist.get_rank()
    owned = [layer for layer in layers if min(placement[layer]) == rank]
    manifests = gather_manifests({layer: resident.manifest(layer, with_state=False) for layer in owned})
    borrowed = []
    for layer in layers:
        if len(placement[layer]) == dist.get_world_size():
            continue
        source = min(placement[layer])
        data = resident.pack(layer, with_state=False) if rank == source else torch.empty(
            _num_bytes(manifests[layer]), dtype=torch.uint8, device=resident.device
        )  # fmt: skip
        if len(data):
            dist.broadcast(data, source)
        if not resident.holds(layer):  # it may have borrowed the layer before, and still use it
            resident.unpack(layer, manifests[layer], data)
            borrowed.append(layer)
    return borrowed


def gather_state_dict(resident: ResidentLayers, placement: Placement) -> dict[str, torch.Tensor] | None:
    """Gathers all weights under their original names. All ranks call it.

    One layer is sent at a time, so rank 0 needs memory for the model on the host only.

    Returns:
        The weights in host memory on rank 0; ``None`` on the other ranks.
    """
    rank = dist.get_rank()
    owners = [min(ranks) for ranks in placement]
    manifests = gather_manifests(
        {layer: resident.manifest(layer, with_state=False) for layer in range(len(owners)) if owners[layer] == rank}
    )
    state: dict[str, torch.Tensor] = {}
    for layer, owner in enumerate(owners):
        lacks = rank == 0 and not resident.holds(layer)  # a layer of another rank may be borrowed, and still be used
        if not _num_bytes(manifests[layer]):
            continue
        if owner == rank and rank != 0:
            dist.send(resident.pack(layer, with_state=False), 0)
        elif rank == 0 and owner != 0:
            data = torch.empty(_num_bytes(manifests[layer]), dtype=torch.uint8, device=resident.device)
            dist.recv(data, owner)
            if lacks:
                resident.unpack(layer, manifests[layer], data)
        if rank == 0:
            original = resident.stack[layer].original_state()
            state |= {name: tensor.detach().cpu().clone() for name, tensor in original.items()}
        if lacks:
            resident.stack[layer].to("meta")
    return state if rank == 0 else None
