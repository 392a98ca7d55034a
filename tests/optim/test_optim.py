import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from pipetransformer.errors import UserError
from pipetransformer.optim.base import SGD, AdamW, Lamb, OptimizerSpec
from pipetransformer.optim.schedules import SCHEDULES


def rates(num_steps: int = 10, **options: object) -> list[float]:
    spec = SGD(lr=1.0, **options)  # type: ignore[arg-type]
    return [spec.rate(step, num_steps) for step in range(num_steps)]


def test_the_warm_up_rises_to_the_peak_in_equal_steps() -> None:
    assert rates(warmup=0.4, schedule="constant") == pytest.approx([0.25, 0.5, 0.75] + [1.0] * 7)


@given(num_steps=st.integers(1, 2000), percent=st.integers(0, 99))
def test_a_fraction_of_the_steps_is_rounded_up_without_the_noise_of_its_product(num_steps: int, percent: int) -> None:
    values = rates(num_steps, warmup=percent / 100, schedule="constant")
    num_warmup = -(-percent * num_steps // 100)  # of whole numbers, which have no noise
    assert values.index(1.0) == max(0, num_warmup - 1)


def test_a_linear_schedule_would_reach_zero_one_step_after_the_last() -> None:
    assert rates(schedule="linear") == pytest.approx([1 - step / 10 for step in range(10)])


def test_a_cosine_schedule_passes_half_the_peak_in_the_middle() -> None:
    values = rates(num_steps=11, warmup=1 / 11, schedule="cosine")
    assert values[:2] == [1.0, 1.0]
    assert values[6] == pytest.approx(0.5)
    assert values[-1] == pytest.approx((1 + math.cos(0.9 * math.pi)) / 2)


@given(num_steps=st.integers(1, 500), warmup=st.floats(0, 0.99), schedule=st.sampled_from(SCHEDULES), data=st.data())
def test_a_rate_is_above_zero_and_at_most_the_peak(
    num_steps: int, warmup: float, schedule: str, data: st.DataObject
) -> None:
    step = data.draw(st.integers(0, num_steps - 1))
    milestones = [0.3, 0.6] if schedule == "step" else []
    spec = AdamW(lr=3e-4, warmup=warmup, schedule=schedule, milestones=milestones)
    assert 0 < spec.rate(step, num_steps) <= 3e-4


@pytest.mark.parametrize("spec", [kind(lr=0.1, weight_decay=0.5) for kind in (AdamW, SGD, Lamb)])
def test_weight_decay_spares_biases_and_normalisation(spec: OptimizerSpec) -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    optimizer = spec.build(module.parameters())
    assert optimizer is not None
    decays = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    named = {name: decays[id(parameter)] for name, parameter in module.named_parameters()}
    assert named == {"0.weight": 0.5, "0.bias": 0.0, "1.weight": 0.0, "1.bias": 0.0}


def test_frozen_parameters_are_left_out() -> None:
    module = nn.Linear(3, 3)
    module.weight.requires_grad_(False)
    optimizer = AdamW(lr=0.1).build(module.parameters())
    assert optimizer is not None
    assert [p is module.bias for group in optimizer.param_groups for p in group["params"]] == [True]
    module.bias.requires_grad_(False)
    assert AdamW(lr=0.1).build(module.parameters()) is None


@pytest.mark.parametrize("spec", [AdamW(lr=0.1), SGD(lr=0.1), SGD(lr=0.1, momentum=0.0), Lamb(lr=0.1)])
def test_the_state_takes_as_many_bytes_as_the_planner_is_told(spec: OptimizerSpec) -> None:
    weight = nn.Parameter(torch.ones(4, 8))
    optimizer = spec.build([weight])
    assert optimizer is not None
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    tensors = [value for value in optimizer.state[weight].values() if torch.is_tensor(value) and value.ndim]
    assert sum(tensor.nbytes for tensor in tensors) == spec.state_factor * weight.nbytes


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"schedule": "steps"}, "optim.schedule=steps is unknown; choose one of linear, cosine, constant"),
        ({"schedule": "step"}, r"optim.milestones=\[\] and optim.schedule=step do not go together"),
        ({"milestones": [0.5]}, r"optim.milestones=\[0.5\] and optim.schedule=linear do not go together"),
        ({"schedule": "step", "milestones": [3, 5]}, "are not ascending fractions of the run"),
        ({"final_fraction": 2.0}, "optim.final_fraction=2.0 is not from 0 to 1"),
        ({"warmup_steps": -1}, "optim.warmup_steps=-1 must be 0 or more"),
        ({"layer_decay": 0.0}, "optim.layer_decay=0.0 must be above 0"),
        ({"warmup": 1.0}, "optim.warmup=1.0 is not a fraction of the run"),
        ({"lr": 0.0}, "optim.lr=0.0 must be a number above 0"),
        ({"betas": [0.9]}, r"optim\.betas=\[0\.9\] are not two numbers"),
        ({"betas": [0.9, 1.0]}, r"optim\.betas=\[0\.9, 1\.0\] are not two numbers"),
        ({"clip_norm": -1.0}, "optim.clip_norm=-1.0 must be above 0"),
        ({"eps": -1e-8}, "optim.eps=-1e-08 must be 0 or more"),
        ({"momentum": -0.9}, "optim.momentum=-0.9 must be 0 or more and below 1"),
        ({"momentum": float("nan")}, "optim.momentum=nan must be 0 or more"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, object], words: str) -> None:
    spec = SGD if "momentum" in options else AdamW
    with pytest.raises(ValueError, match=words):
        spec(**{"lr": 0.1, **options})  # type: ignore[arg-type]


