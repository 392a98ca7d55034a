"""The ranks that share a cache, as far as the cache has to know them."""

from typing import Protocol, TypeVar

Value = TypeVar("Value")


class Communicator(Protocol):
    """The ranks that share a cache. All methods are collectives of all ranks of the run.

    Attributes:
        local_rank: This rank within its node.
        local_world_size: Ranks of its node.
    """

    local_rank: int
    local_world_size: int

    def broadcast_from_local_leader(self, value: Value) -> Value:
        """Returns the value of local rank 0 of this node."""
        ...

    def first_not_none(self, value: Value | None) -> Value | None:
        """Returns the value of the lowest rank that has one."""
        ...

    def all_reduce_sum(self, *numbers: int) -> tuple[int, ...]:
        """Returns each number's sum over all ranks. Also acts as a barrier."""
        ...


class SingleProcess:
    """The communicator of a run of one process."""

    local_rank, local_world_size = 0, 1

    def broadcast_from_local_leader(self, value: Value) -> Value:
        return value

    def first_not_none(self, value: Value | None) -> Value | None:
        return value

    def all_reduce_sum(self, *numbers: int) -> tuple[int, ...]:
        return numbers
