from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipetransformer.autodp.transition import (
    Move,
    Placement,
    Transition,
    choose_transition,
    first_transition,
    moves_between,
    next_transition,
    transfer_seconds,
)
from pipetransformer.autopipe.cluster import Cluster, Link
from pipetransformer.autopipe.plan import Plan
from pipetransformer.autopipe.profile import AffineTime, LayerProfile, Profile

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
    assert first_transition(plan(((0, 1), (2, 3)), num_replicas=2)).placement == ((0, 2), (0, 2), (1, 3), (1, 3))


def test_a_run_that_starts_cached_leaves_the_layers_below_with_the_first_rank() -> None:
    assert first_transition(plan(((2, 3),), num_replicas=2, level=1)).placement == ((0,), (0,), (0, 1), (0, 1))


def test_a_cached_layer_stays_with_the_lowest_rank_that_held_it() -> None:
    before = first_transition(plan(((0, 1), (2, 4)), num_replicas=2))
    after = next_transition(before, plan(((3, 4),), num_replicas=4, level=2))
    assert after.placement == ((0,), (0,), (1,), (0, 1, 2, 3), (0, 1, 2, 3))


def test_under_fsdp_every_rank_keeps_its_share_of_the_cached_layers_too() -> None:
    before, after = (Plan(level, level, ((first, 3),), 2, 1, fsdp=True) for level, first in ((0, 0), (1, 2)))
    everywhere = ((0, 1),) * 4
    first, at_once = first_transition(before), first_transition(after)
    later = next_transition(first, after)
    assert first.placement == at_once.placement == later.placement == everywhere
    assert later.moves == ()


def test_two_stages_become_two_replicas() -> None:
    before = first_transition(plan(((0, 1), (2, 3)), num_replicas=1))
    transition = next_transition(before, plan(((0, 3),), num_replicas=2))
    assert transition.moves == (
        Move(0, 0, 1),
        Move(1, 0, 1),
        Move(2, 1, 0),
        Move(3, 1, 0),
    )


def test_an_offloaded_layer_comes_back_from_where_it_was() -> None:
    cached = plan(((2, 3),), 1, level=1)
    parked = Transition(None, cached, ((1,), (1,), (0,), (0,)))
    assert next_transition(parked, plan(((0, 3),), 1)).moves == (Move(0, 1, 0), Move(1, 1, 0))


def test_holders_share_the_sending() -> None:
    sent = Counter(move.source for move in moves_between(((0, 1, 2),) * 4, (tuple(range(8)),) * 4))
    assert sorted(sent.values()) == [6, 7, 7]


@given(plans(), plans())
def test_exactly_what_is_missing_moves_once_from_an_old_holder(first: Plan, second: Plan) -> None:
    old = first_transition(first)
    new = next_transition(old, second)
    received = [(move.layer, move.target) for move in new.moves]
    assert received == sorted(pairs(new.placement) - pairs(old.placement))
    assert all(move.source in old.placement[move.layer] for move in new.moves)


@given(st.lists(plans(), min_size=1, max_size=6))
def test_no_layer_is_ever_lost(sequence: list[Plan]) -> None:
    transition = first_transition(sequence[0])
    for each in sequence[1:]:
        transition = next_transition(transition, each)
        assert all(holders and list(holders) == sorted(set(holders)) for holders in transition.placement)


@given(plans())
def test_the_same_plan_moves_nothing(same: Plan) -> None:
    first = first_transition(same)
    assert (first.before, first.moves) == (None, ())
    again = next_transition(first, same)
    assert (again.before, again.moves, again.placement) == (same, (), first.placement)


ZERO = AffineTime(0.0, 0.0)
PROFILE = Profile((LayerProfile("block", ZERO, ZERO, ZERO, 0.0, 100, 0, 0),) * 6, optimizer_state_factor=2.0)
NODE = Cluster(4, None, Link(0.0, 100.0))
NODES = Cluster(4, None, Link(0.0, 100.0), node_link=Link(0.0, 10.0), devices_per_node=2)


def seconds(*moves: tuple[int, int, int], cluster: Cluster = NODE, num_frozen: int = 0, parks: bool = False) -> float:
    return transfer_seconds([Move(*move) for move in moves], PROFILE, cluster, num_frozen, parks)


def test_nothing_to_move_takes_no_time() -> None:
    assert seconds() == 0


