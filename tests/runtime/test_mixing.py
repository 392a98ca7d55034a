"""Mixup and cutmix train alike under every plan: as one process does that mixes the global batch by timm's own code."""

from pathlib import Path

import pytest
from support.cases import Case
from support.exactness import assert_equal
from support.plans import HEAD, plan, sharded
from support.pool import Pool
from support.trainings import train_elastic, train_reference

from pipetransformer.autopipe.plan import Plan

PLANS = {
    "one process": plan(0, 0, [HEAD], 1, 4),
    "stages": plan(0, 0, [1, 3, HEAD], 1, 4),
    "replicas": plan(0, 0, [HEAD], 3, 2),
    "stages and replicas, frozen": plan(2, 0, [4, HEAD], 2, 2),
    "interleaved": Plan(0, 0, ((0, 1), (2, 3), (4, 5), (6, HEAD)), 2, 2, "interleaved1f1b", 2),
    "sharded": sharded(0, 0, 2, 1),
}


@pytest.mark.thinned("one process-batch", "replicas-elem", "stages-batch", "sharded-elem")
@pytest.mark.parametrize("mode", ["batch", "elem"])
@pytest.mark.parametrize("name", PLANS)
def test_a_plan_trains_on_mixed_pictures_as_one_process_does(
    name: str, mode: str, pool: Pool, bert_config: Path, tmp_path: Path
) -> None:
    case, chosen = Case("vit", bert_config, num_steps=4, mixup=mode), PLANS[name]
    trace = pool.run(chosen.num_devices, train_elastic, case, {0: chosen}, str(tmp_path))[0]
    assert_equal(trace, train_reference(case, {0: chosen.num_frozen}))


def test_mixing_makes_a_difference(bert_config: Path) -> None:
    plain, mixed = (Case("vit", bert_config, num_steps=4, mixup=mode) for mode in (None, "batch"))
    assert train_reference(plain, {}).losses != train_reference(mixed, {}).losses
