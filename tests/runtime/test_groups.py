"""A topology resolves to the right process groups, on one mesh with named axes, and no group is left open."""

import errno
import os
import sys
import threading
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch.distributed as dist
from support.cases import Case
from support.meshes import (
    TENSOR_AXIS,
    OneMoreAxis,
    ThreeAxes,
    groups_left_open,
    leaves_before_others_come,
    policies_of_groups,
    resolve,
    train_with_one_more_axis,
)
from support.plans import HEAD, PIPE_TO_DATA, plan
from support.pool import Pool
from support.trainings import train_elastic

from pipetransformer.autodp.topology import PIPELINE_AXIS, REPLICA_AXIS, Topology
from pipetransformer.autopipe.plan import Plan
from pipetransformer.runtime.groups import batch_scheduled, destroy_group

ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has SCHED_BATCH")
STAGES = ((0, 3), (4, HEAD))
PLANS = {
    "pipelines first": Plan(0, 0, STAGES, 2, 2),
    "replicas first": Plan(0, 0, STAGES, 2, 2, rank_order="replica-first"),
    "one pipeline": Plan(0, 0, STAGES, 1, 2),
    "data parallel": Plan(0, 0, ((0, HEAD),), 4, 1),
}


@pytest.mark.parametrize("name", PLANS)
def test_every_rank_gets_the_groups_of_its_topology_and_an_idle_one_none(name: str, pool: Pool) -> None:
    for rank, resolved in enumerate(pool.run(5, resolve, {"": Topology}, PLANS[name])):
        topology = Topology(PLANS[name], rank)
        if topology.coordinates is None:
            assert resolved[""] is None
            continue
        sizes, ranks = resolved[""]
        assert sizes == topology.mesh_shape
        assert ranks == {
            PIPELINE_AXIS: list(topology.pipeline_ranks),
            REPLICA_AXIS: list(topology.replica_ranks),
        }


def test_no_rank_closes_its_groups_while_others_still_connect(pool: Pool) -> None:
    assert pool.run(3, leaves_before_others_come, Plan(0, 0, ((0, HEAD),), 2, 1)) == [False, False, False]


def test_a_further_axis_resolves_to_its_groups_beside_the_others(pool: Pool) -> None:
    """Two pipelines of two devices, each device being two ranks: 0 and 1, 2 and 3, and so on."""
    for rank, resolved in enumerate(pool.run(8, resolve, {"": ThreeAxes}, PLANS["pipelines first"])):
        sizes, ranks = resolved[""]
        assert sizes == {REPLICA_AXIS: 2, PIPELINE_AXIS: 2, TENSOR_AXIS: 2}
        assert ranks == {
            REPLICA_AXIS: [rank % 4, rank % 4 + 4],
            PIPELINE_AXIS: [rank - rank % 4 + rank % 2, rank - rank % 4 + rank % 2 + 2],
            TENSOR_AXIS: [rank - rank % 2, rank - rank % 2 + 1],
        }


def test_an_axis_of_one_rank_leaves_the_other_groups_as_they_are(pool: Pool) -> None:
    kinds = {"two": Topology, "three": OneMoreAxis}
    for rank, resolved in enumerate(pool.run(4, resolve, kinds, PLANS["replicas first"])):
        assert resolved["three"][1] == resolved["two"][1] | {TENSOR_AXIS: [rank]}


@pytest.mark.thorough  # every run compares the groups: test_an_axis_of_one_rank_leaves_the_other_groups_as_they_are
def test_a_further_axis_of_one_rank_changes_no_number(pool: Pool, bert_config: Path, tmp_path: Path) -> None:
    case = Case("bert_mlm", bert_config, dropout=0.2)
    two = pool.run(4, train_elastic, case, PIPE_TO_DATA, str(tmp_path))[0]
    three = pool.run(4, train_with_one_more_axis, case, PIPE_TO_DATA, str(tmp_path))[0]
    assert (three.losses, three.norms) == (two.losses, two.norms)
    assert all((three.weights[name] == tensor).all() for name, tensor in two.weights.items())


@ON_LINUX
@pytest.mark.parametrize("name", ["pipelines first", "data parallel"])
def test_threads_of_groups_take_no_core_from_others(name: str, pool: Pool) -> None:
    """A receiving thread of gloo that takes the core of the sending one spins until its time slice ends."""
    for found, after in pool.run(4, policies_of_groups, PLANS[name]):
        assert found == {os.SCHED_BATCH}
        assert after == os.SCHED_OTHER


@ON_LINUX
def test_a_policy_that_the_user_has_set_stays() -> None:
    seen: list[int] = []

    def idle() -> None:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # of this thread
        with batch_scheduled("cpu"):
            seen.append(os.sched_getscheduler(0))
        seen.append(os.sched_getscheduler(0))

    thread = threading.Thread(target=idle)
    thread.start()
    thread.join()
    assert seen == [os.SCHED_IDLE] * 2


def test_a_system_without_policies_goes_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getscheduler", raising=False)
    with batch_scheduled("cpu"):
        pass


@ON_LINUX
def test_a_system_that_refuses_the_policy_goes_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """As gVisor does."""
    asked: list[int] = []

    def refuse(_: int, policy: int, __: object) -> None:
        asked.append(policy)
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "sched_getscheduler", lambda _: os.SCHED_OTHER)
    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    with batch_scheduled("cpu"):
        assert sys.exception() is None
    assert asked == [os.SCHED_BATCH]


@pytest.mark.parametrize("fails", [False, True])
def test_all_groups_are_closed_at_the_end_also_after_a_failure(
    fails: bool, pool: Pool, bert_config: Path, tmp_path: Path
) -> None:
    pipelines = plan(0, 0, [3, HEAD], 2, 2)
    for during, after in pool.run(4, groups_left_open, Case("vit", bert_config), pipelines, str(tmp_path), fails):
        assert during == 4
        assert after == 0


@pytest.mark.parametrize(("backend", "world", "fails", "is_destroyed"), [
    ("cpu:gloo,cuda:gloo", 2, True, True), ("cuda:nccl", 2, False, True), ("cuda:nccl", 2, True, False),
    ("cpu:gloo,cuda:nccl", 2, True, False), ("cuda:nccl", 1, True, True),
])  # fmt: skip
def test_a_rank_that_fails_does_not_wait_for_the_kernels_of_nccl(
    backend: str, world: int, fails: bool, is_destroyed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    destroyed: list[object] = []
    monkeypatch.setattr(dist, "get_backend_config", lambda _: backend)
    monkeypatch.setattr(dist, "get_world_size", lambda: world)
    monkeypatch.setattr(dist, "destroy_process_group", destroyed.append)
    with pytest.raises(ZeroDivisionError) if fails else nullcontext():
        try:
            1 / (0 if fails else 1)
        finally:
            destroy_group()
    assert destroyed == [None] * is_destroyed
