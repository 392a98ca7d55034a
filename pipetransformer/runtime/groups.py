"""Process groups, made once for each set of ranks and used again by every plan that needs the set.

The paper keeps a group for messages beside the one for active tensors. Here the world of all ranks carries messages,
idle ranks included, and the groups of this file carry active tensors. A third kind would not pay: nobody listens while
a step runs, since all ranks decide alike from the same numbers, so that messages fall between steps.
"""

from collections.abc import Iterable
from datetime import timedelta

import torch.distributed as dist

Ranks = tuple[int, ...]


class Groups:
    """Groups of ranks by membership.

    Most groups of a plan come back in later plans, so they are kept until the end: their number is bounded by the
    arrangements that occur, not by the transitions.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout = timedelta(seconds=timeout_s)
        self._groups: dict[Ranks, dist.ProcessGroup | None] = {}

    def prepare(self, wanted: Iterable[Ranks]) -> None:
        """Makes the groups that do not exist yet. Every rank of the world calls it with the same groups in order."""
        for ranks in wanted:
            if ranks not in self._groups:
                group = dist.new_group(list(ranks), timeout=self._timeout)
                self._groups[ranks] = group if isinstance(group, dist.ProcessGroup) else None

    def __len__(self) -> int:
        return len(self._groups)

    def __getitem__(self, ranks: Ranks) -> dist.ProcessGroup:
        """The group of these ranks, for a member."""
        group = self._groups[ranks]
        assert group is not None, f"this rank is not one of {ranks}"
        return group

    def close(self) -> None:
        for group in self._groups.values():
            if group is not None:
                dist.destroy_process_group(group)
        self._groups.clear()
