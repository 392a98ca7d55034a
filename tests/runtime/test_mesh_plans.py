"""Plans whose stages run on meshes train as one process does, and move, freeze and cache as others do (1e-10)."""

import json
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from support.cases import NUM_BLOCKS, Case
from support.exactness import assert_as_near_as_one_process, assert_equal
from support.mesh_training import evaluate_alone, evaluate_on_mesh
from support.pool import Pool
from support.trainings import train_elastic, train_reference

from pipetransformer.autopipe.plan import Plan, layer_above
from pipetransformer.mesh import StageMesh
from pipetransformer.planning.history import plan_from_dict

HEAD = NUM_BLOCKS + 1
TP, ROWS, RING = StageMesh(tp=2), StageMesh(dp_shard=2), StageMesh(cp=2)
SUMMA, CUBE = StageMesh(tp=2, algorithm="2d"), StageMesh(tp=2, algorithm="3d")


def plan(
    mesh: StageMesh, num_stages: int = 1, replicas: int = 1, microbatches: int = 1, frozen: int = 0, level: int = 0,
    recompute: bool = False, schedule: str = "1f1b",
) -> Plan:  # fmt: skip
    first = layer_above(level)
    bounds = [first + (HEAD + 1 - first) * stage // num_stages for stage in range(num_stages + 1)]
    stages = tuple((start, end - 1) for start, end in pairwise(bounds))
    return Plan(frozen, level, stages, replicas, microbatches, schedule, recompute=recompute, mesh=mesh)


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
    "cp 2 x tp 2, a cache": Row("bert", plan(StageMesh(cp=2, tp=2)), plan(StageMesh(cp=2, tp=2), frozen=3, level=3)),
}


@pytest.mark.parametrize("name", ROWS_OF_PLANS)
def test_a_plan_on_a_mesh_trains_as_one_process_does(name: str, pool: Pool, bert_config: Path, tmp_path: Path) -> None:
    row = ROWS_OF_PLANS[name]
    case = Case(row.kind, bert_config, 0.2, row.optimizer, num_steps=3)
    world = max(row.before.num_devices, row.after.num_devices)
    trace = pool.run(world, train_elastic, case, {0: row.before, 1: row.after}, str(tmp_path))[0]
    assert_equal(trace, train_reference(case, {1: row.after.num_frozen}))


def test_idle_ranks_take_part_when_the_plan_grows(pool: Pool, bert_config: Path, tmp_path: Path) -> None:
    case = Case("bert", bert_config, 0.2, num_steps=3)
    trace = pool.run(4, train_elastic, case, {0: plan(TP), 1: plan(TP, replicas=2)}, str(tmp_path))[0]
    assert_equal(trace, train_reference(case, {}))


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
    """Partial sums are rounded, summed in float32 over the ranks, and rounded once more."""
    case = Case(kind, bert_config, 0.2, "sgd", precision=precision)
    plans = {0: plan(mesh), 3: plan(mesh, frozen=2, level=2)}
    trace = pool.run(mesh.num_ranks, train_elastic, case, plans, str(tmp_path))[0]
    assert_as_near_as_one_process(trace, case, {0: 0, 3: 2}, 1)


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
        ({"optimizer": "lamb"}, "Lamb needs each weight in one piece, and a mesh has them in parts; take AdamW or SGD"),
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
