import pytest

from pipetransformer.autopipe.gain import gain


@pytest.mark.parametrize(
    ("num_steps_left", "transition_s", "pays"),
    [(10, 0.99, True), (10, 1.01, False), (100, 1.01, True), (0, 0.0, False)],
)
def test_a_transition_pays_when_the_rest_of_the_run_saves_more_than_it_takes(
    num_steps_left: int, transition_s: float, pays: bool
) -> None:
    decision = gain(0.5, 0.4, num_steps_left, transition_s)
    assert (decision.pays, decision.cost_s) == (pays, transition_s)
    assert decision.gain_s == pytest.approx(0.1 * num_steps_left)


def test_a_slower_plan_never_pays() -> None:
    assert not gain(0.4, 0.5, 10, 0.0).pays


def test_the_reason_has_the_numbers() -> None:
    assert gain(0.5, 0.4, 20, 1.5).reason == (
        "20 steps of 0.5 s would take 0.4 s each: 2 s less, more than the 1.5 s of the transition"
    )
    assert "no more than the 3 s of the transition" in gain(0.5, 0.4, 20, 3.0).reason
