"""The part of a global batch that a rank needs for one step, and who loads it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from pipetransformer.autodp.topology import Topology
from pipetransformer.data.tasks import check_losses
from pipetransformer.host_copies import to_device


@dataclass
class Batch:
    """One replica's samples of a global batch, padded so that all replicas and micro-batches have one shape.

    Attributes:
        ids: Sample ids (B,), or of packed rows all of their samples; those of padding rows repeat a sample.
        inputs: Input of the first stage (images, token ids or cached features), (B, ...); ``None`` on other stages.
        context: Tensors (B, ...) that every layer may need, such as the attention mask.
        targets: Labels (B,) or (B, k); ``None`` where they are not needed.
        weights: (B,) of 1 for a sample and 0 for padding.
        keys: (B,) keys of the samples' random streams.
        hidden_shape: (B, T, D) of the tensor between layers.
        loss_divisor: Divisor of the sum of losses over the global batch and all replicas: the number of its samples,
            or the sum of their weights.
    """

    ids: np.ndarray
    inputs: Tensor | None
    context: dict[str, Tensor]
    targets: Tensor | None
    weights: Tensor
    keys: Tensor
    hidden_shape: tuple[int, ...]
    loss_divisor: float

    def __len__(self) -> int:
        return len(self.weights)

    def to(self, device: torch.device, dtype: torch.dtype, keys_on_host: bool = False) -> "Batch":
        """Moves the tensors; the host waits for none of the copies.

        Args:
            device: The target.
            dtype: Of floating-point inputs there.
            keys_on_host: The keys stay where the host can read them.
        """
        inputs = self.inputs
        if inputs is not None:
            inputs = to_device(inputs, device, dtype if inputs.is_floating_point() else None)
        return replace(
            self,
            inputs=inputs,
            context={name: to_device(tensor, device) for name, tensor in self.context.items()},
            targets=None if self.targets is None else to_device(self.targets, device),
            weights=to_device(self.weights, device),
            keys=self.keys if keys_on_host else to_device(self.keys, device),
        )

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors on a device that has the first stage and the last one."""
        targets = self.loss_targets(1.0)
        tensors = (self.inputs, self.targets, targets, self.weights, self.keys, *self.context.values())
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def loss_targets(self, factor: float) -> Tensor | None:
        """Packs targets, weights and the factor of the loss into one tensor, because a schedule splits one tensor.

        Args:
            factor: The factor of the sum over the samples, the same in every row.

        Returns:
            Shape (B, k + 2), float64, which holds integers exactly; ``None`` without targets.
        """
        if self.targets is None:
            return None
        targets = self.targets.reshape(len(self), -1).to(torch.float64)  # (B, k)
        weights = self.weights.to(torch.float64)
        return torch.cat([targets, torch.stack([weights, torch.full_like(weights, factor)], dim=1)], dim=1)


SampleLoss = Callable[[Tensor, Tensor], Tensor]
"""Loss of each sample: ``loss(output, targets) -> (B,)``."""


def total_loss(loss: SampleLoss, output: Tensor, loss_targets: Tensor) -> Tensor:
    """Computes the weighted sum of the samples' losses times the factor of the step.

    The factor comes with the targets, because a schedule outlives the step. A loss that is not finite makes the
    gradient of every layer and replica NaN, so no rank needs to be told.

    Args:
        loss: Of each sample.
        output: The head's output (B, ...).
        loss_targets: Rows of :meth:`Batch.loss_targets`, (B, k + 2).

    Raises:
        UserError: The loss is not one number per sample.
    """
    targets, weights, factor = loss_targets[:, :-2], loss_targets[:, -2], loss_targets[0, -1]
    per_sample = loss(output, targets.squeeze(1))  # (B,)
    check_losses(per_sample, len(weights))
    total = (per_sample * weights.to(per_sample.dtype)).sum()
    return total * (factor.to(total.dtype) + 0 * total.detach())


class Loader(Protocol):
    """Loads the samples of global batches."""

    def batch(self, ids: np.ndarray, topology: Topology, step: int = 0, targets: bool = True) -> Batch:
        """Loads this rank's part of a global batch; only what its stages read.

        Args:
            ids: Sample ids of the global batch, the same on every rank.
            topology: This rank's view of the plan; not of an idle rank.
            step: The optimizer step, for the samples' random streams.
            targets: Loads the labels on the last stage. Without them, in evaluation, samples are not mixed either.
        """
        ...
