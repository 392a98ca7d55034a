"""Moves the pieces of layers between ranks where the mesh changes: a rank receives what it lacks of its new part.

For each layer, one after the other, so that a rank has at most one layer twice::

    old part      +-------+            new part      +-------+
                  | a | b |     ->                   | b | c |     b stays on the rank, c comes from others
                  +-------+                          +-------+

Optimizer state is cut as its parameters are; scalars such as step counts go along in the manifest.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pipetransformer.autodp.pieces import Shard
from pipetransformer.autodp.transition import Move, Transition
from pipetransformer.mesh import Box, Style, area, intersection, within
from pipetransformer.models.tp_plan import WHOLE_PART, Part
from pipetransformer.runtime.resident import REFERENCE, OptimizerState, ResidentLayers, as_bytes
from pipetransformer.runtime.transfer import gather_manifests, send_layers

Key = tuple[str, str]
"""A parameter or buffer by its own name, and the key of optimizer state or nothing."""


class Entry(NamedTuple):
    """A tensor of a layer.

    Attributes:
        shape: Of the whole of it.
        part: How a mesh splits it.
        scalar: A tensor without dimensions, which every holder has.
    """

    name: str
    key: str
    shape: torch.Size
    dtype: torch.dtype
    part: Part
    scalar: Tensor | None

    def num_bytes(self, box: Box) -> int:
        """Returns the bytes of a box of it."""
        return int(self.shape.numel() * area(box)) * self.dtype.itemsize


def change_holders(resident: ResidentLayers, last: Transition | None, transition: Transition) -> int:
    """Gives each layer the form that it has in the next plan, and moves what moves. Every rank of the world calls it.

    Args:
        resident: The layers of this rank, which has entered the next plan.
        last: The transition to the plan before; ``None`` before the first plan, to which nothing moves.

    Returns:
        Bytes sent by all ranks together.
    """
    cuts = resident.cuts
    if last is None:
        cuts.cut_first(transition.meshes)
        return 0
    for layer, (old, new) in enumerate(zip(last.meshes, transition.meshes, strict=True)):
        if old == new:
            cuts.take_form(layer, new)  # another one only where this rank was idle, and has nothing of it
    num_bytes = send_layers(resident, tuple(move for move in transition.moves if not move.pieces))
    num_bytes += send_pieces(resident, last, transition)
    cuts.held_as = transition.meshes
    return num_bytes


def send_pieces(resident: ResidentLayers, last: Transition, transition: Transition) -> int:
    """Gives layers whose mesh changes their new form, and each rank what it lacks. Every rank of the world calls it.

    Args:
        resident: The layers of this rank, which has entered the next plan.
        last: The transition to the plan before.
        transition: To the next plan.

    Returns:
        Bytes sent by all ranks together.
    """
    pairs = enumerate(zip(last.meshes, transition.meshes, strict=True))
    changed = [layer for layer, (old, new) in pairs if old != new]
    if not changed:
        return 0
    rank, num_bytes = dist.get_rank(), 0
    owned = [layer for layer in changed if min(last.placement[layer]) == rank]
    manifests = gather_manifests({layer: tuple(_entries(resident, layer)) for layer in owned})
    moves: defaultdict[int, list[Move]] = defaultdict(list)
    for move in transition.moves:
        moves[move.layer].append(move)
    for layer in changed:
        num_bytes += _Change(resident, layer, last, transition, manifests[layer]).carry_out(moves[layer])
    return num_bytes


def _entries(resident: ResidentLayers, layer: int) -> Iterator[Entry]:
    """Yields the tensors of a layer that this rank holds a part of."""
    parts, module = resident.cuts.parts(layer), resident.stack[layer]
    for name, key, tensor in resident.tensors(layer):
        part, shape = parts.get(module.original_name(name), (WHOLE_PART, tensor.shape))
        scalar = None if tensor.ndim else tensor.detach().cpu()
        yield Entry(name, key, shape if tensor.ndim else tensor.shape, tensor.dtype, part, scalar)


@dataclass(frozen=True)
class _Change:
    """The change of one layer from the part of one mesh to that of another."""

    resident: ResidentLayers
    layer: int
    last: Transition
    transition: Transition
    entries: tuple[Entry, ...]

    def carry_out(self, moves: list[Move]) -> int:
        """Sends, receives and puts together; returns the bytes of all ranks."""
        rank, resident = dist.get_rank(), self.resident
        holds = rank in self.last.placement[self.layer]
        old = {(name, key): tensor.detach() for name, key, tensor in resident.tensors(self.layer)} if holds else {}
        sizes = {move: num_bytes for move in moves if (num_bytes := self._num_bytes(move))}
        received = self._exchange(sizes, old)
        resident.cuts.take_form(self.layer, self.transition.meshes[self.layer])
        resident.optimizer_state.pop(self.layer, None)
        if rank in self.transition.placement[self.layer]:
            self._put_together(old, received)
        else:
            resident.stack[self.layer].to("meta")
        return sum(sizes.values())

    def _exchange(self, sizes: Mapping[Move, int], old: Mapping[Key, Tensor]) -> dict[Move, Tensor]:
        """Sends and receives messages of the given bytes; returns those that this rank gets."""
        rank, received, operations = dist.get_rank(), dict[Move, Tensor](), list[dist.P2POp]()
        for move, num_bytes in sizes.items():
            if rank == move.source:
                operations.append(dist.P2POp(dist.isend, self._pack(move, old), move.target))
            elif rank == move.target:
                received[move] = torch.empty(num_bytes, dtype=torch.uint8, device=self.resident.device)
                operations.append(dist.P2POp(dist.irecv, received[move], move.source))
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        return received

    def _pieces(self, move: Move) -> Iterator[tuple[Entry, Box]]:
        """Yields what a message has in it, in its order."""
        for entry in self.entries:
            if entry.scalar is None:
                yield from ((entry, box) for style, box in move.pieces if style == entry.part.style)

    def _num_bytes(self, move: Move) -> int:
        return sum(entry.num_bytes(box) for entry, box in self._pieces(move))

    def _held(self, transition: Transition, style: Style, rank: int) -> Box:
        """Returns the box that a rank has of the tensors of a style after a transition."""
        return Shard.of(transition.meshes[self.layer], rank).box(style)

    def _pack(self, move: Move, old: Mapping[Key, Tensor]) -> Tensor:
        parts = list[Tensor]()
        for entry, box in self._pieces(move):
            inside = within(box, self._held(self.last, entry.part.style, move.source))
            parts.append(entry.part.cut(old[entry.name, entry.key], inside))
        return as_bytes(parts, self.resident.device)

    @torch.no_grad()
    def _put_together(self, old: Mapping[Key, Tensor], received: Mapping[Move, Tensor]) -> None:
        new, state = dict[Key, Tensor](), OptimizerState()
        layer = self.resident.stack[self.layer]
        layer.to_empty(device=self.resident.device)
        own = dict([*layer.named_parameters(), *layer.named_buffers()])
        common = {style: self._common(style) for style in {entry.part.style for entry in self.entries}}
        for entry in self.entries:
            key = entry.name, entry.key
            new[key] = self._empty(entry) if entry.key else own[entry.name]
            if entry.key:
                state.setdefault(entry.name, {})[entry.key] = new[key]
            elif entry.scalar is not None:
                own[entry.name].copy_(entry.scalar)
            if old and entry.scalar is None and (boxes := common[entry.part.style]):
                before, after = boxes
                entry.part.paste(new[key], after, entry.part.cut(old[key], before))
        for move, data in received.items():
            self._unpack(move, data, new)
        if state:
            self.resident.optimizer_state[self.layer] = state

    def _empty(self, entry: Entry) -> Tensor:
        """Returns optimizer state of this rank's new part, yet to be filled; a scalar as it is."""
        if entry.scalar is not None:
            return entry.scalar.clone()
        box = self._held(self.transition, entry.part.style, dist.get_rank())
        shape = entry.part.cut(torch.empty(entry.shape, device="meta"), box).shape
        device = "cpu" if entry.key == REFERENCE else self.resident.device
        return torch.empty(shape, dtype=entry.dtype, device=device)

    def _common(self, style: Style) -> tuple[Box, Box] | None:
        """Returns what this rank's old and new part have in common, as fractions of each; ``None`` for nothing."""
        before, after = (self._held(each, style, dist.get_rank()) for each in (self.last, self.transition))
        common = intersection(before, after)
        return None if common is None else (within(common, before), within(common, after))

    def _unpack(self, move: Move, data: Tensor, new: Mapping[Key, Tensor]) -> None:
        start = 0
        for entry, box in self._pieces(move):
            end = start + entry.num_bytes(box)
            values = data[start:end].clone().view(entry.dtype)
            inside = within(box, self._held(self.transition, entry.part.style, move.target))
            entry.part.paste(new[entry.name, entry.key], inside, values)
            start = end
