"""Lower bounds on layouts, whatever their partition; they spare the search most exact partitions."""

from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from itertools import accumulate
from math import inf

from pipetransformer.autopipe.cluster import Link, allreduce_links, boundary_links
from pipetransformer.autopipe.cost import allreduce_volume, layers_with_grad
from pipetransformer.autopipe.plan import DeviceLayout, Layout, layer_above, microbatch_size
from pipetransformer.autopipe.schedules import SCHEDULES
from pipetransformer.autopipe.search.solver import PartitionSolver

Boundaries = tuple[list[tuple[float, int]], float]
"""Seconds per micro-batch and the number of devices, for all but the last device; then the last one's seconds."""


class LoadBounds:
    """Bounds on the largest load when layers are assigned to devices, contiguous or not."""

    def __init__(self, weights: Iterable[float]) -> None:
        weights = sorted(weights)
        self._until = [0.0, *accumulate(reversed(weights))]
        self.total = self._until[-1]
        self.least = weights[0]
        self.largest = lru_cache(maxsize=None)(self._largest)

    def _largest(self, num_devices: int) -> float:
        """Returns the mean, or more: of the ``(j - 1) K + 1`` heaviest layers, one of ``K`` devices gets ``j``."""
        until = self._until
        heaviest = range(1, len(until), num_devices)
        crowded = (until[count] - until[count - j] for j, count in enumerate(heaviest, start=1))
        return max(self.total / num_devices, *crowded)


