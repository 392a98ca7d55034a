"""What each rank of a mesh has of a parameter, and the pieces that move where the mesh changes."""

from fractions import Fraction
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipetransformer.autodp.pieces import Piece, Shard, pieces_between, share_moved
from pipetransformer.errors import UserError
from pipetransformer.mesh import (
    SINGLE,
    STYLES,
    WHOLE,
    Algorithm,
    Box,
    StageMesh,
    Style,
    area,
    intersection,
    lacking,
)
from pipetransformer.models.tp_plan import Part

MESHES = [
    SINGLE,
    StageMesh(tp=2),
    StageMesh(tp=4),
    StageMesh(tp=3),
    StageMesh(dp_shard=4),
    StageMesh(dp_shard=2, tp=2),
    StageMesh(cp=2),
    StageMesh(cp=2, tp=2),
    StageMesh(dp_shard=2, tp=2, algorithm="2d"),
    StageMesh(dp_shard=4, tp=2, algorithm="2d"),
    StageMesh(tp=2, algorithm="3d"),
    StageMesh(dp_shard=2, tp=2, algorithm="3d"),
]
SIXTHS = st.integers(0, 6).map(lambda number: Fraction(number, 6))
SPANS = st.tuples(SIXTHS, SIXTHS).filter(lambda span: span[0] < span[1])
BOXES = st.tuples(SPANS, SPANS)


def disjoint(boxes: list[Box]) -> bool:
    return not any(intersection(one, two) for number, one in enumerate(boxes) for two in boxes[:number])


@given(BOXES, st.none() | BOXES)
def test_what_is_lacking_and_what_is_held_make_the_whole_box(wanted: Box, held: Box | None) -> None:
    pieces = lacking(wanted, held)
    common = intersection(wanted, held) if held else None
    everything = [*pieces, *([common] if common else [])]
    assert disjoint(everything)
    assert sum(map(area, everything)) == area(wanted)
    assert all(intersection(piece, wanted) == piece for piece in pieces)
    assert len(pieces) <= 4


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("style", STYLES)
def test_every_number_is_on_as_many_ranks_as_there_are_copies(mesh: StageMesh, style: Style) -> None:
    boxes = [mesh.box(style, rank) for rank in range(mesh.num_ranks)]
    num_copies = len(mesh.ranks_along(mesh.copy_axes(style), 0))
    assert sum(map(area, boxes)) == num_copies
    assert disjoint(list(dict.fromkeys(boxes)))
    for rank in range(mesh.num_ranks):
        same = [other for other in range(mesh.num_ranks) if boxes[other] == boxes[rank]]
        assert mesh.ranks_along(mesh.copy_axes(style), rank) == tuple(same)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_ranks_and_coordinates_name_each_other(mesh: StageMesh) -> None:
    assert [mesh.rank_of(mesh.coordinate(rank)) for rank in range(mesh.num_ranks)] == list(range(mesh.num_ranks))
    last = list(mesh.shape)[-1]
    assert mesh.coordinate(0)[last] == 0
    assert mesh.shape[last] == 1 or mesh.coordinate(1)[last] == 1, "neighbors lie along the last axis"


@pytest.mark.parametrize(("algorithm", "held"), [("1d", 1 / 4), ("2d", 1 / 4), ("3d", 1 / 8)])
def test_a_matrix_is_divided_by_all_ranks_but_those_of_the_ring(algorithm: Algorithm, held: float) -> None:
    mesh = StageMesh(dp_shard=2, tp=2, algorithm=algorithm)
    assert area(mesh.box("colwise", 0)) == area(mesh.box("rowwise", 0)) == held


def holders(mesh: StageMesh, replicas: int) -> dict[int, Shard]:
    return {rank: Shard(mesh, rank % mesh.num_ranks) for rank in range(mesh.num_ranks * replicas)}


