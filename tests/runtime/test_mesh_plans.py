"""Plans whose stages run on meshes train as one process does, and move, freeze and cache as others do (1e-10)."""

import json
import os
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from support.cases import Case
from support.exactness import assert_as_near_as_one_process, assert_equal
from support.mesh_moves import (
    MUTATIONS,
    WithScalar,
    bytes_lacking,
    bytes_of_transitions,
    held_open,
    losses_when_mutated,
    scalars_after,
)
from support.mesh_plans import plan_on as plan
from support.mesh_training import evaluate_alone, evaluate_on_mesh
from support.pool import Pool
from support.trainings import train_elastic, train_reference

from pipetransformer.autodp.transition import first_transition, next_transition
from pipetransformer.autopipe.plan import Plan
from pipetransformer.mesh import REDUCE_DTYPES, StageMesh
from pipetransformer.planning.history import plan_from_dict

TP, ROWS, RING = StageMesh(tp=2), StageMesh(dp_shard=2), StageMesh(cp=2)
SUMMA, CUBE = StageMesh(tp=2, algorithm="2d"), StageMesh(tp=2, algorithm="3d")


INTERLEAVED = ((0, 1), (2, 3), (4, 5), (6, 7))
"""Stages of two ranks, or of two meshes."""


@dataclass(frozen=True)
class Row:
    """Two plans, the second one from step 1 on."""

    kind: str
    before: Plan
    after: Plan
    optimizer: str = "adamw"


ROWS_OF_PLANS = {
    "tp 2, freezes": Row("vit", plan(TP), plan(TP, microbatches=2, frozen=3)),
    "tp 2, two stages become two replicas that read a cache": Row(
        "bert", plan(TP, 2, microbatches=2), plan(TP, replicas=2, frozen=3, level=3)
    ),
    "dp_shard 2, two replicas become two stages": Row(
        "bert_qa", plan(ROWS, replicas=2), plan(ROWS, 2, microbatches=2, frozen=2), "sgd"
    ),
    "2d, two stages recompute": Row(
        "vit", plan(SUMMA, 2, microbatches=2, recompute=True), plan(SUMMA, replicas=2, frozen=2, level=2)
    ),
    "3d, micro-batches and a cache": Row("bert", plan(CUBE, microbatches=2), plan(CUBE, frozen=3, level=2)),
    "3d, two stages and all blocks frozen": Row(
        "vit", plan(CUBE, 2, microbatches=2), plan(CUBE, replicas=2, frozen=6, level=6)
    ),
    "cp 2, two stages become two replicas": Row(
        "vit", plan(RING, 2, microbatches=2, schedule="gpipe"), plan(RING, replicas=2, frozen=2, level=2)
    ),
    "Lamb on rows x tp, two stages": Row(
        "vit", plan(StageMesh(dp_shard=2, tp=2)), plan(TP, 2, microbatches=2, frozen=2), "lamb"
    ),
    "Lamb on 3d, then in one piece": Row("bert", plan(CUBE), plan(StageMesh(), replicas=4, frozen=1), "lamb"),
    "tp 2, interleaved": Row(
        "vit", plan(TP), Plan(1, 0, INTERLEAVED, 1, 4, "interleaved1f1b", stages_per_rank=2, mesh=TP)
    ),
}


@pytest.mark.thinned("tp 2, freezes", "two replicas become two stages", "Lamb on 3d", "interleaved")
@pytest.mark.parametrize("name", ROWS_OF_PLANS)
def test_a_plan_on_a_mesh_trains_as_one_process_does(name: str, pool: Pool, bert_config: Path, tmp_path: Path) -> None:
    row = ROWS_OF_PLANS[name]
    case = Case(row.kind, bert_config, 0.2, row.optimizer, num_steps=3)
    world = max(row.before.num_devices, row.after.num_devices)
    trace = pool.run(world, train_elastic, case, {0: row.before, 1: row.after}, str(tmp_path))[0]
    assert_equal(trace, train_reference(case, {1: row.after.num_frozen}))


