"""The hardware to plan with: devices, nodes, and the links that a layout of pipelines uses."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import lcm

from pipetransformer.autopipe.plan import DeviceLayout
from pipetransformer.errors import UserError


@dataclass(frozen=True)
class Link:
    """Seconds of a message as a line in its bytes.

    Raises:
        UserError: The bandwidth is not above 0.
    """

    latency_s: float
    bandwidth_bytes_per_s: float

    def __post_init__(self) -> None:
        if not self.bandwidth_bytes_per_s > 0:
            raise UserError(f"bandwidth_bytes_per_s={self.bandwidth_bytes_per_s} must be above 0")

    def seconds(self, num_bytes: float) -> float:
        """Returns the seconds of one message."""
        return self.latency_s + num_bytes / self.bandwidth_bytes_per_s

    def shared(self, num_users: int) -> Link:
        """Returns the link as one of several simultaneous users sees it."""
        return Link(self.latency_s, self.bandwidth_bytes_per_s / num_users)


@dataclass(frozen=True)
class Cluster:
    """Equal devices; ranks fill one node after the other.

    Attributes:
        num_devices: Over all nodes.
        device_memory_bytes: Budget of one device; ``None``: no limit.
        link: Between the devices of a node.
        node_link: Between nodes, for all devices of a node together; ``None``: one node, or the same link everywhere.
        devices_per_node: ``None``: all of them.
        allreduce_link, node_allreduce_link: The same links as an all-reduce sees them, which reduces as it sends;
            ``None``: as a message.
        ranks_per_device: Processes that a device is made of, see :func:`~pipetransformer.autopipe.meshes.on_mesh`.
        device_name: Of the first device; ``None`` in a simulation.
        usable_bytes: Memory of a GPU that a plan can use, budget or not; ``None``: not known.
    """

    num_devices: int
    device_memory_bytes: int | None
    link: Link
    node_link: Link | None = None
    devices_per_node: int | None = None
    allreduce_link: Link | None = None
    node_allreduce_link: Link | None = None
    ranks_per_device: int = 1
    device_name: str | None = None
    usable_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.devices_per_node is not None and self.devices_per_node < 1:
            raise UserError(f"devices_per_node={self.devices_per_node} must be at least 1, or None for one node")

    @property
    def node_size(self) -> int | None:
        """Devices that reach each other without the node link; ``None`` where nothing has to take it."""
        whole = self.node_link is None or self.devices_per_node is None or self.devices_per_node >= self.num_devices
        return None if whole else self.devices_per_node


@lru_cache(maxsize=4096)
def boundary_links(cluster: Cluster, devices: DeviceLayout) -> tuple[Link, ...]:
    """Returns the link above each device of a pipeline; the last leads back to the first device, for its next stage.

    The replicas wait for each other, so a boundary is as slow as in the replica where it crosses nodes. Replica-first
    pipelines cross at the same time and share the node link::

        3 devices, 2 replicas, nodes of 4     ranks 0 1 2 | 3 4 5      node 0 ends after rank 3, in replica 1:
                                                    boundary 0 crosses, and so does the way back; boundary 1 does not
    """
    pipeline_size, num_replicas, rank_order = devices
    size = cluster.node_size
    if size is None or cluster.node_link is None:
        return (cluster.link,) * pipeline_size
    if rank_order == "replica-first":
        step, num_users = num_replicas, min(num_replicas, size)
        crossed = {d for d in range(pipeline_size - 1) if ((d + 2) * step - 1) // size > d * step // size}
    else:
        num_users = 1
        ranks = min(num_replicas * pipeline_size, lcm(pipeline_size, size))  # the pattern repeats after that
        crossed = {first % pipeline_size - 1 for first in range(size, ranks, size)} - {-1}
    if crossed:
        crossed.add(pipeline_size - 1)
    node_link = cluster.node_link.shared(num_users)
    return tuple(node_link if device in crossed else cluster.link for device in range(pipeline_size))


@lru_cache(maxsize=4096)
def allreduce_links(cluster: Cluster, devices: DeviceLayout) -> tuple[Link, ...]:
    """Returns the slowest link of the ring through the replicas of each device of a pipeline.

    All devices all-reduce at once. The rings that leave a node share its link: pipeline-first, one ring for each device
    of a node; replica-first, at most two that meet in a node.
    """
    pipeline_size, num_replicas, rank_order = devices
    size = cluster.node_size
    allreduce_link = cluster.allreduce_link or cluster.link
    node_allreduce_link = cluster.node_allreduce_link or cluster.node_link
    if size is None or node_allreduce_link is None or num_replicas == 1:
        return (allreduce_link,) * pipeline_size
    if rank_order == "replica-first":
        ends = ((device * num_replicas, (device + 1) * num_replicas - 1) for device in range(pipeline_size))
        crosses = [first // size != last // size for first, last in ends]
        num_users = 1 if num_replicas % size == 0 or sum(crosses) < 2 else 2
    else:
        last_replica = (num_replicas - 1) * pipeline_size
        crosses = [device >= size or last_replica + device >= size for device in range(pipeline_size)]
        num_users = max(1, min(pipeline_size, size, num_replicas * pipeline_size - size))
    shared = node_allreduce_link.shared(num_users)
    return tuple(shared if crossing else allreduce_link for crossing in crosses)
