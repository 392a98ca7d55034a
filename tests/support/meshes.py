"""Topologies resolved to process groups on the ranks of a world."""

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cached_property
from unittest import mock

import torch.distributed as dist

from pipetransformer.autodp.topology import Topology
from pipetransformer.autopipe.plan import Plan
from pipetransformer.runtime import elastic
from pipetransformer.runtime.groups import ProcessGroups, own_store
from support.cases import Case
from support.trainings import Plans, Trace, build, train_elastic

TENSOR_AXIS = "tp"
Resolved = tuple[dict[str, int], dict[str, list[int]]]
"""The size of each axis of the mesh, and the ranks of this rank's group along it."""


class ThreeAxes(Topology):
    """A topology with a further axis, whose ranks are neighbors."""

    size = 2

    @cached_property
    def mesh_shape(self) -> dict[str, int]:
        return {**Topology(self.plan, self.rank).mesh_shape, TENSOR_AXIS: self.size}


class OneMoreAxis(ThreeAxes):
    """The same with an axis of one rank."""

    size = 1


def resolve(topologies: Mapping[str, type[Topology]], plan: Plan) -> dict[str, Resolved | None]:
    """Resolves a plan once for each kind of topology; ``None`` where this rank is idle."""
    groups = ProcessGroups(60)
    resolved = {name: _resolved(groups, kind(plan, dist.get_rank())) for name, kind in topologies.items()}
    groups.close()
    return resolved


def threads() -> set[int]:
    """The threads of this process, by the numbers that the system gives them."""
    return {int(name) for name in os.listdir("/proc/self/task")}


def policies(of: Iterable[int]) -> set[int]:
    """The policies by which Linux schedules threads; one that has just begun has no name of its own yet."""
    found: set[int] = set()
    for thread in of:
        with suppress(OSError):  # it has ended meanwhile
            found.add(os.sched_getscheduler(thread))
    return found


@contextmanager
def scheduled_as_at_first() -> Iterator[None]:
    """Gives the calling thread the policy with which a user's process begins; the tests run under another one."""
    own = os.sched_getscheduler(0)
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    try:
        yield
    finally:
        os.sched_setscheduler(0, own, os.sched_param(0))


def policies_of_groups(plan: Plan) -> tuple[set[int], int]:
    """Resolves a plan; the policies of the threads that came with its groups, and afterwards of the calling one."""
    groups, before = ProcessGroups(60), threads()
    with scheduled_as_at_first():
        groups.resolve(Topology(plan, dist.get_rank()), "cpu")
        found, after = policies(threads() - before), os.sched_getscheduler(0)
    groups.close()
    return found, after


def leaves_before_others_come(plan: Plan) -> bool:
    """Whether an idle rank is done with the groups of a plan while another has yet to make them; seen on rank 0."""
    groups, store, seen = ProcessGroups(60), own_store(), False
    if dist.get_rank() == 0:
        with suppress(RuntimeError):  # nobody has left in time
            store.wait(["left"], timedelta(seconds=0.3))
            seen = True
    groups.resolve(Topology(plan, dist.get_rank()), "cpu")
    store.set("left", "")
    groups.close()
    return seen


def _resolved(groups: ProcessGroups, topology: Topology) -> Resolved | None:
    mesh = groups.resolve(topology, "cpu").mesh
    if mesh is None:
        return None
    names = mesh.mesh_dim_names or ()
    ranks = {name: dist.get_process_group_ranks(mesh.get_group(name)) for name in names}
    return dict(zip(names, mesh.shape, strict=True)), ranks


def train_with_one_more_axis(case: Case, plans: Plans, folder: str) -> Trace:
    """Trains as usual, on a mesh with a third axis of one rank."""
    with mock.patch.object(elastic, "Topology", OneMoreAxis):
        return train_elastic(case, plans, folder)


def train_beside_other_groups(case: Case, plans: Plans, folder: str) -> Trace:
    """Trains as usual, where process groups have other names than in a run that begins with the world's."""
    others = [dist.new_group([rank]) for rank in range(dist.get_world_size()) for _ in range(8)]
    trace = train_elastic(case, plans, folder)
    del others
    return trace


def groups_left_open(case: Case, plan: Plan, folder: str, fails: bool) -> tuple[int, int]:
    """Counts this rank's process groups inside a runtime, and after it has ended, by a failure if wanted."""
    runtime, loader, groups = build(case, folder)
    loader.close()
    try:
        with runtime:
            runtime.apply_plan(plan)
            during = len(groups)
            if fails:
                raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    return during, len(groups)
