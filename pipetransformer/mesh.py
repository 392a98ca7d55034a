"""The mesh of ranks that runs a stage together, and the part of each parameter and tensor that a rank has.

A rank runs the library's own modules as if the model were narrower. What it holds of a matrix (out, in) follows from
the style of the parameter, the first axis of a dimension being the major one:

=================== ================== ================== ============================
style               1d (Megatron)      2d (Optimus)       3d (Colossal-AI, y = z)
=================== ================== ================== ============================
colwise (out, in)   tp, dp_shard       tp, dp_shard       y, (z, x)
rowwise (out, in)   dp_shard, tp       tp, dp_shard       z, (y, x)
embedding (n, D)    -, (tp, dp_shard)  -, (tp, dp_shard)  -, z
hidden (D)          whole              tp                 z
inner (F, heads)    tp                 tp                 y
column (D)          tp                 tp                 z
=================== ================== ================== ============================

``hidden`` are norms and biases between products, ``inner`` the biases inside attention and MLP, ``column`` what the
embedding layer adds of its own. Whatever is not split is a copy, and copies get the sum of their gradients.

``tp`` is Megatron's tensor parallelism (Shoeybi et al., 2019), 2d SUMMA as in Optimus (Xu et al., 2021), which with
replicas is Tesseract's 2.5d (Wang et al., 2022), 3d the algorithm of Agarwal et al. (1995) as in Bian et al. (2021).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from math import prod
from typing import Literal, NamedTuple, get_args

from pipetransformer.errors import UserError

Algorithm = Literal["1d", "2d", "3d"]
ReduceDtype = Literal["float32", "precision"]
REDUCE_DTYPES: tuple[ReduceDtype, ...] = get_args(ReduceDtype)
Style = Literal["colwise", "rowwise", "embedding", "hidden", "inner", "column", "whole"]
Span = tuple[Fraction, Fraction]
"""From and to, as fractions of a dimension."""
Box = tuple[Span, Span]
"""The part of a matrix (out, in) that a rank holds; of a vector the first span counts."""

Axes = tuple[str, ...]

_cached = lru_cache(maxsize=4096)  # fractions are slow, and the tensors of all layers have a few boxes
WHOLE_SPAN: Span = (Fraction(0), Fraction(1))
WHOLE: Box = (WHOLE_SPAN, WHOLE_SPAN)
_GRID, _CUBE = ("dp_shard", "cp", "tp"), ("x", "y", "z")
_SPLITS: dict[Algorithm, dict[Style, tuple[tuple[int, str], ...]]] = {
    "1d": {
        "colwise": ((0, "tp"), (1, "dp_shard")),
        "rowwise": ((0, "dp_shard"), (1, "tp")),
        "embedding": ((1, "tp"), (1, "dp_shard")),
        "inner": ((0, "tp"),),
        "column": ((0, "tp"),),
    },
    "2d": {
        "colwise": ((0, "tp"), (1, "dp_shard")),
        "rowwise": ((0, "tp"), (1, "dp_shard")),
        "embedding": ((1, "tp"), (1, "dp_shard")),
        "hidden": ((0, "tp"),),
        "inner": ((0, "tp"),),
        "column": ((0, "tp"),),
    },
    "3d": {
        "colwise": ((0, "y"), (1, "z"), (1, "x")),
        "rowwise": ((0, "z"), (1, "y"), (1, "x")),
        "embedding": ((1, "z"),),
        "hidden": ((0, "z"),),
        "inner": ((0, "y"),),
        "column": ((0, "z"),),
    },
}
STYLES: tuple[Style, ...] = ("colwise", "rowwise", "embedding", "hidden", "inner", "column", "whole")


class Exchange(NamedTuple):
    """An exchange of a product along an axis of the mesh.

    Attributes:
        dim: The dimension that is gathered or scattered; ``None`` for an all-reduce.
    """

    axis: str
    dim: int | None


class Exchanges(NamedTuple):
    """The exchanges of ``leave(enter(x) @ gather(weight).T)``; ``None`` where nothing is exchanged.

    Attributes:
        enter: All-gathers the input.
        gather: All-gathers the weight.
        leave: All-reduces the output, or reduce-scatters it.
    """

    enter: Exchange | None
    gather: Exchange | None
    leave: Exchange | None


@dataclass(frozen=True)
class StageMesh:
    """The ranks that run a stage together.

    Ranks fill the axes in row-major order, ``tp`` or ``z`` fastest.

    Attributes:
        dp_shard: Parts of the rows of the batch; each product all-gathers its weight over them (ZeRO-3).
        cp: Parts of the tokens; attention passes keys and values around a ring.
        tp: Parts of heads and widths.
        algorithm: ``1d`` and ``2d`` have the axes dp_shard, cp and tp; ``3d`` has x = dp_shard and y = z = tp, which
            are dp_shard times tp squared ranks.
        reduce_dtype: In which more than two ranks sum activations and gradients of 16 bits: ``float32`` rounds a sum
            once, ``precision`` keeps the type that they have, which halves the bytes and rounds in every addition. The
            sum of two is rounded once in any type, and keeps theirs.

    Raises:
        UserError: A number is below 1, or ``3d`` has ``cp`` above 1.
    """

    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    algorithm: Algorithm = "1d"
    reduce_dtype: ReduceDtype = "float32"

    def __post_init__(self) -> None:
        for name in _GRID:
            if getattr(self, name) < 1:
                raise UserError(f"parallel.{name}={getattr(self, name)} must be at least 1")
        if self.algorithm not in _SPLITS:
            raise UserError(
                f"parallel.tp_algorithm={self.algorithm} does not exist; choose one of {', '.join(_SPLITS)}"
            )
        if self.algorithm == "3d" and self.cp > 1:
            raise UserError(f"parallel.tp_algorithm=3d splits no tokens; drop parallel.cp={self.cp} or take 1d or 2d")

    def __str__(self) -> str:
        """Returns the sizes that are above 1, as ``tp 2 x dp_shard 2 (2d)``; empty for a single rank."""
        sizes = " x ".join(f"{name} {size}" for name in ("tp", "dp_shard", "cp") if (size := getattr(self, name)) > 1)
        return sizes if self.algorithm == "1d" else f"{sizes} ({self.algorithm})"

    @cached_property
    def shape(self) -> dict[str, int]:
        """The size of each axis, in the order in which ranks fill them."""
        sizes = (self.dp_shard, self.tp, self.tp) if self.algorithm == "3d" else (self.dp_shard, self.cp, self.tp)
        return dict(zip(_CUBE if self.algorithm == "3d" else _GRID, sizes, strict=True))

    @cached_property
    def num_ranks(self) -> int:
        return prod(self.shape.values())

    @property
    def row_axes(self) -> tuple[str, ...]:
        """The axes over which the hidden state has its rows split, the major one first."""
        return ("x", "y") if self.algorithm == "3d" else ("dp_shard",)

    @property
    def inner_row_axes(self) -> tuple[str, ...]:
        """The same of what is inside attention and MLP."""
        return ("x", "z") if self.algorithm == "3d" else ("dp_shard",)

    @property
    def hidden_axis(self) -> str:
        """The axis along which widths are split: that of the hidden state in 2d and 3d, and of the embedding."""
        return "z" if self.algorithm == "3d" else "tp"

    @property
    def inner_axis(self) -> str:
        """The axis along which heads and the width of the MLP are split."""
        return "y" if self.algorithm == "3d" else "tp"

    @property
    def splits_hidden(self) -> bool:
        """True where each rank has a part of the hidden state's width."""
        return self.algorithm != "1d"

    @cached_property
    def batch_ways(self) -> int:
        """The parts into which the mesh splits the rows of a batch."""
        return prod(self.shape[axis] for axis in self.row_axes)

    @cached_property
    def rows_multiple(self) -> int:
        """The parts into which the rows of a share of the batch are split once more."""
        return self.batch_ways // self.dp_shard

    @property
    def loss_copies(self) -> int:
        """The ranks that compute the loss of the same rows."""
        return self.num_ranks // self.batch_ways

    def coordinate(self, rank: int) -> dict[str, int]:
        """Returns the index along each axis of a rank of the mesh, 0-based."""
        found: dict[str, int] = {}
        for axis, size in reversed(self.shape.items()):
            rank, found[axis] = divmod(rank, size)
        return {axis: found[axis] for axis in self.shape}

    def rank_of(self, coordinate: Mapping[str, int]) -> int:
        """Returns the rank with an index along each axis."""
        rank = 0
        for axis, size in self.shape.items():
            rank = rank * size + coordinate[axis]
        return rank

    def ranks_along(self, axes: Sequence[str], rank: int) -> tuple[int, ...]:
        """Returns the ranks that differ from one along the given axes alone, ascending."""
        own = self.coordinate(rank)
        return tuple(
            other
            for other in range(self.num_ranks)
            if all(index == own[axis] or axis in axes for axis, index in self.coordinate(other).items())
        )

    def groups(self, first_rank: int = 0) -> Iterator[tuple[Axes, tuple[int, ...]]]:
        """Yields the ranks of each group of the mesh, with its axes, in an order that is the same on every rank.

        They are those along each axis, those that have the same part of the parameters of some style, and all.

        Args:
            first_rank: Rank of the world that is the mesh's rank 0.
        """
        wanted = [*((axis,) for axis in self.shape), *(self.copy_axes(style) for style in STYLES), tuple(self.shape)]
        for axes in dict.fromkeys(wanted):
            seen: set[tuple[int, ...]] = set()
            for rank in range(self.num_ranks):
                ranks = tuple(first_rank + each for each in self.ranks_along(axes, rank))
                if len(ranks) > 1 and ranks not in seen:
                    seen.add(ranks)
                    yield axes, ranks

    def splits(self, style: Style) -> tuple[tuple[int, str], ...]:
        """Returns what splits a parameter: dimension and axis, of one dimension the major axis first."""
        return _SPLITS[self.algorithm].get(style, ())

    def copy_axes(self, style: Style) -> tuple[str, ...]:
        """Returns the axes along which a parameter has copies."""
        used = {axis for _, axis in self.splits(style)}
        return tuple(axis for axis in self.shape if axis not in used)

    def num_copies(self, style: Style) -> int:
        """Returns the ranks that have the same part of a parameter."""
        return prod(self.shape[axis] for axis in self.copy_axes(style))

    @_cached
    def box(self, style: Style, rank: int) -> Box:
        """Returns the part of a parameter that a rank of the mesh has."""
        spans, coordinate = [WHOLE_SPAN, WHOLE_SPAN], self.coordinate(rank)
        for dim, axis in self.splits(style):
            first, last = spans[dim]
            width = (last - first) / self.shape[axis]
            start = first + width * coordinate[axis]
            spans[dim] = start, start + width
        return spans[0], spans[1]

    def exchanges(self, style: Style) -> Exchanges:
        """Returns the exchanges of a product whose weight is ``colwise`` or ``rowwise``."""
        if self.algorithm == "3d":
            enter, leave = ("y", "z") if style == "colwise" else ("z", "y")
            return Exchanges(Exchange(enter, 0), Exchange("x", 1), Exchange(leave, 0))
        if self.algorithm == "2d":
            return Exchanges(Exchange("tp", -1), Exchange("dp_shard", 1), None)
        if style == "colwise":
            return Exchanges(None, Exchange("dp_shard", 1), None)
        return Exchanges(None, Exchange("dp_shard", 0), Exchange("tp", None))

    def check(self, widths: Mapping[str, int]) -> None:
        """Refuses a model that the mesh does not divide.

        Args:
            widths: Heads, width and width of the MLP by name.

        Raises:
            UserError: With the numbers of parts that are possible.
        """
        for name, width in widths.items():
            option, parts = self._parts_of(name)
            if width % parts:
                possible = ", ".join(str(n) for n in range(1, width + 1) if width % n == 0)
                problem = f"parallel.{option}={parts} does not divide the model's {name} ({width})"
                raise UserError(f"{problem}; possible: {possible}")

    def divides(self, widths: Mapping[str, int]) -> bool:
        """Returns whether :meth:`check` accepts a model."""
        return all(width % self._parts_of(name)[1] == 0 for name, width in widths.items())

    def _parts_of(self, name: str) -> tuple[str, int]:
        """Returns into how many parts a width is split at most, and the option that says it."""
        return ("tp", self.tp) if name == "heads" else ("tp x dp_shard", self.tp * self.dp_shard)