@pytest.mark.parametrize("replicas", [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize("old", MESHES, ids=str)
def test_each_rank_receives_what_it_lacks_once_from_one_that_has_it(old: StageMesh, replicas: tuple[int, int]) -> None:
    for new in MESHES:
        before, after = holders(old, replicas[0]), holders(new, replicas[1])
        pieces = pieces_between(before, after)
        for target, style in product(after, STYLES):
            wanted = after[target].box(style)
            held = before[target].box(style) if target in before else None
            got = [piece.box for piece in pieces if (piece.target, piece.style) == (target, style)]
            common = intersection(wanted, held) if held else None
            assert sum(map(area, got)) == area(wanted) - (area(common) if common else 0)
            assert disjoint(got)
            assert all(intersection(box, wanted) == box for box in got)
        assert all(_has(before[piece.source], piece) for piece in pieces)


def _has(shard: Shard, piece: Piece) -> bool:
    return intersection(piece.box, shard.box(piece.style)) == piece.box


@pytest.mark.parametrize(
    ("old", "new", "replicas", "moved"),
    [
        (StageMesh(tp=4), StageMesh(tp=2), 2, (1.5, 1.5)),
        (StageMesh(dp_shard=2, tp=2, algorithm="3d"), StageMesh(dp_shard=2, tp=2, algorithm="2d"), 2, (1.5, 1.0)),
    ],
    ids=["tp 4 to tp 2 x 2", "3d to 2d x 2"],
)
def test_less_moves_than_if_layers_were_gathered(
    old: StageMesh, new: StageMesh, replicas: int, moved: tuple[float, float]
) -> None:
    pieces = pieces_between(holders(old, 1), holders(new, replicas))
    assert (share_moved(pieces, "colwise"), share_moved(pieces, "rowwise")) == moved
    assert max(moved) < old.num_ranks - 1, "gathered to whole layers"


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize(
    ("part", "shape"),
    [
        (Part("colwise"), (24, 48)),
        (Part("colwise", groups=3), (72, 48)),
        (Part("rowwise"), (48, 24)),
        (Part("embedding"), (5, 48)),
        (Part("inner", (0, None), 3), (72,)),
        (Part("column", (2, None)), (1, 5, 24)),
        (Part("whole", (None, None)), (7,)),
    ],
    ids=lambda value: str(value) if isinstance(value, tuple) else value.style,
)
def test_the_parts_of_all_ranks_are_the_whole_tensor(mesh: StageMesh, part: Part, shape: tuple[int, ...]) -> None:
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    own = [part.cut(whole, mesh.box(part.style, rank)) for rank in range(mesh.num_ranks)]
    assert torch.cat([each.flatten() for each in own]).unique().equal(whole.flatten())
    share = area(mesh.box(part.style, 0)) if part.style != "whole" else 1
    assert [each.numel() for each in own] == [share * whole.numel()] * mesh.num_ranks


def test_each_packed_matrix_is_cut_by_itself() -> None:
    qkv = torch.tensor([[10], [11], [20], [21], [30], [31]])
    mesh = StageMesh(tp=2)
    cut = Part("colwise", groups=3).cut(qkv, mesh.box("colwise", 1))
    assert cut.flatten().tolist() == [11, 21, 31]


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (lambda: StageMesh(tp=0), "parallel.tp=0 must be at least 1"),
        (lambda: StageMesh(algorithm="4d"), "parallel.tp_algorithm=4d does not exist; choose one of 1d, 2d, 3d"),  # type: ignore[arg-type]
        (lambda: StageMesh(cp=2, algorithm="3d"), "drop parallel.cp=2 or take 1d or 2d"),
        (
            lambda: StageMesh(tp=5).check({"heads": 12}),
            r"does not divide the model's heads \(12\); possible: 1, 2, 3, 4, 6",
        ),
    ],
)
def test_what_is_impossible_is_refused_with_what_is_possible(refused: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        refused()  # type: ignore[operator]


def test_a_whole_layer_is_the_box_of_a_mesh_of_one() -> None:
    assert {SINGLE.box(style, 0) for style in STYLES} == {WHOLE}
    assert SINGLE.num_ranks == SINGLE.batch_ways == SINGLE.loss_copies == 1
