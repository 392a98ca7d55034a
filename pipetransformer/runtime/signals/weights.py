"""The way that the weights have gone since the last decision."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from pipetransformer.runtime.fsdp import local_part
from pipetransformer.runtime.resident import REFERENCE
from pipetransformer.runtime.signals.base import Collector


class WeightChange(Collector):
    """The distance of a block's weights from those at the last decision: ``|w - w_ref| / |w_ref|``.

    The reference lies in host memory beside the optimizer state, so that it moves, is sharded, parked and saved with
    it. A block without one, at the first decision or where its state began anew, has changed infinitely.
    """

    @torch.no_grad()
    def read(self) -> Sequence[float]:
        runtime = self.context.runtime
        sums = torch.zeros(3, runtime.num_layers, dtype=torch.float64)  # of changes, of references, without one
        for layer, own in runtime.measured_blocks.items():
            for parameter in own:
                sums[:, layer] += self._sums(parameter)
        changes, references, missing = runtime.sum_over_parts(sums.to(runtime.device)).tolist()
        values = (
            math.inf if lacks else math.sqrt(change / reference) if reference else 0.0
            for change, reference, lacks in zip(changes, references, missing, strict=True)
        )
        return list(values)[1:-1]

    def _sums(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """Compares a parameter with its reference (3,)."""
        state = self._state(parameter)
        if state is None:
            return torch.zeros(3, dtype=torch.float64)
        if REFERENCE not in state:
            return torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64)
        reference = state[REFERENCE].reshape(-1)
        change = local_part(parameter.detach()).cpu().reshape(-1) - reference
        squares = torch.dot(change, change), torch.dot(reference, reference)
        return torch.stack([*squares, reference.new_zeros(())]).double()

    def _state(self, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor] | None:
        """Returns what the optimizer keeps of a parameter; ``None`` where it does not train or had no gradient yet."""
        runtime = self.context.runtime
        if not parameter.requires_grad or runtime.optimizer is None:
            return None
        if runtime.is_stateless:
            return runtime.optimizer.state[parameter]
        return runtime.optimizer.state.get(parameter) or None

    @torch.no_grad()
    def start_anew(self) -> None:
        for own in self.context.runtime.trained_blocks.values():
            for parameter in own:
                state = self._state(parameter)
                if state is not None:
                    state[REFERENCE] = local_part(parameter.detach()).to("cpu", copy=True)
