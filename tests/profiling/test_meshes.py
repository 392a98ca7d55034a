"""What a rank of a mesh takes is measured without the others: parts, exchanges and bytes are those of a step."""

from pathlib import Path

import pytest
from support.cases import Case
from support.mesh_profiles import mesh_profile, received
from support.pool import Pool

from pipetransformer.autopipe.profile import MeshProfile
from pipetransformer.mesh import StageMesh


def measured(kind: str, mesh: StageMesh, pool: Pool, folder: Path) -> MeshProfile:
    return pool.run(1, mesh_profile, Case(kind, folder, dropout=0.2), mesh)[0]


@pytest.mark.parametrize(
    ("mesh", "forward", "backward"),
    [
        (StageMesh(tp=2), 64_000, 64_000),
        (StageMesh(dp_shard=2), 73_728, 147_456),
        (StageMesh(dp_shard=2, tp=2), 68_864, 105_728),
        (StageMesh(dp_shard=2, tp=2, algorithm="2d"), 95_744, 186_368),
        (StageMesh(dp_shard=2, tp=2, algorithm="3d"), 82_432, 127_744),
        (StageMesh(tp=2, algorithm="3d"), 128_000, 181_760),
        (StageMesh(cp=2), 27_648, 64_512),
        (StageMesh(cp=3), 40_960, 90_112),
    ],
    ids=str,
)
def test_the_exchanges_that_are_counted_are_those_of_a_step(
    mesh: StageMesh, forward: int, backward: int, pool: Pool, bert_config: Path
) -> None:
    """The bytes are those that ranks receive, see ``test_a_rank_receives_the_bytes_of_the_formulas``."""
    profile = measured("vit", mesh, pool, bert_config)
    assert received(profile, 8 // mesh.batch_ways) == (forward, backward)


def test_a_part_is_as_large_as_what_a_rank_holds(pool: Pool, bert_config: Path) -> None:
    whole = measured("vit", StageMesh(), pool, bert_config).layers[1].layer
    part = measured("vit", StageMesh(dp_shard=2, tp=2, algorithm="2d"), pool, bert_config).layers[1].layer
    assert part.parameter_bytes / whole.parameter_bytes == pytest.approx(0.266, abs=5e-4)
    assert part.output_bytes * 2 == whole.output_bytes  # its columns; a sample is one that the rank computes


def test_without_other_ranks_nothing_is_exchanged(pool: Pool, bert_config: Path) -> None:
    profile = measured("vit", StageMesh(), pool, bert_config)
    assert received(profile, 8) == (0, 0)
    assert all(not layer.copied_bytes for layer in profile.layers)


def test_copies_of_a_layer_are_counted_by_the_ranks_that_have_them(pool: Pool, bert_config: Path) -> None:
    """In 1d norms and what is added after a rowwise product are whole on both ranks; the head, too."""
    profile = measured("vit", StageMesh(tp=2), pool, bert_config)
    width, itemsize = 16, 8
    assert profile.layers[1].copied_bytes == ((2, 6 * width * itemsize),)  # two norms of two vectors, two biases
    assert profile.layers[-1].copied_bytes[0][0] == 2
