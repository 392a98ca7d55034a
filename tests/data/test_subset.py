import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipetransformer.data.subset import choose, hold_out


@given(st.integers(1, 200), st.integers(1, 250), st.integers(1, 250))
def test_draws_are_fixed_ascending_and_nested(num_samples: int, one: int, other: int) -> None:
    small, large = choose(num_samples, min(one, other)), choose(num_samples, max(one, other))
    assert len(small) == min(num_samples, one, other)
    assert (np.diff(small) > 0).all()
    assert {*small.tolist()} <= {*large.tolist()} <= {*range(num_samples)}
    np.testing.assert_array_equal(large, choose(num_samples, max(one, other)))


def test_without_a_limit_all_samples_are_used() -> None:
    assert choose(7, None).tolist() == [*range(7)]


def test_a_draw_is_spread_over_the_data() -> None:
    assert choose(1000, 10).max() > 500


@given(st.floats(0.1, 0.8))
def test_a_held_out_share_is_disjoint_and_stratified(fraction: float) -> None:
    labels = np.repeat([0, 1, 2], [60, 30, 30])
    kept, held_out = hold_out(labels, fraction, "share")
    assert sorted([*kept, *held_out]) == [*range(120)]
    assert np.bincount(labels[held_out]) == pytest.approx(fraction * np.array([60, 30, 30]), abs=1)


def test_a_share_too_small_for_the_classes_is_refused() -> None:
    with pytest.raises(ValueError, match=r"dataset\.validation_fraction=0\.01 cannot be split off 20 samples"):
        hold_out(np.repeat([0, 1], 10), 0.01, "dataset.validation_fraction")
