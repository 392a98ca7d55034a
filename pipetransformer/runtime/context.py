"""The surroundings of one rank: its device, its precision, its process groups and its recorder."""

from dataclasses import dataclass

import torch

from pipetransformer.runtime.groups import ProcessGroups
from pipetransformer.runtime.precision import Precision
from pipetransformer.runtime.tracing import Recorder


@dataclass(frozen=True)
class RankContext:
    """Everything that stays the same on a rank from plan to plan.

    Attributes:
        device: The device that the rank computes on.
        precision: The types in which it computes.
        groups: The process groups of all plans so far.
        recorder: Records when passes begin and end, in the steps in which it is asked to.
    """

    device: torch.device
    precision: Precision
    groups: ProcessGroups
    recorder: Recorder

    @classmethod
    def create(cls, device: torch.device, precision: Precision, timeout_s: float) -> "RankContext":
        """Creates the context of a rank whose collectives fail after ``timeout_s`` seconds."""
        return cls(device, precision, ProcessGroups(timeout_s), Recorder(device))
