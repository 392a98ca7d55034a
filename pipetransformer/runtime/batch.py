"""What a rank needs of the global batch to run one step."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Batch:
    """One replica's share of a global batch, padded so that all replicas and micro-batches have one shape.

    Attributes:
        inputs: What the first stage reads (images, token ids or cached features), (B, ...); ``None`` on other stages.
        context: Tensors (B, ...) that every layer may need, such as the attention mask.
        targets: Labels (B,) or (B, k); ``None`` where they are not needed.
        weights: (B,) of 1 for a sample and 0 for padding.
        keys: (B,) keys of the samples' random streams.
        hidden_shape: (B, T, D) of the tensor between layers.
        num_samples: Samples of the global batch, over all replicas; the loss is divided by it.
    """

    inputs: Tensor | None
    context: dict[str, Tensor]
    targets: Tensor | None
    weights: Tensor
    keys: Tensor
    hidden_shape: tuple[int, ...]
    num_samples: int

    def __len__(self) -> int:
        return len(self.weights)

    def to(self, device: torch.device, dtype: torch.dtype) -> "Batch":
        """Moves the tensors; floating inputs take the model's type."""
        inputs = self.inputs
        if inputs is not None:
            inputs = inputs.to(device, dtype if inputs.is_floating_point() else inputs.dtype, non_blocking=True)
        context = {name: tensor.to(device, non_blocking=True) for name, tensor in self.context.items()}
        targets = None if self.targets is None else self.targets.to(device, non_blocking=True)
        return Batch(inputs, context, targets, self.weights.to(device), self.keys, self.hidden_shape, self.num_samples)

    def weighted_targets(self) -> Tensor | None:
        """Targets and weights as one float64 tensor (B, k + 1), because the schedule cuts one tensor; integers fit."""
        if self.targets is None:
            return None
        targets = self.targets.reshape(len(self), -1).to(torch.float64)
        return torch.cat([targets, self.weights.to(torch.float64)[:, None]], dim=1)
