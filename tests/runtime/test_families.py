"""Design promises 1, 3 and 6 for every family whose blocks take more than a mask or share weights, and for adapters.

A thorough run has for each family one of the rows that cover the other factors pairwise, and transitions through all
that changes with a plan; every run has one of the two, or another file. By ``make matrix`` there are all rows, with
more settings. Factors of which this says nothing new are in test_matrix.py.
"""

import os
import random
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path

import pytest
from support import decoders, encoders, towers
from support.cases import NUM_BLOCKS, Case
from support.exactness import assert_equal
from support.pairwise import pairwise
from support.plans import HEAD, PlanShape, plan
from support.pool import Pool
from support.trainings import Plans, then, train_elastic, train_reference

# peft asks for it
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
KERNELS = "wide norms"
KINDS = [*decoders.DROPOUTS, *encoders.DROPOUTS, *towers.KINDS]
ADAPTED = {"vit with adapters": "vit", "bert with adapters": "bert"}
IS_WHOLE = "MATRIX" in os.environ
FACTORS: dict[str, Sequence[object]] = {
    "arrangement": [(1, 2), (2, 1), (2, 2)] if IS_WHOLE else [(1, 2), (2, 1)],  # odd depths have both at once
    "schedule": ["gpipe", "1f1b", "interleaved1f1b"] if IS_WHOLE else ["1f1b", "interleaved1f1b"],
    "num_microbatches": [1, 4],
    "num_frozen": [0, 3, NUM_BLOCKS] if IS_WHOLE else [0, 3],
    "cached": [False, True],
    "checkpoint": [False, True],
    "rank_order": ["pipeline-first", "replica-first"],
    "kind": [*KINDS, *ADAPTED],
    "optimizer": ["adamw", "lamb"],
    "dropout": [0.0, 0.2],
}
NUM_SHAPE = 7  # the first factors make the shape of the plan, the others the case
KIND = [*FACTORS].index("kind")


def rows() -> list[tuple[object, ...]]:
    def covered(factors: Mapping[str, Sequence[object]]) -> list[tuple[object, ...]]:
        return pairwise([*factors.values()], lambda row: PlanShape(*row[:NUM_SHAPE]).is_possible)  # type: ignore[arg-type]

    if IS_WHOLE:
        return covered(FACTORS)
    shared, kinds = covered({name: values for name, values in FACTORS.items() if name != "kind"}), FACTORS["kind"]
    assert len(shared) <= len(kinds), "each row is somebody's"
    return [(*row[:KIND], kind, *row[KIND:]) for row, kind in zip(cycle(shared), kinds, strict=False)]


ROWS = rows()
DEEP = ("gemma3_text", "modernbert", "deberta-v2", "albert")
"""Blocks that differ by their place or have something in common: every run takes these through odd depths."""
FEW = ("llama", "mpnet", "vit_hf", "dinov2", "siglip", "eva02", "vit with adapters")
"""Every run takes these through one plan. The others are in test_token_losses.py (GPT-2), test_signals.py (BERT with
adapters), test_mesh_plans.py and test_mesh_matrix.py."""
ODD_DEPTHS: Plans = {  # stages and the cache begin at blocks whose kind depends on their place in the whole model
    0: plan(0, 0, [1, 2, 4, HEAD], 1, 4, "gpipe"),  # what blocks have in common is on all four devices
    2: plan(1, 1, [3, HEAD], 2, 2),
    3: plan(4, 1, [5, HEAD], 1, 2),
    4: plan(5, 5, [HEAD], 3, 1),
    5: plan(1, 0, [3, 6, HEAD], 1, 4),
}


@pytest.mark.thinned(*() if IS_WHOLE else FEW)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(map(str, row)))
def test_a_plan_trains_as_one_process_does(
    row: tuple[object, ...], pool: Pool, bert_config: Path, tmp_path: Path
) -> None:
    shape, (kind, optimizer, dropout) = PlanShape(*row[:NUM_SHAPE]), row[NUM_SHAPE:]  # type: ignore[arg-type]
    case = Case(
        ADAPTED.get(str(kind), str(kind)), bert_config, float(str(dropout)), str(optimizer), num_steps=3,
        kernels=KERNELS, lora=kind in ADAPTED,
    )  # fmt: skip
    wanted = shape.plan(random.Random(str(row)))
    trace = pool.run(wanted.num_devices, train_elastic, case, then(wanted), str(tmp_path))[0]
    assert_equal(trace, train_reference(case, {1: wanted.num_frozen}))


@pytest.mark.thinned(*DEEP)
@pytest.mark.parametrize("kind", KINDS)
def test_transitions_through_odd_depths_train_as_the_original_does(
    kind: str, pool: Pool, bert_config: Path, tmp_path: Path
) -> None:
    dropout = 0.2 if kind in encoders.DROPOUTS else 0.0
    case = Case(kind, bert_config, dropout, cache_shares=(1 / 2, 1 / 4), kernels=KERNELS)  # a fourth is computed again
    trace = pool.run(4, train_elastic, case, ODD_DEPTHS, str(tmp_path))[0]
    assert_equal(trace, train_reference(case, {step: wanted.num_frozen for step, wanted in ODD_DEPTHS.items()}))
