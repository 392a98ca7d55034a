import pytest

from pipetransformer.planning.timeline import Timeline

CLOCK = Timeline(num_samples=10, batch_size=4, steps_per_epoch=3, num_steps=6, decision_every=3)


@pytest.mark.parametrize(("step", "num_samples"), [(0, 10), (2, 10), (3, 10), (4, 6), (5, 2)])
def test_a_sample_counts_until_its_last_epoch_has_read_it(step: int, num_samples: int) -> None:
    assert CLOCK.samples_left(step) == num_samples


def test_a_decision_falls_between_steps_and_never_before_the_first() -> None:
    assert [step for step in range(7) if CLOCK.is_decision_step(step)] == [3, 6]
