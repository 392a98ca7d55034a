"""Layers that have learning rates of their own move by them."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.cases import NUM_BLOCKS, Case
from support.own_rates import step_once, step_with_one_group
from support.plans import HEAD, plan, sharded
from support.pool import Pool

FACTORS = [0.125 * layer for layer in range(NUM_BLOCKS + 2)]
PLANS = {
    "one stage": (1, plan(0, 0, [HEAD], 1, 2)),
    "two stages": (2, plan(0, 0, [3, HEAD], 1, 2)),
    "sharded": (2, sharded(0, 0, 2, 1)),
}


def check(step: Callable[..., dict[str, torch.Tensor]], arrangement: str, pool: Pool, case: Case, folder: Path) -> None:
    """Compares a step with factors and one without: SGD's first update is proportional to the rate."""
    world, chosen = PLANS[arrangement]
    stack = case.stack()
    before = {name: tensor.detach() for layer in stack.layers for name, tensor in layer.tensors()}
    whole = pool.run(world, step, case, chosen, 0.01, str(folder))[0]
    scaled = pool.run(world, step, case, chosen, [0.01 * factor for factor in FACTORS], str(folder))[0]
    for layer, factor in enumerate(FACTORS):
        for name, _ in stack[layer].tensors():
            expected = factor * (whole[name] - before[name])
            torch.testing.assert_close(scaled[name] - before[name], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("arrangement", PLANS)
def test_each_layer_moves_by_its_own_rate(arrangement: str, pool: Pool, bert_config: Path, tmp_path: Path) -> None:
    check(step_once, arrangement, pool, Case("vit", bert_config, optimizer="sgd"), tmp_path)


def test_layers_in_one_group_would_not(pool: Pool, bert_config: Path, tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        check(step_with_one_group, "one stage", pool, Case("vit", bert_config, optimizer="sgd"), tmp_path)
