"""The physical limit: how much faster any system could be with the same freeze decisions.

Work is counted in device seconds per sample as profiled, without communication, optimizer or waiting. Launch overhead
counts as little as it can: once per layer for a device's whole share of the batch (:func:`spread_overhead`). The limit
is the work without freezing over the work that the decisions leave, over the efficiency of the static plan that it is
compared with. So it is the static plan's time over that of devices that do nothing but the work that is left.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipetransformer.autopipe.cost import layer_time
from pipetransformer.autopipe.plan import layer_above
from pipetransformer.autopipe.profile import AffineTime, Profile


@dataclass(frozen=True)
class Phase:
    """Samples trained with one frozen prefix and cache level."""

    num_frozen: int
    cache_level: int
    num_samples: int


@dataclass(frozen=True)
class Fill:
    """Samples whose features were computed from one cache level up to a higher one; level 0 is the input."""

    from_level: int
    to_level: int
    num_samples: int


def spread_overhead(profile: Profile, num_samples: int) -> Profile:
    """Returns the profile with each layer's launch overhead spread over ``num_samples``: time per sample alone."""

    def spread(time: AffineTime) -> AffineTime:
        return AffineTime(0.0, time.at(num_samples) / num_samples)

    layers = (
        replace(
            layer,
            forward=spread(layer.forward),
            input_grad=spread(layer.input_grad),
            weight_grad=spread(layer.weight_grad),
            lowest_grad=spread(layer.backward_as_lowest),
        )
        for layer in profile.layers
    )
    return replace(profile, layers=tuple(layers))


def work_seconds(profile: Profile, num_frozen: int, cache_level: int, num_samples: float) -> float:
    """Returns the device seconds to train on ``num_samples``; cached layers cost nothing."""
    first = layer_above(cache_level)
    layers = range(first, len(profile.layers))
    return num_samples * sum(layer_time(profile, layer, num_frozen).per_sample_s for layer in layers)


def fill_seconds(profile: Profile, from_level: int, to_level: int, num_samples: float) -> float:
    """Returns the device seconds to compute the output of block ``to_level`` from that of ``from_level`` (0: input)."""
    first = layer_above(from_level)
    return num_samples * sum(layer.forward.per_sample_s for layer in profile.layers[first : to_level + 1])


def pipeline_efficiency(num_stages: int, num_microbatches: int) -> float:
    """Returns the fraction of the time that a balanced GPipe or 1F1B pipeline works: ``M / (M + K - 1)``."""
    return num_microbatches / (num_microbatches + num_stages - 1)


def efficiency(profile: Profile, batch_size: int, num_devices: int, step_s: float) -> float:
    """Returns the fraction of the devices' time that a plan with nothing frozen spends on ideal work, at most 1.

    The bubble, as in :func:`pipeline_efficiency`, and with it all else that a step of ``step_s`` seconds has and that
    could be better without freezing: uneven stages, launch overhead of small micro-batches, padded rows, transfers,
    all-reduce, optimizer, idle devices.

    Args:
        profile: With the launch overhead spread over a device's whole share of the batch.
    """
    return work_seconds(profile, 0, 0, batch_size) / (num_devices * step_s)


def limit(
    profile: Profile, phases: Sequence[Phase], fills: Sequence[Fill] = (), static_efficiency: float = 1.0
) -> float:
    """Returns the largest speed-up over a static plan that the decisions of a run allow.

    Args:
        profile: The measured layers, with the launch overhead spread; ignores other overhead.
        phases: All of the run, in any order.
        fills: The work of filling the cache.
        static_efficiency: Fraction of its time that the compared plan works (:func:`efficiency`), above 0, at most 1.
    """
    num_samples = sum(phase.num_samples for phase in phases)
    work_s = sum(work_seconds(profile, phase.num_frozen, phase.cache_level, phase.num_samples) for phase in phases)
    fill_s = sum(fill_seconds(profile, fill.from_level, fill.to_level, fill.num_samples) for fill in fills)
    return work_seconds(profile, 0, 0, num_samples) / (work_s + fill_s) / static_efficiency
