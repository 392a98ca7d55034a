"""An update that the device drops by itself leaves what a refused step leaves, and the host waits once in a step."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from support.cases import Case
from support.fusing import guard_plain, guard_without_dropping, overflow_plain, reads_of_steps
from support.guarding import train_plainly
from support.mixed import steps_with_overflow
from support.plans import HEAD, plan
from support.pool import Pool
from support.trainings import Plans

import pipetransformer as pt
from pipetransformer.runtime.update import WeightUpdate

NAN = {8: float("nan")}  # a sample of four batches
WORLDS = {
    "one process": (1, pt.Parallel()),
    "two stages": (2, pt.Parallel(num_stages=2, num_microbatches=2)),
    "sharded": (2, pt.Parallel(arrangement="sharded")),
    "idle ranks": (3, pt.Parallel(num_replicas=1, num_stages=1)),
}
SKIPS = {"guard": pt.Guard(not_finite="skip")}
STAGES: Plans = {0: plan(0, 0, [3, HEAD], 1, 2), 2: plan(2, 2, [HEAD], 2, 1)}


@pytest.mark.thinned("two stages", "sharded")
@pytest.mark.parametrize("name", WORLDS)
def test_a_batch_that_is_not_finite_is_passed_over_without_fused_kernels(pool: Pool, tmp_path: Path, name: str) -> None:
    """With them, and where a gradient explodes: see training/test_guard.py."""
    world, parallel = WORLDS[name]
    expected = train_plainly(NAN)
    for seen in pool.run(world, guard_plain, tmp_path, parallel, NAN, SKIPS):
        assert seen.losses == pytest.approx(expected, rel=0, abs=1e-10, nan_ok=True)
        assert seen.summary["guard"]["num_skipped"] == len(seen.decisions) == 4


def test_the_comparison_notices_a_step_that_is_not_dropped(pool: Pool, tmp_path: Path) -> None:
    seen = pool.run(1, guard_without_dropping, tmp_path, pt.Parallel(), NAN, SKIPS)[0]
    assert seen.losses != pytest.approx(train_plainly(NAN), rel=0, abs=1e-10, nan_ok=True)


def test_an_overflow_halves_the_scale_and_changes_nothing(pool: Pool, bert_config: Path, tmp_path: Path) -> None:
    case = Case("vit", bert_config, precision="float16", optimizer="adamw")
    arguments = case, STAGES, str(tmp_path), {1: 0, 3: 1}
    fused, plain = (pool.run(2, train, *arguments) for train in (steps_with_overflow, overflow_plain))
    for one, other in zip(fused, plain, strict=True):
        assert [(step.skipped, step.scale, step.changed) for step in one] == [
            (step.skipped, step.scale, step.changed) for step in other
        ]


@pytest.mark.thinned("0.2")
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_the_host_waits_once_in_a_step(dropout: float, pool: Pool, bert_config: Path, tmp_path: Path) -> None:
    case = Case("bert", bert_config, dropout, num_samples=24, num_steps=5)
    alone = {0: plan(0, 0, [HEAD], 1, 2), 2: plan(2, 0, [HEAD], 1, 2)}
    assert pool.run(1, reads_of_steps, case, alone, str(tmp_path)) == [[1] * 5]
    stages = {0: plan(0, 0, [3, HEAD], 1, 2), 2: plan(2, 0, [4, HEAD], 1, 2)}
    for reads in pool.run(2, reads_of_steps, case, stages, str(tmp_path)):
        assert [reads[1], *reads[3:]] == [1] * 3, "torch sets a pipeline up in its first step"


@pytest.mark.parametrize(("device", "drops"), [("cpu", True), ("cuda", False)])
def test_weights_in_host_memory_beside_a_gpu_wait_for_the_host_to_judge(device: str, drops: bool) -> None:
    """The flag comes from the device by a copy that nobody waits for, and the host's kernel would read it too early."""
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], fused=True)
    resident = SimpleNamespace(home=torch.device("cpu"))
    runtime: Any = SimpleNamespace(observer=None, optimizer=optimizer, resident=resident, device=torch.device(device))
    update = WeightUpdate(runtime, pt.AdamW(lr=1.0), mock.Mock())
    assert (update._dropping is optimizer) == drops
