"""Process groups, made once for each set of ranks, and the device mesh that names those of a plan.

The paper keeps a group for messages beside the one for active tensors. Here the world of all ranks carries messages,
idle ranks included, and the groups of this file carry active tensors. A third kind would not pay: no rank waits for a
message while a step runs, because all ranks decide alike from the same numbers, so messages fall between steps.
"""

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Store
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _get_default_store

from pipetransformer.autodp.topology import PIPELINE_AXIS, REPLICA_AXIS, Ranks, Topology
from pipetransformer.autopipe.plan import Plan
from pipetransformer.runtime.mesh import RankMesh
from pipetransformer.runtime.precision import Precision
from pipetransformer.runtime.tracing import Recorder

Value = TypeVar("Value")


def own_store() -> Store:
    """Returns a connection of its own to the store that joins the ranks of the world, for use beside collectives."""
    return _get_default_store().clone()


@contextmanager
def batch_scheduled(device_type: str) -> Iterator[None]:
    """Gives threads that start inside Linux' policy ``SCHED_BATCH``: they wait for a core, and take none from others.

    For process groups of gloo, whose receiving thread tries the lock of a connection again and again while the sending
    thread holds it. A receiver that has taken the core of that sender does so until its time slice ends::

        sender     lock, send                                  rest, unlock
        receiver              an answer: try, try, try, try, ...             read, the collective goes on
                              |<-- milliseconds of one core --->|

    A policy that the user has set stays. Systems without this one, or that refuse it as some sandboxes do, are as they
    are; it matters to speed alone.

    Args:
        device_type: Of the groups; those of GPUs are not gloo's, and nothing changes.
    """
    is_linux = hasattr(os, "sched_getscheduler")
    is_free = device_type == "cpu" and is_linux and os.sched_getscheduler(0) == os.SCHED_OTHER  # 0: the calling thread
    is_set = is_free and _set_policy(os.SCHED_BATCH)
    try:
        yield
    finally:
        if is_set:
            _set_policy(os.SCHED_OTHER)


def _set_policy(policy: int) -> bool:
    """Sets the policy of the calling thread; returns whether the system lets it."""
    with suppress(OSError):
        os.sched_setscheduler(0, policy, os.sched_param(0))
        return True
    return False


