"""What no arrangement can be better than; it spares the search most of its candidates."""

from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from itertools import accumulate

from pipetransformer.autopipe.arrange import Arranger
from pipetransformer.autopipe.candidates import Grid, Pipelines
from pipetransformer.autopipe.cluster import Link, boundary_links, ring_links
from pipetransformer.autopipe.cost import microbatch_size, ring_share, through_seconds, with_active
from pipetransformer.autopipe.plan import layer_above

Boundaries = tuple[list[tuple[float, int]], float]
"""Seconds for a micro-batch and at how many devices, but for the last device; then those of the last one."""


class Shares:
    """Bounds on the largest sum when layers are dealt to devices, contiguous or not."""

    def __init__(self, weights: Iterable[float]) -> None:
        weights = sorted(weights)
        self._until = [0.0, *accumulate(reversed(weights))]
        self.total = self._until[-1]
        self.least = weights[0]
        self.largest = lru_cache(maxsize=None)(self._largest)

    def _largest(self, num_devices: int) -> float:
        """At least the mean; and of the ``(j - 1) K + 1`` heaviest layers some device gets ``j``."""
        until = self._until
        heaviest = range(1, len(until), num_devices)
        crowded = (until[count] - until[count - j] for j, count in enumerate(heaviest, start=1))
        return max(self.total / num_devices, *crowded)


