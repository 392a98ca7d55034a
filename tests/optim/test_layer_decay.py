"""A rate for each layer: timm's values, and exact through transitions, with weights that layers share."""

from pathlib import Path

import pytest
import timm
import torch
from support.cases import Case
from support.exactness import assert_equal
from support.plans import HEAD, plan, sharded
from support.pool import Pool
from support.trainings import train_elastic, train_reference
from timm.optim import param_groups_layer_decay

from pipetransformer.models.timm_layers import split_layers
from pipetransformer.optim.base import AdamW


def test_the_factors_of_a_vision_transformer_are_those_of_timm() -> None:
    model = timm.create_model("vit_tiny_patch16_224", depth=4, num_classes=3)
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = param_groups_layer_decay(model, layer_decay=0.75)
    theirs = {names[p]: group["lr_scale"] for group in groups for p in group["params"]}
    stack, spec = split_layers(model), AdamW(lr=1.0, layer_decay=0.75)
    optimizer = spec.build_layers({index: stack.owners(index) for index in range(len(stack))})
    assert optimizer is not None
    factors = spec.rates(1.0, len(stack))
    ours = {names[p]: factors[group["layer"]] for group in optimizer.param_groups for p in group["params"]}
    assert {theirs.pop(name) for name in ("norm.weight", "norm.bias")} == {0.75}, "timm's last block has it"
    assert {ours.pop(name) for name in ("norm.weight", "norm.bias")} == {1.0}, "here and in BEiT the head"
    assert ours == pytest.approx(theirs)


PLANS = {
    0: plan(0, 0, [2, HEAD], 1, 2),
    2: plan(2, 2, [HEAD], 2, 1),
    4: plan(0, 0, [4, HEAD], 1, 2),
}


@pytest.mark.thinned("bert_mlm")
@pytest.mark.parametrize("kind", ["vit", "bert_mlm"])
def test_rates_by_layer_are_kept_through_transitions(kind: str, pool: Pool, bert_config: Path, tmp_path: Path) -> None:
    """The word embeddings of the masked language model, which its head shares, have the embedding's rate."""
    case = Case(kind, bert_config, optimizer="adamw_by_layer", num_steps=6)
    trace = pool.run(2, train_elastic, case, PLANS, str(tmp_path))[0]
    assert_equal(trace, train_reference(case, {0: 0, 2: 2, 4: 0}))


def test_rates_by_layer_are_kept_on_shards(pool: Pool, bert_config: Path, tmp_path: Path) -> None:
    case = Case("vit", bert_config, optimizer="adamw_by_layer", num_steps=4)
    trace = pool.run(2, train_elastic, case, {0: sharded(0, 0, 2, 1), 2: sharded(2, 2, 2, 2)}, str(tmp_path))[0]
    assert_equal(trace, train_reference(case, {0: 0, 2: 2}))


def test_layers_of_one_rate_share_their_groups() -> None:
    layers = {index: [torch.nn.Parameter(torch.ones(2, 2))] for index in range(4)}
    for layer_decay, num_groups in ((1.0, 1), (0.5, 4)):
        optimizer = AdamW(lr=0.1, layer_decay=layer_decay).build_layers(layers)
        assert optimizer is not None
        assert len(optimizer.param_groups) == num_groups
