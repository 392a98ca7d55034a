import pytest

from pipetransformer.autopipe.plan import Plan
from pipetransformer.simulate.order import order


def drawn(plan: Plan) -> list[str]:
    """Each device's passes; the stage is named where a device has several."""
    many = plan.stages_per_rank > 1
    return [
        " ".join(
            ("F" if one.is_forward else "B") + (f"{one.stage}." if many else "") + str(one.microbatch)
            for one in order(plan, device)
        )
        for device in range(plan.pipeline_size)
    ]


def pipeline(num_stages: int, num_microbatches: int, schedule: str, stages_per_rank: int = 1) -> Plan:
    stages = tuple((layer, layer) for layer in range(num_stages))
    return Plan(0, 0, stages, 1, num_microbatches, schedule, stages_per_rank)


def test_gpipe_runs_all_forward_passes_first() -> None:
    assert drawn(pipeline(2, 3, "gpipe")) == ["F0 F1 F2 B0 B1 B2"] * 2


def test_1f1b_alternates_after_a_lead() -> None:
    assert drawn(pipeline(3, 4, "1f1b")) == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]


def test_interleaved_takes_turns_between_the_stages_of_a_device() -> None:
    assert drawn(pipeline(4, 4, "interleaved1f1b", stages_per_rank=2)) == [
        "F0.0 F0.1 F2.0 F2.1 F0.2 B2.0 F0.3 B2.1 F2.2 B0.0 F2.3 B0.1 B2.2 B2.3 B0.2 B0.3",
        "F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 F1.2 B1.0 F1.3 B1.1 F3.2 B3.2 F3.3 B3.3 B1.2 B1.3",
    ]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("num_microbatches", [1, 2, 7])
def test_every_microbatch_passes_once_each_way(schedule: str, num_microbatches: int) -> None:
    for device in range(4):
        passes = order(pipeline(4, num_microbatches, schedule), device)
        assert len(set(passes)) == len(passes) == 2 * num_microbatches