class Bounds:
    """Bounds on the candidates for one frozen prefix and cache level."""

    def __init__(self, arranger: Arranger) -> None:
        self._arranger = arranger
        active = [
            layer if on else None
            for layer, on in with_active(arranger.profile, arranger.num_frozen)[arranger.layers.start :]
        ]
        self._active_bytes = Shares(layer.parameter_bytes if layer else 0 for layer in active)
        self._optimizer_s = Shares(layer.optimizer_s if layer else 0.0 for layer in active)
        self._runs_frozen = arranger.num_frozen > arranger.cache_level
        self._first_active = layer_above(arranger.num_frozen) - arranger.layers.start  # of those that run
        self._least_output = min(layer.output_bytes for layer in arranger.profile.layers[:-1])
        self._links = lru_cache(maxsize=None)(self._links_of)
        self._seconds = lru_cache(maxsize=None)(self._seconds_of)
        self._bytes = lru_cache(maxsize=None)(self._bytes_of)
        self._split = lru_cache(maxsize=None)(self._split_of)
        self._update = lru_cache(maxsize=None)(self._update_of)

    def work_seconds(self, pipelines: Pipelines) -> float:
        """:meth:`pipelines_seconds` where boundaries take no time; quick."""
        share = microbatch_size(self._arranger.batch_size, pipelines.num_replicas, num_microbatches=1)
        return self._seconds(share, False).largest(pipelines.pipeline_size) + self.update_seconds(pipelines)

    def pipelines_seconds(self, pipelines: Pipelines) -> float:
        """Of a step with any number of micro-batches and chunks: the busiest device's work, and its update."""
        share = microbatch_size(self._arranger.batch_size, pipelines.num_replicas, num_microbatches=1)
        seconds, (inner, _) = self._seconds(share, False), self._boundaries(pipelines, share)
        size = pipelines.pipeline_size
        mean_s = (seconds.total + _sum(inner)) / size
        crossing_s = max((boundary_s + seconds.least for boundary_s, _ in inner), default=0.0)
        return max(seconds.largest(size), mean_s, crossing_s) + self.update_seconds(pipelines)

    def pipeline_seconds(self, grid: Grid) -> float:
        """Of the pipeline, see :func:`~pipetransformer.autopipe.cost.pipeline_seconds`."""
        seconds = self._seconds(grid.num_samples, grid.checkpoint)
        inner, back_s = self._boundaries(grid, grid.num_samples)
        total = seconds.total + grid.num_chunks * _sum(inner) + (grid.num_chunks - 1) * back_s
        busiest = max(seconds.largest(grid.pipeline_size), total / grid.pipeline_size)
        slowest = seconds.largest(grid.num_stages)
        return through_seconds(total, slowest, busiest, grid.num_microbatches, grid.num_chunks)

    def _boundaries(self, where: Pipelines | Grid, num_samples: int) -> Boundaries:
        """What each device pays for the boundary above it, at least."""
        inner, back = self._links(where.pipeline_size, where.num_replicas, where.replicas_adjacent)
        num_bytes, num_messages = self._least_output * num_samples, 1 if self._runs_frozen else 2
        counted = [(num_messages * link.seconds(num_bytes), count) for link, count in inner]
        return counted, num_messages * back.seconds(num_bytes)

    def _links_of(self, pipeline_size: int, num_replicas: int, adjacent: bool) -> tuple[list[tuple[Link, int]], Link]:
        """The links through a pipeline, each with how many there are, and the one from its end to its start."""
        links = boundary_links(self._arranger.cluster, pipeline_size, num_replicas, adjacent)
        return list(Counter(links[:-1]).items()), links[-1]

    def update_seconds(self, pipelines: Pipelines) -> float:
        """Of the slowest device after the pipeline."""
        return self._update(pipelines, pipelines.pipeline_size)

    def _update_of(self, pipelines: Pipelines, num_active: int) -> float:
        """With active layers on the last ``num_active`` devices of a pipeline alone."""
        size, num_replicas = pipelines.pipeline_size, pipelines.num_replicas
        optimizer_s = self._optimizer_s.largest(num_active)
        if num_replicas == 1 or self._active_bytes.total == 0:
            return optimizer_s
        links = ring_links(self._arranger.cluster, size, num_replicas, pipelines.replicas_adjacent)[-num_active:]
        moved = ring_share(num_replicas)
        largest_s = min(link.seconds(moved * self._active_bytes.largest(num_active)) for link in set(links))
        fastest = max(link.bandwidth_bytes_per_s for link in links)
        mean_s = (moved * self._active_bytes.total / fastest + self._optimizer_s.total) / num_active
        return max(largest_s, optimizer_s, mean_s)

    def frozen_below_seconds(self, grid: Grid) -> float:
        """Of a step, where frozen layers run below active ones; dear, and zero where none does.

        The last ``k`` stages have active layers, and only their devices average and update; the more they are, the
        fewer are left for the frozen layers, of which one stage may have some with its active ones::

            stages      0 .. num_stages - k - 1    num_stages - k    num_stages - k + 1 .. num_stages - 1
            layers      frozen                     frozen, active    active
            sends up    once                       and a gradient comes back
        """
        if not self._runs_frozen:
            return 0.0
        first_active, num_layers = self._first_active, len(self._arranger.layers)
        frozen_s, active = self._split(grid.num_samples, grid.checkpoint)
        links = boundary_links(self._arranger.cluster, grid.pipeline_size, grid.num_replicas, grid.replicas_adjacent)
        sends = [link.seconds(self._least_output * grid.num_samples) for link in links * grid.num_chunks][:-1]
        fewest, most = max(1, grid.num_stages - first_active), min(grid.num_stages, num_layers - first_active)
        return min(
            self._with_active_stages(grid, frozen_s, active, sends[: grid.num_stages - k], sends[grid.num_stages - k :])
            for k in range(fewest, most + 1)
        )

    def _with_active_stages(
        self, grid: Grid, frozen_s: float, active: Shares, once: list[float], twice: list[float]
    ) -> float:
        """:meth:`frozen_below_seconds` where the stages that send ``once`` have frozen layers alone."""
        num_active = grid.num_stages - len(once)
        below_s, above_s = sum(once), 2 * sum(twice)
        total = frozen_s + active.total + below_s + above_s
        slowest = max(
            active.largest(num_active),
            (active.total + above_s) / num_active,
            (frozen_s + active.least + below_s) / (len(once) + 1),
            2 * max(twice, default=0.0) + active.least,
        )
        busiest = max(slowest, total / grid.pipeline_size)
        pipeline_s = through_seconds(total, slowest, busiest, grid.num_microbatches, grid.num_chunks)
        pipelines = Pipelines(grid.pipeline_size, grid.num_replicas, grid.replicas_adjacent)
        return pipeline_s + self._update(pipelines, min(num_active, grid.pipeline_size))

    def device_bytes(self, grid: Grid) -> float:
        """On the fullest device: parameters, the activations of what must be in flight, and the tensors handed over.

        Where frozen layers run, the fullest device may be one that hands over less.
        """
        num_in_flight = grid.num_microbatches if grid.schedule == "gpipe" else 1
        layers = self._bytes(grid.num_samples * num_in_flight, grid.checkpoint).largest(grid.pipeline_size)
        num_boundaries = 2 * grid.num_chunks - 1 if grid.num_stages > 1 and not self._runs_frozen else 0
        memory = self._arranger.memory[grid.checkpoint]
        return layers + memory.buffer_bytes(num_boundaries * grid.num_microbatches, grid.num_samples) - 1

    def least_bytes(self, pipeline_size: int) -> float:
        """On the fullest device of such pipelines, with one sample in flight; a layer may save less than its input."""
        return min(self._bytes(1, checkpoint).largest(pipeline_size) for checkpoint in (False, True)) - 1

    def _seconds_of(self, num_samples: int, checkpoint: bool) -> Shares:
        return Shares(time.at(num_samples) for time in self._arranger.times[checkpoint])

    def _split_of(self, num_samples: int, checkpoint: bool) -> tuple[float, Shares]:
        """Seconds of the frozen layers together, and of the active ones."""
        times = [time.at(num_samples) for time in self._arranger.times[checkpoint]]
        return sum(times[: self._first_active]), Shares(times[self._first_active :])

    def _bytes_of(self, num_samples: int, checkpoint: bool) -> Shares:
        memory, layers = self._arranger.memory[checkpoint], self._arranger.layers
        return Shares(memory.layer_bytes(layer, num_samples) for layer in layers)


def _sum(inner: list[tuple[float, int]]) -> float:
    return sum(boundary_s * count for boundary_s, count in inner)