class LowerBounds:
    """Bounds on the layouts for one frozen prefix and cache level; each is computed once."""

    def __init__(self, solver: PartitionSolver) -> None:
        self._solver = solver
        active = [
            layer if on else None
            for layer, on in layers_with_grad(solver.profile, solver.num_frozen)[solver.layers.start :]
        ]
        self._summed_bytes = LoadBounds(layer.summed_bytes if layer else 0 for layer in active)
        self._optimizer_s = LoadBounds(layer.optimizer_s if layer else 0.0 for layer in active)
        self._runs_frozen = solver.num_frozen > solver.cache_level
        self._first_active = layer_above(solver.num_frozen) - solver.layers.start  # of those that run
        self._least_output = min(layer.output_bytes for layer in solver.profile.layers[:-1])
        self._links = lru_cache(maxsize=None)(self._links_of)
        self._seconds = lru_cache(maxsize=None)(self._seconds_of)
        self._bytes = lru_cache(maxsize=None)(self._bytes_of)
        self._split = lru_cache(maxsize=None)(self._split_of)
        self._update = lru_cache(maxsize=None)(self._update_of)

    def work_seconds(self, devices: DeviceLayout) -> float:
        """Returns the seconds of the busiest device for one micro-batch and without boundaries, which is quick."""
        num_samples = microbatch_size(self._solver.batch_size, devices.num_replicas, num_microbatches=1)
        return self._seconds(num_samples, False).largest(devices.pipeline_size) + self.update_seconds(devices)

    def devices_seconds(self, devices: DeviceLayout, counts: Iterable[int], stages_per_rank: int) -> float:
        """Returns a step's seconds on a grid: of the busiest device, its wait for its first work, and the update.

        Args:
            counts: Numbers of micro-batches; the fastest of them counts.
            stages_per_rank: The most that a device may have, which shortens the wait.
        """
        makespans = (self._least_makespan(devices, count, stages_per_rank) for count in counts)
        return min(makespans, default=inf) + self.update_seconds(devices)

    def _least_makespan(self, devices: DeviceLayout, num_microbatches: int, stages_per_rank: int) -> float:
        num_samples = microbatch_size(self._solver.batch_size, devices.num_replicas, num_microbatches)
        seconds, (inner, _) = self._seconds(num_samples, False), self._boundaries(devices, num_samples)
        size, total_s = devices.pipeline_size, seconds.total + _sum(inner)
        crossing_s = max((boundary_s + seconds.least for boundary_s, _ in inner), default=0.0)
        busiest_s = max(seconds.largest(size), total_s / size, crossing_s)
        return num_microbatches * busiest_s + (total_s - busiest_s) / stages_per_rank

    def pipeline_makespan(self, layout: Layout) -> float:
        """Returns the seconds of the pipeline, without the update."""
        num_samples = self._num_samples(layout)
        seconds = self._seconds(num_samples, layout.recompute)
        inner, back_s = self._boundaries(layout.devices, num_samples)
        total_s = seconds.total + layout.stages_per_rank * _sum(inner) + (layout.stages_per_rank - 1) * back_s
        busiest_s = max(seconds.largest(layout.pipeline_size), total_s / layout.pipeline_size)
        slowest_s = seconds.largest(layout.num_stages)
        return SCHEDULES[layout.schedule].makespan_of(total_s, slowest_s, busiest_s, layout)

    def _num_samples(self, layout: Layout) -> int:
        return layout.microbatch_size(self._solver.batch_size)

    def _boundaries(self, devices: DeviceLayout, num_samples: int) -> Boundaries:
        """Returns the least that each device takes for the boundary above it."""
        inner, back = self._links(devices)
        num_bytes, num_messages = self._least_output * num_samples, 1 if self._runs_frozen else 2
        counted = [(num_messages * link.seconds(num_bytes), count) for link, count in inner]
        return counted, num_messages * back.seconds(num_bytes)

    def _links_of(self, devices: DeviceLayout) -> tuple[list[tuple[Link, int]], Link]:
        """Returns the links through a pipeline, each with its number, and the one from its end to its start."""
        links = boundary_links(self._solver.cluster, devices)
        return list(Counter(links[:-1]).items()), links[-1]

    def update_seconds(self, devices: DeviceLayout) -> float:
        """Returns the seconds of the slowest device after the pipeline."""
        return self._update(devices, devices.pipeline_size)

    def _update_of(self, devices: DeviceLayout, num_active: int) -> float:
        """Returns :meth:`update_seconds` with active layers on the last ``num_active`` devices of a pipeline alone."""
        optimizer_s = self._optimizer_s.largest(num_active)
        if devices.num_replicas == 1 or self._summed_bytes.total == 0:
            return optimizer_s
        links = allreduce_links(self._solver.cluster, devices)[-num_active:]
        volume = allreduce_volume(devices.num_replicas)
        # the largest load may be on any of the devices, so it takes the one where it is fastest
        largest_s = min(link.seconds(volume * self._summed_bytes.largest(num_active)) for link in set(links))
        fastest = max(link.bandwidth_bytes_per_s for link in links)
        mean_s = (volume * self._summed_bytes.total / fastest + self._optimizer_s.total) / num_active
        return max(largest_s, optimizer_s, mean_s)

    def frozen_below_seconds(self, layout: Layout) -> float:
        """Returns the seconds of a step where frozen layers run below active ones; zero where none does. Slow.

        The last ``k`` stages have active layers, and only their devices all-reduce and update. The more they are, the
        fewer are left for the frozen layers, some of which may be in a stage with active ones::

            stages      0 .. num_stages - k - 1    num_stages - k    num_stages - k + 1 .. num_stages - 1
            layers      frozen                     frozen, active    active
            sends up    once                       and a gradient comes back
        """
        if not self._runs_frozen:
            return 0.0
        num_samples, links = self._num_samples(layout), boundary_links(self._solver.cluster, layout.devices)
        # the last stage sends nothing up
        sends_s = [link.seconds(self._least_output * num_samples) for link in links * layout.stages_per_rank][:-1]
        num_frozen, num_layers = self._first_active, len(self._solver.layers)
        # each stage has a layer: at most num_frozen stages are frozen ones, and at most as many active as active layers
        fewest, most = max(1, layout.num_stages - num_frozen), min(layout.num_stages, num_layers - num_frozen)
        return min(self._with_active_stages(layout, sends_s, k) for k in range(fewest, most + 1))

    def _with_active_stages(self, layout: Layout, sends_s: list[float], num_active: int) -> float:
        """Returns :meth:`frozen_below_seconds` with active layers in the last ``num_active`` stages.

        Args:
            sends_s: Seconds for a message from each stage to the one above, but for the last stage.
        """
        frozen_s, active = self._split(self._num_samples(layout), layout.recompute)
        num_frozen = layout.num_stages - num_active  # stages of frozen layers alone
        once, twice = sends_s[:num_frozen], sends_s[num_frozen:]
        below_s, above_s = sum(once), 2 * sum(twice)  # the output goes up, and above the prefix a gradient comes back
        total_s = frozen_s + active.total + below_s + above_s
        slowest_s = max(
            active.largest(num_active),
            (active.total + above_s) / num_active,
            # the lowest stage with active layers may have frozen ones, too, and then has at least one active layer
            (frozen_s + active.least + below_s) / (num_frozen + 1),
            2 * max(twice, default=0.0) + active.least,
        )
        busiest_s = max(slowest_s, total_s / layout.pipeline_size)
        pipeline_s = SCHEDULES[layout.schedule].makespan_of(total_s, slowest_s, busiest_s, layout)
        # stages go round the devices, so the last ones lie on as many devices, or on all
        return pipeline_s + self._update(layout.devices, min(num_active, layout.pipeline_size))

    def device_bytes(self, layout: Layout) -> float:
        """Returns the bytes of the fullest device: parameters, activations in flight, and tensors between stages.

        Where frozen layers run, the fullest device may be one that sends less.
        """
        num_samples, schedule = self._num_samples(layout), SCHEDULES[layout.schedule]
        in_flight = [(schedule.least_in_flight(layout, made), made) for made in (False, True)]
        layers = max(
            self._bytes(num_samples * count, layout.recompute, made).largest(layout.pipeline_size)
            for count, made in in_flight
        )
        # two for each stage of a device, but the lowest stage of all has none below it, and the highest none above
        num_boundaries = 2 * layout.stages_per_rank - 1 if layout.num_stages > 1 and not self._runs_frozen else 0
        memory = self._solver.memory[layout.recompute]
        return layers + memory.buffer_bytes(num_boundaries * layout.num_microbatches, num_samples) - 1

    def least_bytes(self, pipeline_size: int) -> float:
        """Returns the bytes of the fullest device with one sample in flight, which may save less when recomputing."""
        before, after = (
            [self._bytes(count, recompute, made).largest(pipeline_size) for recompute in (False, True)]
            for count, made in ((1, False), (0, True))
        )
        return min(map(max, before, after)) - 1

    def _seconds_of(self, num_samples: int, recompute: bool) -> LoadBounds:
        return LoadBounds(time.at(num_samples) for time in self._solver.times[recompute])

    def _split_of(self, num_samples: int, recompute: bool) -> tuple[float, LoadBounds]:
        """Returns the seconds of the frozen layers together, and the bounds of the active ones."""
        times = [time.at(num_samples) for time in self._solver.times[recompute]]
        return sum(times[: self._first_active]), LoadBounds(times[self._first_active :])

    def _bytes_of(self, num_samples: int, recompute: bool, has_gradients: bool) -> LoadBounds:
        memory, layers = self._solver.memory[recompute], self._solver.layers
        return LoadBounds(memory.layer_bytes(layer, num_samples, has_gradients) for layer in layers)


def _sum(inner: list[tuple[float, int]]) -> float:
    return sum(boundary_s * count for boundary_s, count in inner)
