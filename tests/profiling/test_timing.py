"""A measurement tells what a call takes by itself, whatever disturbs some of its repeats."""

from itertools import count, repeat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipetransformer.profiling.timing import ENOUGH_S, FEWEST, MOST, spread, typical, until_settled

SECONDS = st.lists(st.floats(1e-4, 1e-2), min_size=1, max_size=MOST)


@given(SECONDS)
def test_half_of_the_repeats_may_be_disturbed_by_any_amount(seconds: list[float]) -> None:
    disturbed = [*seconds, *(1e3 + each for each in seconds[: len(seconds) - 1])]
    assert typical(disturbed) == pytest.approx(typical(seconds), rel=1e3)
    assert min(seconds) <= typical(disturbed) <= max(seconds)
    assert spread(disturbed) <= max(seconds) / min(seconds) - 1 + 1e-9


def test_the_typical_repeat_is_the_middle_of_the_faster_half() -> None:
    assert typical([5.0, 1.0, 9.0, 2.0, 3.0]) == 2
    assert typical([1.0, 2.0, 8.0, 9.0]) == 1.5
    assert spread([5.0, 1.0, 9.0, 2.0, 3.0]) == 2
    assert spread([0.0, 0.0]) == 0


@pytest.mark.parametrize(
    ("times", "num_repeats"),
    [
        (repeat(0.001), FEWEST),
        (iter([0.001, 0.001, 0.3, *[0.7] * MOST]), FEWEST),
        (iter([0.001, 0.0015, 0.3, 0.001, *[0.7] * MOST]), FEWEST + 1),
        ((0.001 * 2**n for n in count()), 9),
        ((1e-9 * 2**n for n in count()), MOST),
        (iter([1.0, 1.5, 1.0 + 2 * ENOUGH_S, 9.0]), FEWEST),
    ],
    ids=["steady", "one disturbed", "two disturbed", "ever slower", "never settles", "takes long"],
)
def test_repeats_are_added_while_the_faster_half_differs_much(times: object, num_repeats: int) -> None:
    measured = until_settled(lambda: next(times), lambda seconds: seconds)  # type: ignore[call-overload]
    assert len(measured) == num_repeats
