"""A transition moves the layers that have to move, and afterwards each rank runs its own."""

from pathlib import Path

import pytest
from support.cases import Case
from support.observations import Seen, many_transitions, observe, poisoned_step
from support.plans import HEAD, PIPE_TO_DATA, plan
from support.pool import Pool

from pipetransformer.autodp.topology import Topology
from pipetransformer.autodp.transition import Transition, first_transition, next_transition
from pipetransformer.autopipe.plan import Plan


def in_turn(plans: list[Plan]) -> list[Transition]:
    """The transitions through plans, from the start."""
    transitions = [first_transition(plans[0])]
    for each in plans[1:]:
        transitions.append(next_transition(transitions[-1], each))
    return transitions


@pytest.fixture(scope="module")
def seen(pool: Pool, bert_config: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Seen]:
    """Each rank's observations through 4 stages, 2 x 2 and 4 replicas."""
    return pool.run(4, observe, Case("vit", bert_config), PIPE_TO_DATA, str(tmp_path_factory.mktemp("cache")))


def test_a_rank_holds_the_layers_of_its_stage_and_what_is_parked_with_it(seen: list[Seen]) -> None:
    placements = [transition.placement for transition in in_turn(list(PIPE_TO_DATA.values()))]
    for rank, own in enumerate(seen):
        expected = [[layer for layer, ranks in enumerate(p) if rank in ranks] for p in placements]
        assert own.held == expected
    offloaded = [layers for layers in seen[3].held if 0 in layers]
    assert offloaded == [], "a frozen and cached layer stays with one rank, not with all"


def test_optimizer_state_is_held_for_the_active_layers_of_the_stage_only(seen: list[Seen]) -> None:
    for rank, own in enumerate(seen):
        for current, with_state in zip(PIPE_TO_DATA.values(), own.with_state, strict=True):
            own_layers = Topology(current, rank).layers
            assert with_state == [layer for layer in own_layers if layer >= current.first_active_layer]


def test_a_cached_block_never_runs_neither_in_a_step_nor_in_an_evaluation(seen: list[Seen]) -> None:
    for own in seen:
        for current, ran, evaluated in zip(PIPE_TO_DATA.values(), own.ran, own.evaluated, strict=True):
            assert ran, "every rank ran something"
            assert evaluated, "in evaluation, too"
            assert min(*ran, *evaluated) >= current.first_layer


def test_every_layer_of_a_stage_runs_once_per_micro_batch(seen: list[Seen]) -> None:
    for rank, own in enumerate(seen):
        for current, ran in zip(PIPE_TO_DATA.values(), own.ran, strict=True):
            assert ran == dict.fromkeys(Topology(current, rank).layers, current.num_microbatches)


def test_the_bytes_sent_are_those_of_the_moves(seen: list[Seen], bert_config: Path) -> None:
    stack = Case("vit", bert_config).stack()
    for index, transition in enumerate(in_turn(list(PIPE_TO_DATA.values()))[1:], start=1):
        current, expected = transition.after, 0
        for move in transition.moves:
            tensors = dict(stack[move.layer].tensors())
            num_bytes = sum(t.numel() * t.element_size() for t in tensors.values())
            state = 0
            if move.layer >= current.first_active_layer:  # Adam: two moments and a float32 step count
                parameters = list(stack[move.layer].parameters())
                state = sum(2 * p.numel() * p.element_size() + 4 for p in parameters)
            expected += num_bytes + state
        assert {own.bytes_moved[index] for own in seen} == {expected}


def test_evaluation_counts_every_sample_once_at_every_topology(seen: list[Seen]) -> None:
    for index in range(len(PIPE_TO_DATA)):
        assert len({tuple(own.scores[index].items()) for own in seen}) == 1, "all ranks have the same score"


ROUND = {  # wider and narrower, more and fewer stages, frozen and thawed
    0: plan(0, 0, [1, 3, 5, HEAD], 1, 4),
    1: plan(2, 0, [4, HEAD], 2, 2),
    2: plan(4, 0, [HEAD], 4, 1),
    3: plan(0, 0, [3, HEAD], 1, 2),
}


def test_fifty_transitions_leave_nothing_open(pool: Pool, bert_config: Path, tmp_path: Path) -> None:
    for early, late in pool.run(4, many_transitions, Case("vit", bert_config), ROUND, str(tmp_path), (12, 50)):
        assert late.groups == early.groups
        # a leak would be one in each of the 38 transitions between; sockets of earlier worlds may still be closing
        assert late.threads < early.threads + 8
        assert late.files < early.files + 8
        assert late.resident_mib < early.resident_mib + 8


@pytest.mark.parametrize(("replicas", "precision"), [(1, "float64"), (2, "float64"), (1, "float16")])
def test_a_loss_that_is_not_finite_stops_every_rank_before_any_weight_changes(
    replicas: int, precision: str, pool: Pool, bert_config: Path, tmp_path: Path
) -> None:
    """Idle ranks too: there is one more than the plan needs. No lower scale of the loss would help."""
    plans = {0: plan(0, 0, [3, HEAD], replicas, 2)}
    case = Case("vit", bert_config, precision=precision)
    results = pool.run(2 * replicas + 1, poisoned_step, case, plans, str(tmp_path))
    assert all("nan" in message and unchanged for message, unchanged in results)
