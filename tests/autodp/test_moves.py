from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from pipetransformer.autodp.moves import Move, Placement, initial_placement, moves, next_placement
from pipetransformer.autopipe.plan import Plan

NUM_RANKS = 8


def plan(stages: tuple[tuple[int, int], ...], num_replicas: int, level: int = 0) -> Plan:
    return Plan(level, level, stages, num_replicas, num_microbatches=1)


@st.composite
def plans(draw: st.DrawFn, num_layers: int = 6) -> Plan:
    level = draw(st.integers(0, num_layers - 2))
    first = level + 1 if level else 0
    cuts = sorted(cut for cut in draw(st.sets(st.integers(1, num_layers - 1))) if cut > first)
    stages = tuple(zip([first, *cuts], [*(cut - 1 for cut in cuts), num_layers - 1], strict=True))
    return plan(stages, draw(st.integers(1, NUM_RANKS // len(stages))), level)


def pairs(placement: Placement) -> set[tuple[int, int]]:
    return {(layer, rank) for layer, holders in enumerate(placement) for rank in holders}


def test_a_layer_is_held_by_its_stage_in_every_replica() -> None:
    assert initial_placement(plan(((0, 1), (2, 3)), num_replicas=2)) == ((0, 2), (0, 2), (1, 3), (1, 3))


def test_a_run_that_starts_cached_parks_the_layers_below_with_the_first_rank() -> None:
    assert initial_placement(plan(((2, 3),), num_replicas=2, level=1)) == ((0,), (0,), (0, 1), (0, 1))


def test_a_cached_layer_stays_with_the_lowest_rank_that_held_it() -> None:
    before = initial_placement(plan(((0, 1), (2, 4)), num_replicas=2))
    after = next_placement(plan(((3, 4),), num_replicas=4, level=2), before)
    assert after == ((0,), (0,), (1,), (0, 1, 2, 3), (0, 1, 2, 3))


def test_under_fsdp_every_rank_keeps_its_share_of_the_cached_layers_too() -> None:
    before, after = (Plan(level, level, ((first, 3),), 2, 1, fsdp=True) for level, first in ((0, 0), (1, 2)))
    everywhere = ((0, 1),) * 4
    assert initial_placement(before) == initial_placement(after) == next_placement(after, everywhere) == everywhere


def test_two_stages_become_two_replicas() -> None:
    before = initial_placement(plan(((0, 1), (2, 3)), num_replicas=1))
    after = next_placement(plan(((0, 3),), num_replicas=2), before)
    assert moves(before, after) == (Move(0, 0, 1), Move(1, 0, 1), Move(2, 1, 0), Move(3, 1, 0))


def test_a_parked_layer_comes_back_from_where_it_was_parked() -> None:
    parked = next_placement(plan(((2, 3),), 1, level=1), ((1,), (1,), (0,), (0,)))
    assert moves(parked, next_placement(plan(((0, 3),), 1), parked)) == (Move(0, 1, 0), Move(1, 1, 0))


def test_holders_share_the_sending() -> None:
    sent = Counter(move.source for move in moves(((0, 1, 2),) * 4, (tuple(range(8)),) * 4))
    assert sorted(sent.values()) == [6, 7, 7]


@given(plans(), plans())
def test_exactly_what_is_missing_moves_once_from_an_old_holder(first: Plan, second: Plan) -> None:
    old = initial_placement(first)
    new = next_placement(second, old)
    planned = moves(old, new)
    received = [(move.layer, move.target) for move in planned]
    assert received == sorted(pairs(new) - pairs(old))
    assert all(move.source in old[move.layer] for move in planned)


@given(st.lists(plans(), min_size=1, max_size=6))
def test_no_layer_is_ever_lost(arrangements: list[Plan]) -> None:
    placement = initial_placement(arrangements[0])
    for arrangement in arrangements[1:]:
        placement = next_placement(arrangement, placement)
        assert all(holders and list(holders) == sorted(set(holders)) for holders in placement)


@given(plans())
def test_the_same_plan_moves_nothing(arrangement: Plan) -> None:
    placement = initial_placement(arrangement)
    assert moves(placement, next_placement(arrangement, placement)) == ()
