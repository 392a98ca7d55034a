from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from pipetransformer.autopipe.bounds import Shares


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(1, 4))
def test_no_deal_keeps_all_devices_below_the_bound(weights: list[int], num_devices: int) -> None:
    deals = product(range(num_devices), repeat=len(weights))
    loads = (
        [sum(w for w, at in zip(weights, deal, strict=True) if at == d) for d in range(num_devices)] for deal in deals
    )
    assert Shares(weights).largest(num_devices) <= min(max(load) for load in loads) + 1e-9


def test_seven_equal_layers_on_two_devices_are_four_on_one() -> None:
    assert Shares([1.0] * 7).largest(2) == 4
