"""The measured model: seconds and bytes of each layer, from a measurement or counted on paper."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class AffineTime:
    """Seconds as an affine function of the number of samples: launch overhead and work."""

    fixed_s: float
    per_sample_s: float

    def at(self, num_samples: float) -> float:
        """Returns the seconds of one micro-batch of ``num_samples``."""
        return self.fixed_s + self.per_sample_s * num_samples

    def __add__(self, other: AffineTime) -> AffineTime:
        return AffineTime(self.fixed_s + other.fixed_s, self.per_sample_s + other.per_sample_s)


@dataclass(frozen=True)
class LayerProfile:
    """One measured layer.

    Attributes:
        name: For reports.
        forward: ``F``, per micro-batch.
        input_grad: ``D``, the gradient handed to the layer below.
        weight_grad: ``W``, the gradient of the layer's own parameters.
        optimizer_s: One optimizer update of the layer's parameters.
        parameter_bytes: All parameters; those that layers share count in each, because each has a copy.
        fixed_bytes: Those of them that never train, such as the base weights of adapters.
        activation_bytes: Activations kept for backward, per sample.
        output_bytes: The output, per sample.
        peak_forward_bytes: The most that lives in a forward pass without gradient, output included, per sample.
        autocast_bytes: Copies of the parameters in a type of fewer bytes, while they take a gradient.
    """

    name: str
    forward: AffineTime
    input_grad: AffineTime
    weight_grad: AffineTime
    optimizer_s: float
    parameter_bytes: int
    activation_bytes: int
    output_bytes: int
    peak_forward_bytes: int = 0
    autocast_bytes: int = 0
    fixed_bytes: int = 0

    @property
    def trainable_bytes(self) -> int:
        """Parameters that get a gradient and optimizer state while the layer is active."""
        return self.parameter_bytes - self.fixed_bytes


@dataclass(frozen=True)
class Profile:
    """A measured model.

    Attributes:
        layers: Embedding first and head last.
        optimizer_state_factor: The optimizer's bytes per parameter byte (2 for Adam).
        cache_read_s_per_byte: Seconds until a cached output is on the device; 0 where it is prefetched.
        cache_miss_rate: Fraction of the samples that the cache cannot hold; they go through the frozen layers.
        schedule_overhead_s: Seconds of the schedule itself, per micro-batch and stage of a pipeline, besides layers
            and transfers.
    """

    layers: tuple[LayerProfile, ...]
    optimizer_state_factor: float
    cache_read_s_per_byte: float = 0.0
    cache_miss_rate: float = 0.0
    schedule_overhead_s: float = 0.0


class PrefixSums:
    """Sums over contiguous layers, ``first`` and ``last`` included, in constant time."""

    def __init__(self, values: Iterable[float]) -> None:
        self._below = [0.0, *accumulate(values)]

    def __call__(self, first: int, last: int) -> float:
        return self._below[last + 1] - self._below[first]
