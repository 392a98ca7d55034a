"""Design promises 1, 3 and 6 for vision models, and encoders whose blocks take more than a mask or share weights."""

from itertools import product
from pathlib import Path

import pytest
from support.cases import Case
from support.encoders import DROPOUTS
from support.exactness import assert_equal
from support.plans import HEAD, plan
from support.pool import Pool
from support.towers import KINDS
from support.trainings import Plans, train_elastic, train_reference

PLANS: Plans = {
    0: plan(0, 0, [1, 2, 4, HEAD], 1, 4, "gpipe"),  # what blocks have in common is on all four devices
    2: plan(1, 1, [3, HEAD], 2, 2),
    3: plan(4, 1, [5, HEAD], 1, 2),
    4: plan(5, 5, [HEAD], 3, 1),
    5: plan(0, 0, [3, 6, HEAD], 1, 4),
}
TOWERS = [*product(KINDS, (0.0,)), ("vit_hf", 0.2), ("eva02", 0.2)]  # dropout of transformers, and timm's drop path


@pytest.mark.parametrize(("kind", "dropout"), [*product(DROPOUTS, (0.0, 0.2)), *TOWERS])
def test_transitions_train_as_one_process_does(
    kind: str, dropout: float, pool: Pool, bert_config: Path, tmp_path: Path
) -> None:
    case = Case(kind, bert_config, dropout, cache_shares=(1 / 2, 1 / 4), kernels="wide norms")
    trace = pool.run(4, train_elastic, case, PLANS, str(tmp_path))[0]
    assert_equal(trace, train_reference(case, {step: wanted.num_frozen for step, wanted in PLANS.items()}))