def test_a_parameter_without_a_gradient_does_not_count_a_step() -> None:
    """Where it trains again it goes on with its own count, which the optimizer raises in place."""
    trained, frozen = (torch.nn.Parameter(torch.ones(2, 2)) for _ in range(2))
    optimizer = Lamb(lr=0.1).build([trained, frozen])
    assert optimizer is not None
    for parameters in ([trained, frozen], [trained], [trained]):
        optimizer.zero_grad()
        sum(parameter.sum() for parameter in parameters).backward()  # type: ignore[union-attr]
        optimizer.step()
    assert [int(optimizer.state[parameter]["step"]) for parameter in (trained, frozen)] == [3, 1]


def test_lamb_is_timms_own_and_counts_the_steps_of_each_parameter() -> None:
    import timm.optim

    ours, theirs = (nn.Linear(3, 3) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    optimizer = Lamb(lr=0.1, weight_decay=0.0).build(ours.parameters())
    original = timm.optim.Lamb(theirs.parameters(), lr=0.1, eps=1e-6, weight_decay=0.0, max_grad_norm=None)
    assert optimizer is not None
    for step in range(3):
        for module in (ours, theirs):
            module.zero_grad()
            module(torch.full((2, 3), step + 1.0)).square().sum().backward()
        optimizer.step()
        original.step()
    torch.testing.assert_close(ours.weight, theirs.weight)
    assert optimizer.state[ours.weight]["step"] == 3, "beside the moments, where a transition finds it"


@pytest.mark.parametrize(
    ("width", "rate"), [(768, 2e-5), (384, 8e-5), (1024, 1.125e-5), (4096, 1e-5), (192, 1.6e-4), (16, 1.6e-4)]
)
def test_the_rate_of_a_recipe_follows_the_models_width_within_bounds(width: int, rate: float) -> None:
    assert AdamW(recipe_lr=2e-5).for_model(width).peak == pytest.approx(rate, rel=1e-12)
    assert AdamW(recipe_lr=2e-5).for_model(width, factor=10).rate(0, 10) == pytest.approx(10 * rate, rel=1e-12)


def test_a_rate_that_is_given_is_taken_as_it_is() -> None:
    assert AdamW(lr=3e-4, recipe_lr=2e-5).for_model(384, factor=10).peak == 3e-4


def test_weights_that_are_drawn_take_ten_times_the_rate_or_one_of_their_own() -> None:
    assert AdamW(recipe_lr=2e-5).for_model(768, 2, pretrained=False).peak == pytest.approx(4e-4, rel=1e-12)
    own = AdamW(recipe_lr=2e-5, scratch_lr=1e-3)
    assert own.for_model(96, 2, pretrained=False).peak == 1e-3
    assert own.for_model(768, 2).peak == pytest.approx(4e-5, rel=1e-12)
    assert AdamW(lr=3e-4, scratch_lr=1e-3).for_model(96, pretrained=False).peak == 3e-4


class OwnAdamW(AdamW):
    """Keeps the largest second moment, too."""

    def _build(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(groups, lr=self.peak, amsgrad=True)


class OfMatrices(SGD):
    def _build(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups[:1], lr=self.peak)


class OfOthers(SGD):
    def _build(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.SGD([*groups, {"params": [nn.Parameter(torch.ones(3))]}], lr=self.peak)


@pytest.mark.parametrize(
    ("kind", "told"), [(OfMatrices, "over 1 of the 2 .* and 0 others"), (OfOthers, "over 2 of the 2 .* and 1 others")]
)
def test_an_optimizer_that_trains_other_parameters_than_it_was_given_is_refused(kind: Any, told: str) -> None:
    with pytest.raises(UserError, match=rf"^{kind.__name__}\._build returned an optimizer {told}; give it all groups"):
        kind(lr=0.1).build(nn.Linear(2, 2).parameters())


class OwnSGD(SGD):
    def _build(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.Adam(groups, lr=self.peak)


class OwnLamb(Lamb):
    def _build(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups, lr=self.peak)


@pytest.mark.parametrize(("kind", "state_factor"), [(OwnAdamW, 3), (OwnSGD, 2), (OwnLamb, 0)])
def test_what_a_class_of_ones_own_builds_is_measured(kind: Any, state_factor: float) -> None:
    spec = kind(lr=0.1)
    assert (spec.state_factor, spec.is_elementwise, spec.takes_parts) == (state_factor, True, True)
    parts = spec.build_layers({0: [nn.Parameter(torch.ones(2, 2))]}, sum_over_parts=lambda values: values)
    assert type(parts) is type(spec.build([nn.Parameter(torch.ones(2, 2))]))
