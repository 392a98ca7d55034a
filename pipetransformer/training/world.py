"""The processes of a run: the process group, its nodes, and this rank's place in its own."""

import math
import os
import socket
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import accumulate

import torch
import torch.distributed as dist

from pipetransformer.config.sections import Parallel
from pipetransformer.cores import num_cores, processor_name
from pipetransformer.errors import UserError
from pipetransformer.runtime.groups import backend_of, batch_scheduled, destroy_group
from pipetransformer.training.meeting import meet


@dataclass
class _OwnWorld:
    """A world that was made here, as long as any context uses it."""

    group: object
    num_users: int = 0

    @property
    def is_there(self) -> bool:
        """False where it has been destroyed, or the world is a script's."""
        return self.group is not None and self.group is dist.group.WORLD


_own_world = _OwnWorld(None)  # the last one


@contextmanager
def open_world(parallel: Parallel) -> Iterator[torch.device]:
    """Joins the world of the launcher, or makes one of this process alone; leaves it at the end.

    A world that is already there is used and stays. One that was made here stays as long as any context uses it: a
    script may open a trainer before it has closed the last one.

    Yields:
        The device of this rank.

    Raises:
        UserError: There are fewer GPUs than ranks on this node, another number of ranks than `world_size` asks for, or
            a world that does not exchange the tensors of the device.
    """
    global _own_world
    device, is_there = _own_device(parallel.device), dist.is_initialized()
    if is_there:
        _check_backend(device.type)
    else:
        _listen_on_loopback()
        backend, timeout = "nccl" if device.type == "cuda" else "gloo", timedelta(seconds=parallel.timeout_s)
        if "RANK" in os.environ:  # a launcher has started this process
            store, rank, world_size = meet(timeout)
        else:
            store, rank, world_size = dist.HashStore(), 0, 1
        with batch_scheduled(device.type):
            dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=world_size)
        _own_world = _OwnWorld(dist.group.WORLD)
    own = _own_world if _own_world.is_there else None
    if own is not None:
        own.num_users += 1
    try:
        if parallel.world_size not in (None, dist.get_world_size()):
            raise UserError(
                f"`world_size`={parallel.world_size}, and there are {dist.get_world_size()} processes; leave it out, "
                f"or start as many by torchrun --nproc-per-node {parallel.world_size}"
            )
        yield device
    finally:
        if own is not None:
            own.num_users -= 1
            if own.num_users == 0:
                if own.is_there:
                    destroy_group()
                own.group = None  # which would keep its threads


def _check_backend(device_type: str) -> None:
    """Raises UserError where the world that a script has made has no backend for the device, or for a GPU gloo."""
    found, wanted = backend_of(device_type), "nccl" if device_type == "cuda" else "gloo"
    if dist.get_world_size() > 1 and found in (None, "gloo") and found != wanted:
        raise UserError(
            f"the ranks train on {device_type}, and their process group exchanges {dist.get_backend_config()}; give "
            f'init_process_group the backend "{wanted}", or the trainer another `device`'
        )


def _listen_on_loopback() -> None:
    """Keeps the backends of one machine's world to its loopback interface, unless the user names another."""
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    if loopback is not None and int(os.environ.get("WORLD_SIZE", "1")) == LocalRank.here().local_world_size:
        for backend in ("GLOO", "NCCL"):
            os.environ.setdefault(f"{backend}_SOCKET_IFNAME", loopback)


def _own_device(wanted: str) -> torch.device:
    node = LocalRank.here()
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if torch.cuda.device_count() < node.local_world_size:
        raise UserError(
            f"{node.local_world_size} processes share {torch.cuda.device_count()} GPUs, each needs one; lower "
            "`world_size` or give `device`=cpu"
        )
    torch.cuda.set_device(node.local_rank)
    return torch.device("cuda", node.local_rank)


def device_name(device: torch.device) -> str:
    """Returns the name of a GPU, or that of the processor."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name()


@dataclass(frozen=True)
class LocalRank:
    """This rank within its node.

    Attributes:
        index: Of the node.
        local_rank: Of this process on the node.
        local_world_size: Processes of the node.
    """

    index: int
    local_rank: int
    local_world_size: int

    @classmethod
    def here(cls) -> "LocalRank":
        """Reads the environment; without a launcher all ranks are on one node."""
        if "LOCAL_RANK" not in os.environ:
            is_there = dist.is_initialized()
            return cls(0, dist.get_rank() if is_there else 0, dist.get_world_size() if is_there else 1)
        return cls(*(int(os.environ[name]) for name in ("GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")))


@dataclass(frozen=True)
class NodeLayout:
    """The nodes of a run, in the order of their ranks.

    Attributes:
        sizes: Ranks of each node.
        index: Of this node.
    """

    sizes: tuple[int, ...]
    index: int

    @property
    def count(self) -> int:
        """Number of nodes."""
        return len(self.sizes)

    @property
    def devices_per_node(self) -> int:
        """Ranks per node. Where nodes differ in size it is their greatest common divisor, so that no group of that many
        consecutive ranks crosses from one node to the next."""
        return math.gcd(*self.sizes)

    def of_rank(self, rank: int) -> int:
        """Returns the node of a rank."""
        return bisect_right(list(accumulate(self.sizes)), rank)

    @classmethod
    def here(cls) -> "NodeLayout":
        """Gathers the nodes of all ranks. Collective."""
        nodes = [LocalRank(0, 0, 1)] * dist.get_world_size()
        dist.all_gather_object(nodes, LocalRank.here())
        sizes = tuple(node.local_world_size for node in nodes if node.local_rank == 0)
        return cls(sizes, bisect_right(list(accumulate(sizes)), dist.get_rank()))


ONE_NODE = NodeLayout((1,), 0)


def limit_threads() -> None:
    """Gives this process the threads of ``OMP_NUM_THREADS``, or else its share of the node's cores.

    More threads than cores wait for each other in busy loops, and take the cores from the one that is waited for. A
    forked rank has the number that its fork server read on import, which may be that of an earlier run.
    """
    given = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]  # of our launcher, torchrun or the user
    share = max(1, num_cores() // LocalRank.here().local_world_size)
    torch.set_num_threads(int(given) if given.isdecimal() and int(given) else share)