@pytest.mark.thinned("roberta-mesh0", "ernie")
@pytest.mark.parametrize(
    ("kind", "mesh"),
    [("roberta", RING), ("roberta", StageMesh(dp_shard=2, tp=2)), ("ernie", CUBE), ("distilbert", RING)],
)
def test_other_families_with_a_plan_train_on_a_mesh(
    kind: str, mesh: StageMesh, pool: Pool, bert_config: Path, tmp_path: Path
) -> None:
    case = Case(kind, bert_config, 0.2, num_steps=3)
    trace = pool.run(mesh.num_ranks, train_elastic, case, {0: plan(mesh), 1: plan(mesh, frozen=2)}, str(tmp_path))[0]
    assert_equal(trace, train_reference(case, {1: 2}))


CHAIN = (
    plan(StageMesh(dp_shard=2, tp=2, algorithm="3d")),
    plan(StageMesh(dp_shard=2, tp=2, algorithm="2d"), replicas=2, frozen=2, level=2),
    plan(TP, replicas=4, frozen=4, level=4),
    plan(StageMesh(), replicas=8, frozen=6, level=6),
)
"""3d of 8 ranks to 2d of 4, tp of 2 and replicas of whole layers, freezing two blocks at a time (check 2)."""
SHORT_CHAIN = (
    plan(StageMesh(dp_shard=2, tp=2), microbatches=2),
    plan(RING, 2, microbatches=2, frozen=1),
    plan(StageMesh(), 2, 2, microbatches=1, frozen=3, level=3),
    plan(SUMMA, replicas=2, frozen=3, level=3),
    plan(StageMesh(), 1, 1, frozen=4, level=3),
    plan(StageMesh(tp=2, algorithm="3d"), frozen=4, level=3),
)


@pytest.mark.thinned("four ranks", "share no axis")
@pytest.mark.parametrize(
    ("kind", "plans"),
    [
        ("vit", CHAIN),
        ("bert", (CHAIN[0], *CHAIN[::-1])),
        ("bert_qa", SHORT_CHAIN),
        ("bert", (SHORT_CHAIN[1], *SHORT_CHAIN[:3:-1], SHORT_CHAIN[0])),
    ],
    ids=["freezes", "unfreezes", "meshes that share no axis", "unfreezes on four ranks"],
)
def test_freezing_may_change_the_mesh(
    kind: str, plans: tuple[Plan, ...], pool: Pool, bert_config: Path, tmp_path: Path
) -> None:
    case = Case(kind, bert_config, 0.2, num_steps=len(plans) + 1, parks=plans[0].num_frozen > plans[-1].num_frozen)
    trace = pool.run(_world(plans), train_elastic, case, dict(enumerate(plans)), str(tmp_path))[0]
    assert_equal(trace, train_reference(case, {step: one.num_frozen for step, one in enumerate(plans)}))


@pytest.mark.thinned(1)
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_broken_mesh_of_a_plan_is_noticed(mutation: str, pool: Pool, bert_config: Path, tmp_path: Path) -> None:
    case, (plans, _) = Case("vit", bert_config, 0.2, num_steps=4), MUTATIONS[mutation]
    world = max(one.num_devices for one in plans.values())
    losses, reference = (
        pool.run(world, losses_when_mutated, case, mutation, str(tmp_path))[0],
        train_reference(case, {}).losses,
    )
    whole = max(1, *plans)  # steps before anything is broken
    assert losses[:whole] == pytest.approx(reference[:whole], rel=0, abs=1e-10)
    assert max(abs(one - other) for one, other in zip(losses, reference, strict=True)) > 1e-7


