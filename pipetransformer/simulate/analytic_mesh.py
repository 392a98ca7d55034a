"""Layers on a mesh from counted work: the part of a rank, and the exchanges of its products.

A block is four products, two norms and attention. The exchanges of a product follow from
:meth:`~pipetransformer.mesh.StageMesh.exchanges`, so the formulas of all three algorithms are one. For a product from
``in`` to ``out`` on ``t`` tokens of a sample, in numbers that a rank receives in its forward pass, with
``Q = dp_shard tp`` (3d: ``x p^2``)::

    1d   2 (tp-1)/tp t out where rowwise        and (dp_shard-1) in out/Q of the weight
    2d   (tp-1)/tp t in                         and (dp_shard-1) in out/Q
    3d   (p-1)/p t (in + out)                   and (x-1) in out/Q

A norm over a split width takes ``2 (tp-1) t``, a ring ``2 (cp-1) t h / tp``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from pipetransformer.autopipe.profile import LayerShard, MeshProfile, Traffic, Volume
from pipetransformer.mesh import StageMesh, Style, area
from pipetransformer.simulate.analytic import (
    DeviceSpeed,
    DtypeBytes,
    LayerCounts,
    TransformerShape,
    block_counts,
    embedding_counts,
    head_counts,
    layer_profile,
)

SUMMED_BYTES = 4  # more than two numbers of 16 bits are summed in float32, unless the mesh keeps them


class Pass(NamedTuple):
    """Exchanges of one pass.

    Attributes:
        collectives, messages: How many.
        weights: Bytes that a rank receives whatever the samples.
        values: Bytes that it receives for each sample.
        message_values: The same in messages.
    """

    collectives: int = 0
    messages: int = 0
    weights: float = 0.0
    values: float = 0.0
    message_values: float = 0.0

    def traffic(self) -> Traffic:
        return Traffic(
            Volume(self.collectives, self.weights, self.values), Volume(self.messages, 0.0, self.message_values)
        )


Passes = tuple[Pass, Pass, Pass]
"""Forward, input gradient and weight gradient."""


def analytic_mesh_profile(
    shape: TransformerShape, speed: DeviceSpeed, state_factor: float, widths: DtypeBytes, mesh: StageMesh
) -> MeshProfile:
    """Returns the layers of a model on a mesh: embedding, blocks, head.

    Args:
        state_factor: Bytes of optimizer state per byte of parameters.
        widths: Of numbers in the precision that ``speed`` holds for.
    """
    counter = _Counter(shape, widths, mesh)
    shard = partial(_shard, speed, widths, state_factor)
    block = shard("block", counter.block(), counter.block_passes(), counter.block_copies())
    embedding = counter.embedding(), counter.embedding_passes(), counter.embedding_copies()
    head = counter.head(), counter.head_passes(), counter.copies("whole", head_counts(shape).parameters)
    blocks = (replace(block, layer=replace(block.layer, name=f"block {n + 1}")) for n in range(shape.num_blocks))
    return MeshProfile(mesh, (shard("embedding", *embedding), *blocks, shard("head", *head)))


def _shard(
    speed: DeviceSpeed, widths: DtypeBytes, state_factor: float, name: str, counts: LayerCounts, passes: Passes,
    copies: Iterable[tuple[int, int]],
) -> LayerShard:  # fmt: skip
    forward, input_grad, weight_grad, lowest_grad = (each.traffic() for each in (*passes, _total(passes[1:])))
    copied: dict[int, int] = {}
    for ranks, num_bytes in copies:
        if ranks > 1 and num_bytes:
            copied[ranks] = copied.get(ranks, 0) + num_bytes
    layer = layer_profile(speed, widths, name, counts, state_factor)
    return LayerShard(layer, forward, input_grad, weight_grad, lowest_grad, tuple(sorted(copied.items())))


class _Counter:
    """Counts what a rank of a mesh has of each layer, per sample of those that it computes."""

    def __init__(self, shape: TransformerShape, widths: DtypeBytes, mesh: StageMesh) -> None:
        self.shape, self.widths, self.mesh = shape, widths, mesh
        self.tokens = shape.num_tokens / mesh.cp
        self.hidden_parts = mesh.tp if mesh.splits_hidden else 1

    @property
    def products(self) -> list[tuple[Style, float, float]]:
        """Style, input width and output width of a block's products."""
        width, ratio = self.shape.hidden_size, self.shape.mlp_ratio
        return [
            ("colwise", width, 3 * width), ("rowwise", width, width), ("colwise", width, ratio * width),
            ("rowwise", ratio * width, width),
        ]  # fmt: skip

    def summed(self, num_ranks: int) -> int:
        """Returns the bytes of a number that so many ranks sum."""
        rounds_once = self.mesh.reduce_dtype == "float32" and num_ranks > 2
        return max(self.widths.narrow, SUMMED_BYTES) if rounds_once else self.widths.narrow

    def part(self, style: Style) -> float:
        """Returns the share of a parameter that a rank has."""
        return float(area(self.mesh.box(style, rank=0)))

    def copies(self, style: Style, whole: float) -> list[tuple[int, int]]:
        """Returns the ranks that have the same part of parameters, and the bytes of the part."""
        return [(self.mesh.num_copies(style), round(whole * self.part(style) * self.widths.wide))]

    def block(self) -> LayerCounts:
        whole, width, ratio, tp = block_counts(self.shape), self.shape.hidden_size, self.shape.mlp_ratio, self.mesh.tp
        matrices, part = width * width * (4 + 2 * ratio), self.part("colwise")
        inner, hidden = width * (3 + ratio) / tp, 6 * width * self.part("hidden")
        scores = self.shape.num_heads * self.tokens * self.shape.num_tokens / tp
        forward, input_grad, weight_grad = (work / (self.mesh.cp * tp) for work in whole.work)
        return LayerCounts(
            work=(forward, input_grad, weight_grad),
            parameters=matrices * part + inner + hidden,
            multiplied=matrices * part + inner + 2 * width * self.part("hidden"),
            saved_wide=2 * self.tokens * width / self.hidden_parts + scores,
            saved_narrow=self.tokens * width * (2 / self.hidden_parts + (4 + 2 * ratio) / tp) + scores,
            output=self.tokens * width / self.hidden_parts,
            largest=whole.largest / tp,  # a weight's gradient is whole over dp_shard before it is scattered
        )

    def block_passes(self) -> Passes:
        every = [self._product(*product) for product in self.products]
        every += [self._norm()] * 2 if self.mesh.splits_hidden and self.mesh.tp > 1 else []
        every += [self._ring()] if self.mesh.cp > 1 else []
        return _sum(every)

    def block_copies(self) -> list[tuple[int, int]]:
        width, ratio = self.shape.hidden_size, self.shape.mlp_ratio
        sizes: tuple[tuple[Style, float], ...] = (
            ("hidden", 6 * width), ("inner", width * (3 + ratio)), ("colwise", width * width * (3 + ratio)),
            ("rowwise", width * width * (1 + ratio)),
        )  # fmt: skip
        return [each for style, size in sizes for each in self.copies(style, size)]

    def _product(self, style: Style, width: float, out: float) -> Passes:
        """Counts ``leave(enter(x) @ gather(weight).T)`` and its gradients."""
        mesh, narrow = self.mesh, self.widths.narrow
        enter, gather, leave = mesh.exchanges(style)
        entering = self.hidden_parts if style == "colwise" else mesh.tp
        sizes = [1 if each is None else mesh.shape[each.axis] for each in (enter, gather, leave)]
        x, weight = self.tokens * width / entering * (sizes[0] - 1), width * out * self.part(style) * (sizes[1] - 1)
        y = 0.0
        if leave is not None and sizes[2] > 1:  # what a rank has made is summed over the axis, and scattered in 3d
            made = self.tokens * out * (sizes[0] / mesh.tp if leave.dim is not None else 1)
            y = made * (sizes[2] - 1) / sizes[2] * (2 if leave.dim is None else 1)
        used, summed = [size > 1 for size in sizes], [*map(self.summed, sizes)]
        back = y * (summed[2] if leave is not None and leave.dim is None else narrow)
        return (
            Pass(sum(used), weights=weight * narrow, values=x * narrow + y * summed[2]),
            Pass(sum(used), weights=weight * narrow, values=x * summed[0] + back),
            Pass(used[0] + used[1], weights=weight * summed[1], values=x * narrow),
        )

    def _norm(self) -> Passes:
        values = 2 * (self.mesh.tp - 1) * self.tokens * self.widths.wide
        return Pass(1, values=values), Pass(1, values=values), Pass()

    def _ring(self) -> Passes:
        """Keys and values go around; their gradients are scattered."""
        hops = self.mesh.cp - 1
        block = hops * self.tokens * self.shape.hidden_size / self.mesh.tp
        around = block * self.widths.narrow * 2
        back = Pass(2, 2 * hops, values=2 * block * self.summed(self.mesh.cp), message_values=around)
        return Pass(messages=2 * hops, message_values=around), back, Pass()

    def embedding(self) -> LayerCounts:
        whole, shape, tp = embedding_counts(self.shape), self.shape, self.mesh.tp
        table = shape.num_embeddings * shape.hidden_size * self.part("embedding")
        projection = shape.token_values * shape.hidden_size * self.part("column")
        output = self.tokens * shape.hidden_size / self.hidden_parts
        forward, input_grad, weight_grad = (work / tp for work in whole.work)
        work, largest = (forward, input_grad, weight_grad), max(table, projection)
        return LayerCounts(work, table + projection, projection, output, 0.0, output, largest)

    def embedding_passes(self) -> Passes:
        shape, mesh = self.shape, self.mesh
        whole_width = 0.0 if mesh.splits_hidden else shape.num_tokens * shape.hidden_size / mesh.tp * (mesh.tp - 1)
        rows = mesh.shape.get("dp_shard", 1)
        table = shape.num_embeddings * shape.hidden_size * self.part("embedding") * (rows - 1)
        count = int(whole_width > 0) + int(table > 0)
        one = Pass(count, weights=table * self.widths.wide, values=whole_width * self.widths.wide)
        return one, Pass(), one

    def embedding_copies(self) -> list[tuple[int, int]]:
        width = self.shape.hidden_size
        table, projection = self.shape.num_embeddings * width, self.shape.token_values * width
        return [*self.copies("embedding", table), *self.copies("column", projection)]

    def head(self) -> LayerCounts:
        return head_counts(self.shape)

    def head_passes(self) -> Passes:
        """Tokens and width are gathered before it."""
        tp, cp, width = self.hidden_parts, self.mesh.cp, self.shape.hidden_size
        values = self.tokens * width / tp * (tp - 1) + self.tokens * width * (cp - 1)
        one = Pass((tp > 1) + (cp > 1), values=values * self.widths.wide)
        return one, one, Pass()


def _sum(every: Iterable[Passes]) -> Passes:
    forward, input_grad, weight_grad = map(_total, zip(*every, strict=True))
    return forward, input_grad, weight_grad


def _total(passes: Iterable[Pass]) -> Pass:
    return Pass(*(sum(numbers) for numbers in zip(*passes, strict=True)))