SINGLE = StageMesh()


@_cached
def intersection(one: Box, other: Box) -> Box | None:
    """Returns what two boxes have in common; ``None`` for nothing."""
    spans = [(max(a[0], b[0]), min(a[1], b[1])) for a, b in zip(one, other, strict=True)]
    return (spans[0], spans[1]) if all(first < last for first, last in spans) else None


def lacking(wanted: Box, held: Box | None) -> list[Box]:
    """Returns the part of a box that is not in another, in at most two pieces for each dimension.

    ::

        wanted  +-----------+        +-----------+
                |           |        |    top    |
                |   +---+   |   ->   +---+---+---+
                |   |held   |        |   |   |   |      left and right of what is held
                |   +---+   |        +---+---+---+
                +-----------+        |  bottom   |
                                     +-----------+
    """
    common = intersection(wanted, held) if held else None
    if common is None:
        return [wanted]
    (outs, ins), (common_outs, common_ins) = wanted, common
    rows = ((outs[0], common_outs[0]), (common_outs[1], outs[1]))
    columns = ((ins[0], common_ins[0]), (common_ins[1], ins[1]))
    pieces: list[Box] = [(rows_of, ins) for rows_of in rows if rows_of[0] < rows_of[1]]
    return pieces + [(common_outs, columns_of) for columns_of in columns if columns_of[0] < columns_of[1]]


@_cached
def within(box: Box, held: Box) -> Box:
    """Returns a box as fractions of another one that contains it."""
    spans = [
        ((first - low) / (high - low), (last - low) / (high - low))
        for (first, last), (low, high) in zip(box, held, strict=True)
    ]
    return spans[0], spans[1]


@_cached
def area(box: Box) -> Fraction:
    """Returns the share of a parameter's numbers that are in a box."""
    return (box[0][1] - box[0][0]) * (box[1][1] - box[1][0])