@pytest.mark.thorough  # every run counts the bytes on two ranks: test_what_moves_back_when_...
def test_what_moves_to_another_mesh_is_what_each_rank_lacks(pool: Pool, bert_config: Path, tmp_path: Path) -> None:
    """Weights and moments to the byte, of layers that go on; cached ones stay where they are (check 2)."""
    case = Case("vit", bert_config)
    moved = pool.run(_world(CHAIN), bytes_of_transitions, case, CHAIN, str(tmp_path))[0]
    assert moved == [bytes_lacking(case, old, new) for old, new in pairwise(CHAIN)]
    gathered = [
        bytes_lacking(case, old, replace(new, mesh=StageMesh(), num_replicas=8)) for old, new in pairwise(CHAIN)
    ]
    assert all(own < whole for own, whole in zip(moved[:2], gathered[:2], strict=True)), "layers were gathered"


def test_what_moves_back_when_blocks_train_again_is_what_each_rank_lacks(
    pool: Pool, bert_config: Path, tmp_path: Path
) -> None:
    """Parked moments too, and cached layers from the ranks of the mesh that they were frozen on."""
    case = Case("vit", bert_config, parks=True)
    plans = plan(TP), plan(StageMesh(), replicas=2, frozen=3, level=3), plan(ROWS, frozen=1), plan(RING)
    transitions = [first_transition(plans[0])]
    for each in plans[1:]:
        transitions.append(next_transition(transitions[-1], each))
    moved = pool.run(2, bytes_of_transitions, case, plans, str(tmp_path))[0]
    assert moved == [bytes_lacking(case, old.after, new.after, last=old) for old, new in pairwise(transitions)]


def test_a_number_without_dimensions_goes_along_to_another_mesh(pool: Pool, bert_config: Path, tmp_path: Path) -> None:
    plans = plan(StageMesh(dp_shard=2)), plan(TP)
    for found in pool.run(2, scalars_after, WithScalar("vit", bert_config), plans, str(tmp_path)):
        assert found
        assert all(number == layer for layer, number in found.items())


ROUND = (
    plan(StageMesh(dp_shard=2, tp=2)),
    plan(RING, 2, microbatches=2),
    plan(StageMesh(), replicas=4),
    plan(StageMesh(tp=2, algorithm="3d")),
    plan(SUMMA, replicas=2),
)


ROUNDS = [(50, 5), (50, 1)] if "MESH_MATRIX" in os.environ else [(11, 1)]
"""Steps, and how many of them are between two transitions."""


# every run compares copies on meshes bit for bit in test_mesh_stage.py, and goes round in test_transition.py
@pytest.mark.thorough
@pytest.mark.parametrize(("num_steps", "every"), ROUNDS)
def test_copies_stay_equal_and_nothing_is_left_open(
    num_steps: int, every: int, pool: Pool, bert_config: Path, tmp_path: Path
) -> None:
    """Copies bit for bit; groups, threads and file descriptors as many in each round as after the first (check 6)."""
    case = Case("vit", bert_config, 0.2, num_steps=num_steps)
    for counts, equal in pool.run(4, held_open, case, ROUND, num_steps, every, str(tmp_path)):
        assert equal
        assert len(set(counts[1:])) == 1, counts


def _world(plans: tuple[Plan, ...]) -> int:
    return max(one.num_devices for one in plans)


def test_idle_ranks_take_part_when_the_plan_grows(pool: Pool, bert_config: Path, tmp_path: Path) -> None:
    case = Case("bert", bert_config, 0.2, num_steps=3)
    trace = pool.run(4, train_elastic, case, {0: plan(TP), 1: plan(TP, replicas=2)}, str(tmp_path))[0]
    assert_equal(trace, train_reference(case, {}))


@pytest.mark.thinned("tp 2 (2d)", "cp 2")
@pytest.mark.parametrize(
    ("kind", "precision", "mesh"),
    [
        ("vit", "bfloat16", TP), ("bert", "float16", StageMesh(dp_shard=2, tp=2)), ("vit", "float16", SUMMA),
        ("bert", "bfloat16", CUBE), ("bert", "bfloat16", RING),
    ],
    ids=str,
)  # fmt: skip
def test_numbers_of_16_bits_leave_a_mesh_as_near_to_float64_as_one_process(
    kind: str, precision: str, mesh: StageMesh, pool: Pool, bert_config: Path, tmp_path: Path
) -> None:
    """Partial sums are rounded, and their sum over the ranks once more."""
    case = Case(kind, bert_config, 0.2, "sgd", precision=precision, num_steps=4)
    plans = {0: plan(mesh), 2: plan(mesh, frozen=2, level=2)}
    trace = pool.run(mesh.num_ranks, train_elastic, case, plans, str(tmp_path))[0]
    assert_as_near_as_one_process(trace, case, {0: 0, 2: 2}, 1)


