"""What a rank of a mesh takes is measured without the others: parts, exchanges and bytes are those of a step."""

from pathlib import Path

import pytest
import torch
from support.cases import Case
from support.mesh_profiles import exchange_by_a_clock, mesh_profile, received
from support.pool import Pool
from torch import nn

from pipetransformer.autopipe.profile import MeshProfile
from pipetransformer.mesh import ReduceDtype, StageMesh
from pipetransformer.profiling.memory import AutocastCopies, SavedBytes
from pipetransformer.profiling.pretended import PretendedAxis
from pipetransformer.runtime.ring_attention import ring_scores, ring_values

Measured = dict[StageMesh, MeshProfile]


@pytest.fixture(scope="module")
def measured(pool: Pool, bert_config: Path) -> Measured:
    """Of layers of a vision transformer on each mesh, when it is first asked for."""

    class Profiles(Measured):
        def __missing__(self, mesh: StageMesh) -> MeshProfile:
            self[mesh] = pool.run(1, mesh_profile, Case("vit", bert_config, dropout=0.2), mesh)[0]
            return self[mesh]

    return Profiles()


@pytest.mark.thinned("tp 2-6", "dp_shard 2-7", "dp_shard 2 (2d)", "tp 2 (3d)", "cp 2")
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
    mesh: StageMesh, forward: int, backward: int, measured: Measured
) -> None:
    """The bytes are those that ranks receive, see ``test_a_rank_receives_the_bytes_of_the_formulas``."""
    assert received(measured[mesh], 8 // mesh.batch_ways) == (forward, backward)


@pytest.mark.thinned("[tp]", "ring", "too few ranks")
@pytest.mark.parametrize(
    ("world", "mesh", "expected"),
    [
        (2, StageMesh(tp=2), 0.25),
        (3, StageMesh(tp=2), 0.25),
        (2, StageMesh(cp=2), 0.25),
        (4, StageMesh(dp_shard=2, tp=2, algorithm="2d"), 0.25),
        (1, StageMesh(tp=2), 0.0),
    ],
    ids=["tp", "a rank beside the mesh", "ring", "2d", "too few ranks"],
)
def test_an_exchange_takes_what_its_ranks_wait_for_each_other(
    world: int, mesh: StageMesh, expected: float, pool: Pool, bert_config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "measures_briefly", True)  # a clock that is made up needs no second look
    measured = pool.run(world, exchange_by_a_clock, Case("vit", bert_config, dropout=0.2), mesh, 0.25)
    assert [seconds for seconds, _ in measured] == [pytest.approx(expected)] * world
    assert all(num_groups == 0 for _, num_groups in measured), "process groups are destroyed"


def test_a_part_is_as_large_as_what_a_rank_holds(measured: Measured) -> None:
    whole = measured[StageMesh()].layers[1].layer
    part = measured[StageMesh(dp_shard=2, tp=2, algorithm="2d")].layers[1].layer
    assert part.parameter_bytes / whole.parameter_bytes == pytest.approx(0.266, abs=5e-4)
    assert part.output_bytes * 2 == whole.output_bytes  # its columns; a sample is one that the rank computes


def test_a_block_keeps_a_quarter_of_its_activations_on_a_2d_mesh(measured: Measured) -> None:
    """Half of the columns, of half of the samples. A norm keeps two numbers of a row, on each rank that has a part."""
    mesh = StageMesh(dp_shard=2, tp=2, algorithm="2d")
    whole = measured[StageMesh()].layers[1].layer.activation_bytes
    part = measured[mesh].layers[1].layer.activation_bytes
    num_tokens, of_row = 5, 2 * 2 * 8  # two norms, in float64
    assert part * 2 == whole + num_tokens * of_row


@pytest.mark.parametrize("num_tokens", [8, 16, 32])
def test_attention_in_a_ring_keeps_bytes_that_grow_with_the_square_of_the_tokens_over_the_ranks(
    num_tokens: int,
) -> None:
    """What grows with the tokens alone is taken out by ``kept(2 T) - 2 kept(T)``, which is ``2 c T^2 / n``."""
    squares = {n: n * (kept_in_a_ring(2 * num_tokens, n) - 2 * kept_in_a_ring(num_tokens, n)) for n in (2, 4, 8)}
    one_matrix = 2 * num_tokens**2 * 8  # of weights, in float64
    assert squares == {2: one_matrix, 4: one_matrix, 8: one_matrix}


def kept_in_a_ring(num_tokens: int, num_ranks: int) -> int:
    """Returns the bytes that one head's attention keeps for backward on a rank."""
    axis, sizes = PretendedAxis(num_ranks, 0), [num_tokens // num_ranks] * num_ranks
    query, key, value = (torch.ones(sizes[0], 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    kept = SavedBytes(nn.Module(), AutocastCopies(nn.Module()))
    with kept.of_autograd():
        weights = ring_scores(query, key, axis, sizes).softmax(-1)
        ring_values(weights, value, axis, sizes)
    return kept.total


@pytest.mark.parametrize(
    ("num_ranks", "reduce_dtype", "width"), [(2, "float32", 2), (4, "float32", 4), (4, "precision", 2)]
)
def test_more_than_two_numbers_of_16_bits_are_summed_in_float32(
    num_ranks: int, reduce_dtype: ReduceDtype, width: int, pool: Pool, bert_config: Path
) -> None:
    """In 1d the forward pass of a block exchanges nothing but sums. A sum of two is rounded once in any type."""
    case = Case("vit", bert_config, precision="bfloat16", num_heads=4)
    profile = pool.run(1, mesh_profile, case, StageMesh(tp=num_ranks, reduce_dtype=reduce_dtype))[0]
    numbers = 5 * 16 * 2  # tokens, width, products whose outputs are summed
    received = 2 * (num_ranks - 1) / num_ranks * numbers * width
    assert {layer.forward.collectives.sample_bytes for layer in profile.layers[1:-1]} == {received}


def test_without_other_ranks_nothing_is_exchanged(measured: Measured) -> None:
    profile = measured[StageMesh()]
    assert received(profile, 8) == (0, 0)
    assert all(not layer.copied_bytes for layer in profile.layers)


def test_copies_of_a_layer_are_counted_by_the_ranks_that_have_them(measured: Measured) -> None:
    """In 1d norms and what is added after a rowwise product are whole on both ranks; the head, too."""
    profile = measured[StageMesh(tp=2)]
    width, itemsize = 16, 8
    assert profile.layers[1].copied_bytes == ((2, 6 * width * itemsize),)  # two norms of two vectors, two biases
    assert profile.layers[-1].copied_bytes[0][0] == 2
