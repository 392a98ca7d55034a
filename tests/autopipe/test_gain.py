import pytest

from pipetransformer.autopipe.gain import TransitionOption, choose_transition
from pipetransformer.autopipe.plan import Plan


def plan(step_s: float, num_replicas: int = 1) -> Plan:
    return Plan(0, 0, ((0, 3),), num_replicas, num_microbatches=1, predicted_step_s=step_s)


SLOW, FAST, FASTEST = plan(0.5), plan(0.4, 2), plan(0.3, 4)


@pytest.mark.parametrize(
    ("num_steps_left", "cost_s", "pays"),
    [(10, 0.99, True), (10, 1.01, False), (100, 1.01, True), (0, 0.0, False)],
)
def test_a_transition_pays_when_the_rest_of_the_run_saves_more_than_it_takes(
    num_steps_left: int, cost_s: float, pays: bool
) -> None:
    choice = choose_transition(SLOW, [TransitionOption(FAST, cost_s)], num_steps_left)
    assert choice.plan == (FAST if pays else SLOW)
    assert choice.cost_s == (cost_s if pays else 0)
    assert choice.gain_s == pytest.approx(0.1 * num_steps_left if pays else 0)


def test_a_slower_plan_never_pays() -> None:
    assert choose_transition(FAST, [TransitionOption(SLOW, 0.0)], 10).plan == FAST


@pytest.mark.parametrize(("num_steps_left", "wanted"), [(5, SLOW), (15, FAST), (50, FASTEST)])
def test_of_several_the_one_with_which_the_run_ends_soonest(num_steps_left: int, wanted: Plan) -> None:
    options = [
        TransitionOption(FASTEST, 5.0),
        TransitionOption(FAST, 1.0),
    ]  # from 40 steps on the larger cost is worth it
    assert choose_transition(SLOW, options, num_steps_left).plan == wanted


def test_without_a_way_to_stay_it_goes_whatever_it_takes() -> None:
    choice = choose_transition(None, [TransitionOption(SLOW, 9.0)], 1)
    assert (choice.plan, choice.cost_s) == (SLOW, 9.0)
    assert "cannot stay" in choice.reason


def test_with_nowhere_to_go_it_stays() -> None:
    assert choose_transition(SLOW, [], 100).plan == SLOW


def test_the_reason_has_the_numbers() -> None:
    assert choose_transition(SLOW, [TransitionOption(FAST, 1.5)], 20).reason == (
        "20 steps of 0.5 s would take 0.4 s each: 2 s less, more than the 1.5 s of the transition"
    )
    stays = choose_transition(SLOW, [TransitionOption(FAST, 3.0)], 20).reason
    assert stays.startswith("it stays: ")
    assert stays.endswith("no more than the 3 s of the transition")