@pytest.mark.thinned("tp 4")
@pytest.mark.parametrize("mesh", [StageMesh(tp=4), StageMesh(dp_shard=2, tp=2, algorithm="2d")], ids=str)
def test_four_ranks_that_sum_16_bits_as_they_are_round_three_times_in_place_of_once(
    mesh: StageMesh, pool: Pool, bert_config: Path, tmp_path: Path
) -> None:
    """So the bound is three times that of sums in float32. That they are other numbers shows that the option works."""
    case = Case("vit", bert_config, 0.2, "sgd", precision="bfloat16", num_heads=4, num_steps=3)
    traces = [
        pool.run(4, train_elastic, case, {0: plan(replace(mesh, reduce_dtype=kind))}, str(tmp_path / kind))[0]
        for kind in REDUCE_DTYPES
    ]
    assert traces[0].losses != traces[1].losses or mesh.algorithm == "2d", "2d sums two parts at a time"
    assert_as_near_as_one_process(traces[1], case, {0: 0}, 1, times=6)


@pytest.mark.thinned("tp 2-1", "(2d)", "(3d)-1", "cp 2")
@pytest.mark.parametrize(
    ("mesh", "num_stages", "replicas", "microbatches"),
    [(TP, 1, 2, 1), (ROWS, 2, 1, 2), (SUMMA, 1, 1, 2), (CUBE, 1, 1, 2), (CUBE, 2, 1, 1), (RING, 2, 1, 1)],
    ids=str,
)
def test_each_sample_is_evaluated_once(
    mesh: StageMesh, num_stages: int, replicas: int, microbatches: int, pool: Pool, bert_config: Path
) -> None:
    case, one = Case("bert", bert_config), plan(mesh, num_stages, replicas, microbatches, schedule="gpipe")
    ids, outputs = pool.run(one.num_devices, evaluate_on_mesh, case, one, 7)[0]
    assert ids == list(range(7))
    torch.testing.assert_close(outputs, evaluate_alone(case, 7), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (
            {"optimizer": "Adafactor"},
            "needs each weight in one piece, and a mesh has them in parts; take optim=adamw, lamb",
        ),
        ({"kind": "bert_mlm"}, "a mesh splits no weights that layers share; run with parallel.tp=1"),
        ({"kind": "eva02"}, "no tp_plan says how"),
    ],
)
def test_what_a_mesh_cannot_run_is_refused(
    case: dict[str, str], message: str, pool: Pool, bert_config: Path, tmp_path: Path
) -> None:
    problem = Case(**{"kind": "vit", **case}, folder=bert_config)  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match=message):
        pool.run(2, train_elastic, problem, {0: plan(TP)}, str(tmp_path))


def test_devices_and_shares_of_the_batch_count_the_mesh() -> None:
    one = plan(StageMesh(dp_shard=2, tp=2), 2, replicas=3, microbatches=2)
    assert (one.num_devices, one.num_shares, one.microbatch_size(32)) == (24, 6, 3)
    cube = replace(one, mesh=CUBE)
    assert (cube.num_devices, cube.num_shares, cube.microbatch_size(32)) == (24, 3, 6)


def test_a_plan_on_a_mesh_comes_back_from_a_file() -> None:
    one = plan(StageMesh(dp_shard=2, tp=2, algorithm="2d"), 2, microbatches=2, frozen=2)
    assert plan_from_dict(json.loads(json.dumps(asdict(one)))) == one
    without_mesh = {name: value for name, value in asdict(plan(TP)).items() if name != "mesh"}
    assert plan_from_dict(without_mesh) == replace(plan(TP), mesh=StageMesh())