class ProcessGroups:
    """Process groups by their ranks.

    Most groups of a plan come back in later plans, so they are kept until the end. Their number is bounded by the
    arrangements that occur, not by the transitions.

    Args:
        timeout_s: Seconds after which a collective fails that not all ranks of its group have joined.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout = timedelta(seconds=timeout_s)
        self._groups: dict[Ranks, ProcessGroup | None] = {}

    def resolve(self, topology: Topology, device_type: str, shared: Iterable[Iterable[int]] = ()) -> "ResolvedTopology":
        """Creates the groups of a topology that do not exist yet. Every rank of the world calls it for the same plan.

        Args:
            topology: The rank's own view of the plan.
            device_type: The device type of the mesh: ``cpu`` or ``cuda``.
            shared: For each weight that layers share, these layers; the ranks of a pipeline that run them get a group.
        """
        replicas, num_groups = range(topology.plan.num_replicas), len(self)
        with batch_scheduled(device_type):
            self._create(topology.all_groups())
            self._create(topology.holders(layers, replica) for layers in shared for replica in replicas)
        if len(self) > num_groups:  # a rank that closes a group at once would break those that still connect
            barrier(torch.device(device_type))
        return ResolvedTopology(topology, self._mesh(topology, device_type), self)

    def _create(self, wanted: Iterable[Ranks]) -> None:
        for ranks in wanted:
            if ranks not in self._groups:
                group = dist.new_group(list(ranks), timeout=self._timeout)
                self._groups[ranks] = group if isinstance(group, ProcessGroup) else None

    def _mesh(self, topology: Topology, device_type: str) -> DeviceMesh | None:
        if topology.coordinates is None:
            return None
        names, sizes = tuple(topology.mesh_shape), tuple(topology.mesh_shape.values())
        groups = [self[topology.ranks_along(axis, topology.coordinates)] for axis in names]
        ranks = torch.arange(topology.num_ranks).view(sizes)  # one dimension for each axis
        return DeviceMesh.from_group(groups, device_type, mesh=ranks, mesh_dim_names=names)

    def __len__(self) -> int:
        return len(self._groups)

    def __getitem__(self, ranks: Ranks) -> ProcessGroup:
        """Returns the group of these ranks, for a member."""
        group = self._groups[ranks]
        assert group is not None, f"this rank is not one of {ranks}"
        return group

    def close(self) -> None:
        """Destroys all groups. Not a collective, so a rank that fails may call it alone."""
        groups = [group for group in self._groups.values() if group is not None]
        self._groups.clear()
        for group in groups:
            destroy_group(group)


def backend_of(device_type: str, group: ProcessGroup | None = None) -> str | None:
    """Returns the backend of a process group for a type of device, as gloo; ``None`` where it has none."""
    backends = (each.partition(":") for each in dist.get_backend_config(group).split(","))
    return {kind: backend for kind, _, backend in backends}.get(device_type)


def destroy_group(group: ProcessGroup | None = None) -> None:
    """Destroys a process group, by default that of the world.

    Nccl first waits for all kernels of a group. Where this rank has failed, they may wait for it. The group is then
    left to the end of the process, so that the error is told. Kernels of a world of one rank wait for no other, and a
    script may go on with a world of another device.
    """
    waits = backend_of("cuda", group) == "nccl" and dist.get_world_size() > 1
    if not waits or sys.exception() is None:
        dist.destroy_process_group(group)


@dataclass(frozen=True)
class ResolvedTopology:
    """One rank's view of a plan together with its process groups.

    Attributes:
        topology: The rank's position and the ranks along each axis.
        mesh: The ranks of the plan with the named axes of the topology; ``None`` on an idle rank.
    """

    topology: Topology
    mesh: DeviceMesh | None
    _groups: ProcessGroups

    @property
    def plan(self) -> Plan:
        return self.topology.plan

    def group(self, axis: str) -> ProcessGroup:
        """Returns the group of this rank along an axis of the mesh."""
        assert self.mesh is not None, f"rank {self.topology.rank} is idle"
        return self.mesh.get_group(axis)

    @property
    def pipeline(self) -> ProcessGroup:
        """The ranks of this rank's pipeline, by device."""
        return self.group(PIPELINE_AXIS)

    @property
    def replicas(self) -> ProcessGroup:
        """The ranks that run the same layers, by replica."""
        return self.group(REPLICA_AXIS)

    @property
    def norm_group(self) -> ProcessGroup:
        """The ranks over which squared gradient norms are summed: each has another part of the whole gradient."""
        if self.plan.mesh.num_ranks > 1:
            return self._groups[self.topology.model_ranks]
        return self.replicas if self.plan.fsdp else self.pipeline

    def rank_mesh(self) -> RankMesh | None:
        """Returns this rank's view of the ranks that run its stage together; ``None`` where there are no others."""
        mesh, ranks = self.plan.mesh, self.topology.sharing_ranks
        if len(ranks) == 1 or self.topology.is_idle:
            return None
        own = (found for found in mesh.groups(ranks[0]) if self.topology.rank in found[1])
        return RankMesh(mesh, self.topology.mesh_rank, {axes: self._groups[members] for axes, members in own})

    def holders(self, layers: Iterable[int]) -> ProcessGroup:
        """Returns the group of this pipeline's ranks that run at least one of the layers, for a member."""
        return self._groups[self.topology.holders(layers)]


def broadcast_from_rank0(value: Value) -> Value:
    """Broadcasts a value of rank 0, so that all ranks decide alike; tensors in host memory. Collective."""
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


def any_rank(flag: bool, device: torch.device) -> bool:
    """Returns whether the flag is set on any rank. Collective."""
    number = torch.tensor(int(flag), device=device)
    dist.all_reduce(number)
    return bool(number.item())


def barrier(device: torch.device) -> None:
    """Waits until all ranks have come as far. Collective.

    Torch's own warns on a GPU that its process group is bound to no device.
    """
    dist.all_reduce(torch.zeros((), device=device))
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True)
class RankContext:
    """Everything that stays the same on a rank from plan to plan.

    Attributes:
        device: The device that the rank computes on.
        precision: The types in which it computes.
        groups: The process groups of all plans so far.
        recorder: Records when passes begin and end, in the steps in which it is asked to.
        randomness: ``sample`` or ``device``: where dropout gets its numbers, see :mod:`pipetransformer.runtime.rng`.
        compiles: Blocks run as compiled graphs.
        offload_folder: Of the files in which chunks of layers lie; ``None``: in host memory.
    """

    device: torch.device
    precision: Precision
    groups: ProcessGroups
    recorder: Recorder
    randomness: str = "sample"
    compiles: bool = False
    offload_folder: Path | None = None

    @classmethod
    def create(
        cls, device: torch.device, precision: Precision, timeout_s: float, randomness: str = "sample",
        compiles: bool = False, offload_folder: Path | None = None,
    ) -> "RankContext":  # fmt: skip
        """Creates the context of a rank whose collectives fail after ``timeout_s`` seconds."""
        groups, recorder = ProcessGroups(timeout_s), Recorder(device)
        return cls(device, precision, groups, recorder, randomness, compiles, offload_folder)
