import pytest

from pipetransformer.autopipe.cluster import Cluster, Link
from pipetransformer.autopipe.constraints import PlanConstraints, check_constraints, check_world
from pipetransformer.autopipe.profile import AffineTime, LayerProfile, Profile
from pipetransformer.autopipe.search.search import best_plan
from pipetransformer.errors import InfeasiblePlan
from pipetransformer.mesh import SINGLE, StageMesh

LINK, SECOND = Link(0, 1e9), AffineTime(0, 1)
BLOCKS = Profile((LayerProfile("block", SECOND, SECOND, SECOND, 0, 1000, 7, 3),) * 6, optimizer_state_factor=2)


@pytest.mark.parametrize(
    ("constraints", "message"),
    [
        (PlanConstraints(num_stages=7), r"num_stages=7 is more than the 6 layers"),
        (
            PlanConstraints(num_stages=3, num_replicas=3),
            r"num_stages=3 x .*num_replicas=3 need 9 .*there are 8.*num_devices",
        ),
        (PlanConstraints(num_replicas=5), r"num_replicas=5 x num_microbatches=1 is more than batch_size=4"),
        (
            PlanConstraints(num_replicas=2, num_microbatches=3),
            r"num_replicas=2 x num_microbatches=3 .*batch_size=4",
        ),
        (PlanConstraints(num_stages=3, num_microbatches=2, schedule="1f1b"), r"num_stages=3 stages.*at most 2.*gpipe"),
        (PlanConstraints(stages=((0, 2), (4, 5))), r"do not cover layers 0 to 5"),
        (PlanConstraints(stages=((0, 2), (3, 5)), num_stages=3), r"num_stages=3 contradicts the fixed stages"),
        (
            PlanConstraints(num_stages=3, stages_per_rank=2),
            r"num_stages=3 cannot be 2 stages .*take num_stages=4",
        ),
        (PlanConstraints(stages_per_rank=4), r"stages_per_rank=4 needs 8 layers for two devices, and 6 run"),
        (
            PlanConstraints(num_stages=6, stages_per_rank=2, num_replicas=3),
            r"num_stages=6 / stages_per_rank=2 x .* need 9 devices",
        ),
    ],
)
def test_pins_that_collide_are_named(constraints: PlanConstraints, message: str) -> None:
    with pytest.raises(InfeasiblePlan, match=message):
        check_constraints(constraints, range(6), num_devices=8, batch_size=4)


@pytest.mark.parametrize("schedule", ["ZBV", "DualPipeV", "InterleavedZeroBubble"])
def test_an_unknown_schedule_is_told_the_known_ones(schedule: str) -> None:
    with pytest.raises(ValueError, match=f"schedule={schedule} does not exist; choose one of 1f1b, gpipe"):
        PlanConstraints(schedule=schedule)


def test_a_pin_below_one_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"num_replicas=0 must be at least 1"):
        PlanConstraints(num_replicas=0)


def test_a_world_that_the_batch_cannot_fill_is_refused() -> None:
    check_world(num_devices=12, num_layers=6, batch_size=2)
    with pytest.raises(InfeasiblePlan, match=r"num_devices=13 is more than 6 layers x batch_size=2"):
        check_world(num_devices=13, num_layers=6, batch_size=2)


@pytest.mark.parametrize(
    ("mesh", "most"), [(StageMesh(tp=8), 6 * 8), (StageMesh(dp_shard=2), 6 * 2), (StageMesh(cp=2, dp_shard=2), 6 * 4)]
)
def test_a_world_may_be_as_large_as_the_meshes_of_one_layer_and_one_sample_are(mesh: StageMesh, most: int) -> None:
    check_world(most, 6, 1, (SINGLE, mesh))
    with pytest.raises(InfeasiblePlan, match=rf"6 layers x batch_size=1 can fill \({most} devices\)"):
        check_world(most + 1, 6, 1, (SINGLE, mesh))


def test_chunks_that_fit_no_schedule_are_refused() -> None:
    with pytest.raises(ValueError, match=r"schedule=gpipe runs one stage on each device; drop stages_per_rank=2"):
        PlanConstraints(schedule="gpipe", stages_per_rank=2)
    with pytest.raises(InfeasiblePlan, match=r"nothing on 4 devices .*num_microbatches=5.*interleaved1f1b.*needs"):
        best_plan(
            BLOCKS,
            Cluster(4, None, LINK),
            8,
            constraints=PlanConstraints(num_stages=4, stages_per_rank=2, num_microbatches=5),
        )
