import pytest
import torch

from pipetransformer.runtime.precision import GROWTH_INTERVAL, INITIAL_SCALE, MAX_SCALE, PRECISIONS, LossScale


def after(scale: LossScale, num_good_steps: int) -> float:
    for _ in range(num_good_steps):
        scale.grow()
    return scale.value


def test_the_scale_doubles_after_good_steps_in_a_row() -> None:
    scale = LossScale(PRECISIONS["float16"])
    assert after(scale, GROWTH_INTERVAL - 1) == INITIAL_SCALE
    assert after(scale, 1) == 2 * INITIAL_SCALE
    assert after(scale, GROWTH_INTERVAL - 1) == 2 * INITIAL_SCALE
    scale.shrink()
    assert (scale.value, scale.num_skipped) == (INITIAL_SCALE, 1)
    assert after(scale, GROWTH_INTERVAL - 1) == INITIAL_SCALE, "the count begins anew"
    assert after(scale, 1) == 2 * INITIAL_SCALE


def test_the_scale_has_bounds() -> None:
    scale = LossScale(PRECISIONS["float16"])
    assert after(scale, 20 * GROWTH_INTERVAL) == MAX_SCALE
    while not scale.is_lowest:
        scale.shrink()
    assert scale.value == 1


@pytest.mark.parametrize("name", [name for name in PRECISIONS if name != "float16"])
def test_other_precisions_are_not_scaled(name: str) -> None:
    scale = LossScale(PRECISIONS[name])
    assert scale.is_lowest, "what is not finite is no overflow"
    assert after(scale, GROWTH_INTERVAL) == 1


def test_norms_are_those_of_the_loss_without_the_scale() -> None:
    scaled = torch.tensor([INITIAL_SCALE**2 * 9.0, 0.0], dtype=torch.float64)
    assert LossScale(PRECISIONS["float16"]).unscaled(scaled).tolist() == [9.0, 0.0]


@pytest.mark.parametrize("tells", [True, False])
@pytest.mark.parametrize(("one", "other"), [("float16", "bfloat16"), ("bfloat16", "float16"), ("float32", "bfloat16")])
def test_a_run_that_goes_on_in_another_precision_begins_with_its_own_scale(one: str, other: str, tells: bool) -> None:
    before, after_it = (LossScale(PRECISIONS[name]) for name in (one, other))
    before.num_skipped = 3
    state = {name: value for name, value in before.state_dict().items() if tells or name != "max"}
    after_it.load_state_dict(state)
    assert (after_it.value, after_it.num_skipped) == (LossScale(PRECISIONS[other]).value, 3)
    again = LossScale(PRECISIONS[one])
    before.shrink()
    again.load_state_dict(before.state_dict())
    assert vars(again) == vars(before)
