"""Which chunks are on a device: eviction by next use, the bytes of a step, and what a device has at least."""

import random
from collections.abc import Mapping, Sequence
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipetransformer.autopipe.offload import Chunk, HostTraffic, Residency, smallest_budget, step_traffic

SIZES = {Chunk(layer, kind): 10 for layer in range(6) for kind in ("weights", "gradient")}


def fetched(trace: Sequence[int], budget: int, knows_order: bool) -> int:
    residency = Residency(dict.fromkeys(trace, 1), budget, trace if knows_order else None)
    for chunk in trace:
        residency.begin(chunk)
        residency.end(chunk)
    return residency.traffic.fetched


def fewest(trace: Sequence[int], budget: int) -> int:
    """Of all ways to choose what leaves."""
    states: dict[frozenset[int], int] = {frozenset(): 0}
    for chunk in trace:
        after: dict[frozenset[int], int] = {}
        for state, count in states.items():
            if chunk in state:
                after[state] = min(after.get(state, count), count)
                continue
            smaller = [state] if len(state) < budget else [state - {other} for other in state]
            for rest in smaller:
                key = rest | {chunk}
                after[key] = min(after.get(key, count + 1), count + 1)
        states = after
    return min(states.values())


def test_eviction_by_next_use_fetches_least() -> None:
    draw = random.Random(1)
    for length, budget in product((6, 8), (2, 3)):
        for _ in range(50):
            trace = [draw.randrange(5) for _ in range(length)]
            assert fetched(trace, budget, True) == fewest(trace, budget)


def test_eviction_by_next_use_is_never_worse_than_by_last_use() -> None:
    draw = random.Random(2)
    for _ in range(1000):
        trace, budget = [draw.randrange(8) for _ in range(40)], draw.randint(1, 6)
        assert fetched(trace, budget, True) <= fetched(trace, budget, False)


@given(st.integers(0, 2**32), st.integers(2, 6), st.integers(2, 30))
def test_what_comes_ahead_costs_no_byte_and_no_room(seed: int, num_chunks: int, budget: int) -> None:
    """Uses are of one or two chunks at a time, of different sizes; the second round knows the order of the first."""
    draw = random.Random(seed)
    sizes = {chunk: draw.randint(1, budget // 2) for chunk in range(num_chunks)}
    uses = [draw.sample(range(num_chunks), draw.randint(1, 2)) for _ in range(30)]
    plain, ahead = (traffic_of(sizes, budget, uses, prefetches) for prefetches in (False, True))
    assert (ahead.fetched, ahead.written) == (plain.fetched, plain.written)
    assert plain.peak <= ahead.peak <= budget
    assert plain.ahead == 0
    assert 0 <= ahead.ahead <= ahead.fetched


def traffic_of(sizes: Mapping[int, int], budget: int, uses: Sequence[Sequence[int]], prefetches: bool) -> HostTraffic:
    residency, traffic = Residency(sizes, budget), HostTraffic()
    for _ in range(2):
        traffic = residency.traffic
        for together in uses:
            for chunk in together:
                residency.begin(chunk)
            if prefetches and residency.next is not None:
                residency.prefetch(residency.next)
            for chunk in together:
                residency.end(chunk, changed=chunk % 2 == 1)
        residency.end_step([])
    return traffic


def test_the_next_weights_come_while_a_layer_computes_where_there_is_room_for_them() -> None:
    weights = 60
    assert step_traffic(SIZES, 20, range(6), 0, 1)[1].ahead == 50, "in backward the budget is full of one layer"
    middle = step_traffic(SIZES, 40, range(6), 0, 1)[1]
    assert 50 <= middle.ahead < middle.fetched
    assert step_traffic(SIZES, 120, range(6), 0, 1)[1].ahead == weights - 10, "each comes once, the first at its use"


@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("budget", range(20, 130, 10))
def test_the_bytes_of_a_step(budget: int, num_microbatches: int) -> None:
    layers, weights = range(6), 60
    first, later = step_traffic(SIZES, budget, layers, 0, num_microbatches)
    assert later.fetched <= first.fetched
    assert first.peak <= budget
    assert later.peak <= budget
    assert later.written >= weights, "the gradient of each layer, once at least"
    assert later.fetched >= weights, "each weight has changed on the host"
    assert later.fetched <= (2 * num_microbatches + num_microbatches - 1) * weights, "each pass and each gradient again"
    if budget == 120:
        assert (later.fetched, later.written) == (weights, weights)


def test_half_of_the_weights_halves_what_is_fetched_again() -> None:
    """The figures of the design: 2 micro-batches at 0.81 of the weights fetch at most 3.02 times the weights."""
    sizes = {Chunk(layer, kind): 1000 for layer in range(100) for kind in ("weights", "gradient")}
    _, later = step_traffic(sizes, 81_000, range(100), 0, 2)
    assert later.fetched <= 3.02 * 100_000


def test_frozen_weights_stay_from_step_to_step() -> None:
    sizes = {chunk: size for chunk, size in SIZES.items() if chunk.kind == "weights" or chunk.layer > 2}
    _, later = step_traffic(sizes, 70, range(6), 3, 1)
    assert later.fetched == 30, "those of the three active layers"
    assert later.written == 30
    assert step_traffic(sizes, 60, range(3, 6), 3, 1)[1].fetched == 30, "cached layers are not fetched"


def test_a_device_has_weights_and_gradient_of_the_largest_layer_at_least() -> None:
    sizes = {Chunk(0, "weights"): 25, Chunk(1, "weights"): 10, Chunk(1, "gradient"): 10}
    assert smallest_budget(sizes) == 25
    with pytest.raises(AssertionError, match="exceed the budget of 24"):
        step_traffic(sizes, 24, range(2), 1, 1)
