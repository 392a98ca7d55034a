"""The processes that share a cache, as the cache needs to know them."""

from typing import Protocol, TypeVar

Value = TypeVar("Value")


class Peers(Protocol):
    """The processes of this node and, beyond it, of the run. All of the run make the same calls.

    Attributes:
        worker: This process among those of its node.
        num_workers: Processes of its node.
    """

    worker: int
    num_workers: int

    def from_first(self, value: Value) -> Value:
        """The value that worker 0 of this node gave."""
        ...

    def first_of(self, value: Value | None) -> Value | None:
        """The value of the first process of the run that has one."""
        ...

    def totals(self, *numbers: int) -> tuple[int, ...]:
        """Each number's sum over all processes of the run; nobody goes on before everybody has come so far."""
        ...


class Alone:
    """A run of one process."""

    worker, num_workers = 0, 1

    def from_first(self, value: Value) -> Value:
        return value

    def first_of(self, value: Value | None) -> Value | None:
        return value

    def totals(self, *numbers: int) -> tuple[int, ...]:
        return numbers
