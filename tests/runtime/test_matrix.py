"""Design promise 1 over the whole space: every kind of plan trains as one process does (float64, 1e-10).

The factors are covered pairwise: every two settings of two factors meet in a row; by ``make matrix`` on worlds of up to
eight processes. On one process, where nothing depends on timing between ranks, plans are covered fully, each with one
of the optimizers, by ``make matrix`` with each. Other families have their rows in test_families.py.
"""

import os
import random
from itertools import product
from pathlib import Path

import pytest
from support.cases import NUM_BLOCKS, Case
from support.exactness import assert_equal
from support.pairwise import pairwise
from support.plans import PlanShape, arrangements
from support.pool import Pool
from support.trainings import then, train_all_elastic, train_elastic, train_reference

KINDS = ["vit", "bert_mlm", "bert_qa", "bert_tags"]  # of the four with an encoder the one that ties weights, too
LOSSES = ["bert_weighted", "bert_sets"]  # of a model that is there: on the arrangements in which losses are divided
DIVIDING = [(1, 3), (2, 3)]
OPTIMIZERS = ["adamw", "sgd", "lamb"]
FROZEN = [0, 3, NUM_BLOCKS]
IS_WHOLE = "MATRIX" in os.environ
ARRANGEMENTS = [(1, 1), (1, 3), (3, 1), (2, 3), (3, 2)]  # on two ranks: see test_elastic.py
if IS_WHOLE:
    ARRANGEMENTS = [pair for world in (1, 2, 3, 4, 6, 8) for pair in arrangements(world)]
FACTORS = {
    "arrangement": ARRANGEMENTS,
    "schedule": ["gpipe", "1f1b", "interleaved1f1b"],
    "num_microbatches": [1, 8],
    "num_frozen": FROZEN,
    "cached": [False, True],
    "checkpoint": [False, True],
    "rank_order": ["pipeline-first", "replica-first"],
    "kind": KINDS + LOSSES,
    "optimizer": OPTIMIZERS,
    "dropout": [0.0, 0.2],
}
NUM_STEPS = 3  # one before the plan, and two under it, of which the second has a smaller batch
NUM_SHAPE = 7  # the first factors make the shape of the plan, the others the case


def is_possible(row: tuple[object, ...]) -> bool:
    """Returns whether there is such a plan, and whether its loss is to be looked at under it."""
    has_model = row[NUM_SHAPE] in KINDS or row[0] in DIVIDING
    return has_model and PlanShape(*row[:NUM_SHAPE]).is_possible  # type: ignore[arg-type]


ROWS = pairwise(list(FACTORS.values()), is_possible)
FEW = (
    "(1, 1)-gpipe-1-0-False-False-replica-first-bert_qa", "(1, 1)-1f1b-1-6-True-True-pipeline-first-bert_tags",
    "(3, 1)-interleaved1f1b-1-6-False-True-replica-first-vit", "(3, 1)-gpipe-8-3-True-False-pipeline-first-bert_mlm",
    "(3, 1)-1f1b-8-0-False-True-replica-first-bert_tags", "(1, 3)-1f1b-8-0-False-True-pipeline-first-bert_sets",
    "(1, 3)-gpipe-8-3-False-False-replica-first-bert_tags", "(1, 3)-1f1b-1-6-True-False-replica-first-bert_qa",
    "(1, 3)-gpipe-8-6-False-False-pipeline-first-bert_weighted", "(3, 2)-1f1b-8-0-False-False-replica-first-bert_mlm",
)  # fmt: skip
"""What every run does. The last row has stages and replicas in an order of ranks that no other file has."""


@pytest.mark.thinned(*() if IS_WHOLE else FEW)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(map(str, row)))
def test_a_plan_trains_as_one_process_does(
    row: tuple[object, ...], pool: Pool, bert_config: Path, tmp_path: Path
) -> None:
    shape, (kind, optimizer, dropout) = PlanShape(*row[:NUM_SHAPE]), row[NUM_SHAPE:]  # type: ignore[arg-type]
    case = Case(str(kind), bert_config, float(str(dropout)), str(optimizer), num_steps=NUM_STEPS)
    plan = shape.plan(random.Random(str(row)))
    trace = pool.run(plan.num_devices, train_elastic, case, then(plan), str(tmp_path))[0]
    assert_equal(trace, train_reference(case, {1: plan.num_frozen}))


@pytest.mark.thorough  # every run does the rows above on (1, 1), and test_elastic.py one on "1 process"
@pytest.mark.parametrize("kind", KINDS if IS_WHOLE else ["vit"])
def test_on_one_process_everything_goes_with_everything(
    kind: str, pool: Pool, bert_config: Path, tmp_path: Path
) -> None:
    shapes = [
        PlanShape((1, 1), "gpipe", count, frozen, cached, recompute, rank_order="pipeline-first")
        for count, frozen, cached, recompute in product([1, 3], FROZEN, [False, True], [False, True])
    ]
    plans = [shape.plan(random.Random(0)) for shape in shapes if shape.is_possible]
    for number, optimizer in enumerate(OPTIMIZERS):
        case = Case(kind, bert_config, 0.2, optimizer, num_steps=NUM_STEPS)
        references = {frozen: train_reference(case, {1: frozen}) for frozen in FROZEN}
        own = plans if IS_WHOLE else plans[number :: len(OPTIMIZERS)]
        (traces,) = pool.run(1, train_all_elastic, case, own, str(tmp_path))
        for plan, trace in zip(own, traces, strict=True):
            assert_equal(trace, references[plan.num_frozen])
