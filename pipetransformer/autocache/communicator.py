"""The processes that share a cache, as the cache needs to know them."""

from typing import Protocol, TypeVar

Value = TypeVar("Value")


class Communicator(Protocol):
    """The processes of this node and, beyond it, of the run. All of the run make the same calls.

    Attributes:
        local_rank: This process among those of its node.
        local_world_size: Processes of its node.
    """

    local_rank: int
    local_world_size: int

    def broadcast_from_local_leader(self, value: Value) -> Value:
        """The value that worker 0 of this node gave."""
        ...

    def first_not_none(self, value: Value | None) -> Value | None:
        """The value of the first process of the run that has one."""
        ...

    def all_reduce_sum(self, *numbers: int) -> tuple[int, ...]:
        """Each number's sum over all processes of the run; nobody goes on before everybody has come so far."""
        ...


class SingleProcess:
    """A run of one process."""

    local_rank, local_world_size = 0, 1

    def broadcast_from_local_leader(self, value: Value) -> Value:
        return value

    def first_not_none(self, value: Value | None) -> Value | None:
        return value

    def all_reduce_sum(self, *numbers: int) -> tuple[int, ...]:
        return numbers
