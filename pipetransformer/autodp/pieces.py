"""Pieces of parameters that move where the mesh of a stage changes: each rank receives what it lacks, and nothing else.

A layer's matrices of one style, from ``tp=4`` to ``tp=2`` with two replicas::

    before   rank 0 [a]   rank 1 [b]   rank 2 [c]   rank 3 [d]
    after    rank 0 [a b] rank 1 [c d] rank 2 [a b] rank 3 [c d]
    pieces   b: 1 -> 0    c: 2 -> 1    a: 0 -> 2    c: 2 -> 3       not the whole layer to everyone
                          d: 3 -> 1    b: 1 -> 2
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from pipetransformer.mesh import STYLES, Box, StageMesh, Style, area, intersection, lacking

StyledBox = tuple[Style, Box]
"""A box of all parameters of a style."""


@dataclass(frozen=True)
class Shard:
    """The part of a layer that a rank holds: that of a rank of a mesh.

    Attributes:
        rank: Counted in the mesh.
    """

    mesh: StageMesh
    rank: int

    @classmethod
    def of(cls, mesh: StageMesh, rank: int) -> "Shard":
        """Returns the part that a rank of the world has: the meshes of a plan follow each other."""
        return cls(mesh, rank % mesh.num_ranks)

    def box(self, style: Style) -> Box:
        """Returns what it has of each parameter of a style."""
        return self.mesh.box(style, self.rank)


@dataclass(frozen=True)
class Piece:
    """A box of all parameters of a style, from one rank to another."""

    style: Style
    box: Box
    source: int
    target: int


def pieces_between(old: Mapping[int, Shard], new: Mapping[int, Shard]) -> list[Piece]:
    """Returns the pieces of a layer that lead from its old holders to its new ones.

    Args:
        old, new: The shard of each rank that holds a part of the layer; the old ones together hold all of it.

    Returns:
        By style and target. Of several holders of a box, the one that has sent least sends.
    """
    sent: defaultdict[int, Fraction] = defaultdict(Fraction)
    found: list[Piece] = []
    for style in STYLES:
        holders: defaultdict[Box, list[int]] = defaultdict(list)
        for rank in sorted(old):
            holders[old[rank].box(style)].append(rank)
        for target in sorted(new):
            held = old[target].box(style) if target in old else None
            for piece in lacking(new[target].box(style), held):
                found += _from_holders(piece, style, target, holders, sent)
    return found


def _from_holders(
    wanted: Box, style: Style, target: int, holders: Mapping[Box, list[int]], sent: defaultdict[int, Fraction]
) -> list[Piece]:
    """Divides a piece between those who hold it."""
    found, left = list[Piece](), [wanted]
    for box, ranks in sorted(holders.items()):
        rest: list[Box] = []
        for part in left:
            common = intersection(part, box)
            if common is None:
                rest.append(part)
                continue
            source = min(ranks, key=lambda rank: (sent[rank], rank))
            sent[source] += area(common)
            found.append(Piece(style, common, source, target))
            rest += lacking(part, box)
        left = rest
    assert not left, f"nobody holds {left} of the {style} parameters"
    return found


@lru_cache(maxsize=256)  # the layers of a stage have the same holders
def pieces_by_ranks(
    mesh: StageMesh, holders: tuple[int, ...], next_mesh: StageMesh, wanted: tuple[int, ...]
) -> tuple[tuple[int, int, tuple[StyledBox, ...]], ...]:
    """Returns the pieces of a layer by target and source.

    Args:
        mesh: Of those that hold a part of the layer.
        holders: These ranks.
        next_mesh: Of those that want a part of it.
        wanted: These ranks.

    Returns:
        Source, target, and what goes from the one to the other.
    """
    old = {rank: Shard.of(mesh, rank) for rank in holders}
    found: defaultdict[tuple[int, int], list[StyledBox]] = defaultdict(list)
    for piece in pieces_between(old, {rank: Shard.of(next_mesh, rank) for rank in wanted}):
        found[piece.target, piece.source].append((piece.style, piece.box))
    return tuple((source, target, tuple(own)) for (target, source), own in sorted(found.items()))


def share_of(pieces: Iterable[StyledBox], styles: tuple[Style, ...]) -> float:
    """Returns the share of a layer's numbers in pieces of it, the mean over the styles of its matrices."""
    return float(sum((area(box) for style, box in pieces if style in styles), Fraction(0)) / len(styles))


def share_moved(pieces: list[Piece], style: Style) -> Fraction:
    """Returns how many times the parameters of a style move, over all ranks."""
    return sum((area(piece.box) for piece in pieces if piece.style == style), Fraction(0))