def test_active_layers_bring_their_optimizer_state_and_frozen_ones_do_not() -> None:
    assert seconds((3, 0, 1)) == pytest.approx(3)
    assert seconds((3, 0, 1), num_frozen=3) == pytest.approx(1)
    assert seconds((3, 0, 1), num_frozen=3, parks=True) == pytest.approx(3), "unless theirs is parked"


def test_ranks_send_and_receive_at_once_and_the_busiest_counts() -> None:
    assert seconds((1, 0, 1), (2, 1, 0), (3, 2, 3)) == pytest.approx(3)
    assert seconds((1, 0, 1), (2, 0, 2)) == pytest.approx(6)


def test_the_devices_of_a_node_share_its_link() -> None:
    assert seconds((1, 0, 1), cluster=NODES) == pytest.approx(3)
    assert seconds((1, 0, 2), (2, 1, 3), cluster=NODES) == pytest.approx(60)


def to(step_s: float, num_replicas: int = 1) -> Transition:
    """From nowhere to a plan with so many seconds per step."""
    return first_transition(Plan(0, 0, ((0, 3),), num_replicas, num_microbatches=1, predicted_step_s=step_s))


SLOW, FAST, FASTEST = to(0.5), to(0.4, 2), to(0.3, 4)


@pytest.mark.parametrize(
    ("num_steps_left", "cost_s", "pays"),
    [(10, 0.99, True), (10, 1.01, False), (100, 1.01, True), (0, 0.0, False)],
)
def test_a_transition_pays_when_the_rest_of_the_run_saves_more_than_it_takes(
    num_steps_left: int, cost_s: float, pays: bool
) -> None:
    choice = choose_transition(SLOW, [replace(FAST, cost_s=cost_s)], num_steps_left)
    assert choice.after == (FAST if pays else SLOW).after
    assert choice.cost_s == (cost_s if pays else 0)
    assert choice.gain_s == pytest.approx(0.1 * num_steps_left if pays else 0)


def test_a_slower_plan_never_pays() -> None:
    assert choose_transition(FAST, [replace(SLOW, cost_s=0.0)], 10).after == FAST.after


@pytest.mark.parametrize(("num_steps_left", "wanted"), [(5, SLOW), (15, FAST), (50, FASTEST)])
def test_of_several_the_one_with_which_the_run_ends_soonest(num_steps_left: int, wanted: Transition) -> None:
    options = [
        replace(FASTEST, cost_s=5.0),
        replace(FAST, cost_s=1.0),
    ]  # from 40 steps on the larger cost is worth it
    assert choose_transition(SLOW, options, num_steps_left).after == wanted.after


def test_without_a_way_to_stay_it_goes_whatever_it_takes() -> None:
    choice = choose_transition(None, [replace(SLOW, cost_s=9.0)], 1, "block 2 trains again")
    assert (choice.after, choice.cost_s) == (SLOW.after, 9.0)
    assert choice.reason == "the current plan is no longer valid: block 2 trains again"


def test_without_a_way_to_stay_the_run_ends_soonest() -> None:
    options = [replace(FAST, cost_s=3.0), replace(SLOW, cost_s=1.0)]
    soon, late = (choose_transition(None, options, num_steps, "so it is") for num_steps in (10, 100))
    assert (soon.after, late.after) == (SLOW.after, FAST.after)
    assert soon.reason.endswith("so it is; caching nothing ends the run 1 s sooner")


def test_with_nowhere_to_go_it_stays() -> None:
    assert choose_transition(SLOW, [], 100).after == SLOW.after


def test_the_reason_has_the_numbers() -> None:
    assert choose_transition(SLOW, [replace(FAST, cost_s=1.5)], 20).reason == (
        "20 steps at 0.4 s instead of 0.5 s save 2 s, more than the 1.5 s that the transition costs"
    )
    assert choose_transition(SLOW, [replace(FAST, cost_s=3.0)], 20).reason == (
        "keeps the current stages: 20 steps at 0.4 s instead of 0.5 s would save 2 s, and the transition costs 3 s"
    )
    assert choose_transition(FAST, [replace(SLOW, cost_s=3.0)], 20).reason == (
        "keeps the current stages: 20 steps at 0.5 s instead of 0.4 s would lose 2 s, and the transition costs 3 s"
    )


@given(plans(), plans())
def test_each_move_comes_from_the_holder_that_has_sent_least_so_far(one: Plan, other: Plan) -> None:
    old, new = first_transition(one).placement, first_transition(other).placement
    num_sent: Counter[int] = Counter()
    for move in moves_between(old, new):
        assert move.source == min(old[move.layer], key=lambda rank: (num_sent[rank], rank))
        num_sent[move.source] += 1
