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
        """Compares a parameter with its reference (3,), and takes its weights for the next one."""
        optimizer = self.context.runtime.optimizer
        assert optimizer is not None, "a rank has an optimizer where it has weights that train"
        now, state = local_part(parameter.detach()).cpu(), optimizer.state[parameter]
        if not state and not self.context.runtime.is_stateless:
            return torch.zeros(3, dtype=torch.float64)  # has had no gradient yet
        reference, state[REFERENCE] = state.get(REFERENCE), now.clone()
        if reference is None:
            return torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64)
        change, own = now - reference, reference.reshape(-1)
        return torch.stack([change.square().sum().double(), torch.dot(own, own).double(), torch.zeros(()).double()])
