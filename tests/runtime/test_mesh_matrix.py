"""Design promise 1 on meshes: every kind of plan trains as one process does, from whole layers on (float64, 1e-10).

The factors are covered pairwise, on up to four processes; by ``make mesh-matrix`` on up to eight, with one more model.
"""

import os
from pathlib import Path

import pytest
from support.cases import Case
from support.exactness import assert_equal
from support.mesh_plans import plan_on
from support.pairwise import pairwise
from support.pool import Pool
from support.trainings import then, train_elastic, train_reference

from pipetransformer.mesh import StageMesh

IS_WHOLE = "MESH_MATRIX" in os.environ
NUM_RANKS = 8 if IS_WHOLE else 4
NUM_STEPS = 3  # one in whole layers, and two under the plan, of which the second has a smaller batch
MESHES = [
    StageMesh(tp=2),
    StageMesh(tp=4),
    StageMesh(dp_shard=2),
    StageMesh(tp=2, algorithm="2d"),
    StageMesh(cp=2),
    StageMesh(cp=3),
    *([StageMesh(cp=4)] if IS_WHOLE else []),  # a ring of three has several hops and unequal parts, too
    StageMesh(dp_shard=2, tp=2),
    StageMesh(dp_shard=2, tp=2, algorithm="2d"),
    StageMesh(tp=2, algorithm="3d"),
    StageMesh(cp=2, tp=2),
    StageMesh(dp_shard=2, tp=2, algorithm="3d"),
    StageMesh(dp_shard=2, cp=2, tp=2),
]
FACTORS = {
    "mesh": MESHES,
    "num_stages": [1, 2],
    "num_replicas": [1, 2],
    "num_microbatches": [1, 2],
    "recompute": [False, True],
    "frozen": [(0, 0), (3, 0), (3, 3)],
    "kind": ["vit", "bert", "distilbert", *(["bert_qa"] if IS_WHOLE else [])],  # a BERT with another head
    "optimizer": ["adamw", "sgd", "lamb"],
}


def is_possible(row: tuple[object, ...]) -> bool:
    mesh, num_stages, num_replicas = row[:3]
    splits_heads = mesh.tp < 4 or row[6] != "distilbert"  # type: ignore[attr-defined]  # which has two
    return splits_heads and mesh.num_ranks * num_stages * num_replicas <= NUM_RANKS  # type: ignore[attr-defined, operator]


ROWS = pairwise(list(FACTORS.values()), is_possible)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(map(str, row)))
def test_a_plan_on_a_mesh_trains_as_one_process_does(
    row: tuple[object, ...], pool: Pool, bert_config: Path, tmp_path: Path
) -> None:
    mesh, stages, replicas, microbatches, recompute, (frozen, level), kind, optimizer = row  # type: ignore[misc]
    heads = max(2, mesh.tp)  # type: ignore[attr-defined]
    case = Case(str(kind), bert_config, 0.2, str(optimizer), num_steps=NUM_STEPS, num_heads=heads)
    plan = plan_on(mesh, stages, replicas, microbatches, frozen, level, recompute)  # type: ignore[arg-type]
    trace = pool.run(plan.num_devices, train_elastic, case, then(plan), str(tmp_path))[0]
    assert_equal(trace, train_reference(case, {1: frozen}))
