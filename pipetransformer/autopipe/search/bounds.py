"""What no arrangement can be better than; it spares the search most of its candidates."""

from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from itertools import accumulate

from pipetransformer.autopipe.cluster import Link, allreduce_links, boundary_links
from pipetransformer.autopipe.cost import allreduce_volume, layers_with_grad, makespan, microbatch_size
from pipetransformer.autopipe.plan import layer_above
from pipetransformer.autopipe.search.candidates import Candidate, DeviceLayout
from pipetransformer.autopipe.search.solver import PartitionSolver

Boundaries = tuple[list[tuple[float, int]], float]
"""Seconds for a micro-batch and at how many devices, but for the last device; then those of the last one."""


class LoadBounds:
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


class LowerBounds:
    """Bounds on the candidates for one frozen prefix and cache level."""

    def __init__(self, solver: PartitionSolver) -> None:
        self._arranger = solver
        active = [
            layer if on else None
            for layer, on in layers_with_grad(solver.profile, solver.num_frozen)[solver.layers.start :]
        ]
        self._active_bytes = LoadBounds(layer.parameter_bytes if layer else 0 for layer in active)
        self._optimizer_s = LoadBounds(layer.optimizer_s if layer else 0.0 for layer in active)
        self._runs_frozen = solver.num_frozen > solver.cache_level
        self._first_active = layer_above(solver.num_frozen) - solver.layers.start  # of those that run
        self._least_output = min(layer.output_bytes for layer in solver.profile.layers[:-1])
        self._links = lru_cache(maxsize=None)(self._links_of)
        self._seconds = lru_cache(maxsize=None)(self._seconds_of)
        self._bytes = lru_cache(maxsize=None)(self._bytes_of)
        self._split = lru_cache(maxsize=None)(self._split_of)
        self._update = lru_cache(maxsize=None)(self._update_of)

    def work_seconds(self, pipelines: DeviceLayout) -> float:
        """:meth:`pipelines_seconds` where boundaries take no time; quick."""
        share = microbatch_size(self._arranger.batch_size, pipelines.num_replicas, num_microbatches=1)
        return self._seconds(share, False).largest(pipelines.pipeline_size) + self.update_seconds(pipelines)

    def pipelines_seconds(self, pipelines: DeviceLayout) -> float:
        """Of a step with any number of micro-batches and chunks: the busiest device's work, and its update."""
        share = microbatch_size(self._arranger.batch_size, pipelines.num_replicas, num_microbatches=1)
        seconds, (inner, _) = self._seconds(share, False), self._boundaries(pipelines, share)
        size = pipelines.pipeline_size
        mean_s = (seconds.total + _sum(inner)) / size
        crossing_s = max((boundary_s + seconds.least for boundary_s, _ in inner), default=0.0)
        return max(seconds.largest(size), mean_s, crossing_s) + self.update_seconds(pipelines)

    def pipeline_makespan(self, candidate: Candidate) -> float:
        """Of the pipeline, see :func:`~pipetransformer.autopipe.cost.pipeline_makespan`."""
        seconds = self._seconds(candidate.num_samples, candidate.recompute)
        inner, back_s = self._boundaries(candidate, candidate.num_samples)
        total = seconds.total + candidate.stages_per_rank * _sum(inner) + (candidate.stages_per_rank - 1) * back_s
        busiest = max(seconds.largest(candidate.pipeline_size), total / candidate.pipeline_size)
        slowest = seconds.largest(candidate.num_stages)
        return makespan(total, slowest, busiest, candidate.num_microbatches, candidate.stages_per_rank)

    def _boundaries(self, where: DeviceLayout | Candidate, num_samples: int) -> Boundaries:
        """What each device pays for the boundary above it, at least."""
        inner, back = self._links(where.pipeline_size, where.num_replicas, where.replicas_adjacent)
        num_bytes, num_messages = self._least_output * num_samples, 1 if self._runs_frozen else 2
        counted = [(num_messages * link.seconds(num_bytes), count) for link, count in inner]
        return counted, num_messages * back.seconds(num_bytes)

    def _links_of(self, pipeline_size: int, num_replicas: int, adjacent: bool) -> tuple[list[tuple[Link, int]], Link]:
        """The links through a pipeline, each with how many there are, and the one from its end to its start."""
        links = boundary_links(self._arranger.cluster, pipeline_size, num_replicas, adjacent)
        return list(Counter(links[:-1]).items()), links[-1]

    def update_seconds(self, pipelines: DeviceLayout) -> float:
        """Of the slowest device after the pipeline."""
        return self._update(pipelines, pipelines.pipeline_size)

    def _update_of(self, pipelines: DeviceLayout, num_active: int) -> float:
        """With active layers on the last ``num_active`` devices of a pipeline alone."""
        size, num_replicas = pipelines.pipeline_size, pipelines.num_replicas
        optimizer_s = self._optimizer_s.largest(num_active)
        if num_replicas == 1 or self._active_bytes.total == 0:
            return optimizer_s
        links = allreduce_links(self._arranger.cluster, size, num_replicas, pipelines.replicas_adjacent)[-num_active:]
        moved = allreduce_volume(num_replicas)
        largest_s = min(link.seconds(moved * self._active_bytes.largest(num_active)) for link in set(links))
        fastest = max(link.bandwidth_bytes_per_s for link in links)
        mean_s = (moved * self._active_bytes.total / fastest + self._optimizer_s.total) / num_active
        return max(largest_s, optimizer_s, mean_s)

    def frozen_below_seconds(self, candidate: Candidate) -> float:
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
        frozen_s, active = self._split(candidate.num_samples, candidate.recompute)
        links = boundary_links(
            self._arranger.cluster, candidate.pipeline_size, candidate.num_replicas, candidate.replicas_adjacent
        )
        sends = [
            link.seconds(self._least_output * candidate.num_samples) for link in links * candidate.stages_per_rank
        ][:-1]
        fewest, most = max(1, candidate.num_stages - first_active), min(candidate.num_stages, num_layers - first_active)
        return min(
            self._with_active_stages(
                candidate, frozen_s, active, sends[: candidate.num_stages - k], sends[candidate.num_stages - k :]
            )
            for k in range(fewest, most + 1)
        )

    def _with_active_stages(
        self, candidate: Candidate, frozen_s: float, active: LoadBounds, once: list[float], twice: list[float]
    ) -> float:
        """:meth:`frozen_below_seconds` where the stages that send ``once`` have frozen layers alone."""
        num_active = candidate.num_stages - len(once)
        below_s, above_s = sum(once), 2 * sum(twice)
        total = frozen_s + active.total + below_s + above_s
        slowest = max(
            active.largest(num_active),
            (active.total + above_s) / num_active,
            (frozen_s + active.least + below_s) / (len(once) + 1),
            2 * max(twice, default=0.0) + active.least,
        )
        busiest = max(slowest, total / candidate.pipeline_size)
        pipeline_s = makespan(total, slowest, busiest, candidate.num_microbatches, candidate.stages_per_rank)
        pipelines = DeviceLayout(candidate.pipeline_size, candidate.num_replicas, candidate.replicas_adjacent)
        return pipeline_s + self._update(pipelines, min(num_active, candidate.pipeline_size))

    def device_bytes(self, candidate: Candidate) -> float:
        """On the fullest device: parameters, the activations of what must be in flight, and the tensors handed over.

        Where frozen layers run, the fullest device may be one that hands over less.
        """
        num_in_flight = candidate.num_microbatches if candidate.schedule == "gpipe" else 1
        layers = self._bytes(candidate.num_samples * num_in_flight, candidate.recompute).largest(
            candidate.pipeline_size
        )
        num_boundaries = 2 * candidate.stages_per_rank - 1 if candidate.num_stages > 1 and not self._runs_frozen else 0
        memory = self._arranger.memory[candidate.recompute]
        return layers + memory.buffer_bytes(num_boundaries * candidate.num_microbatches, candidate.num_samples) - 1

    def least_bytes(self, pipeline_size: int) -> float:
        """On the fullest device of such pipelines, with one sample in flight; a layer may save less than its input."""
        return min(self._bytes(1, recompute).largest(pipeline_size) for recompute in (False, True)) - 1

    def _seconds_of(self, num_samples: int, recompute: bool) -> LoadBounds:
        return LoadBounds(time.at(num_samples) for time in self._arranger.times[recompute])

    def _split_of(self, num_samples: int, recompute: bool) -> tuple[float, LoadBounds]:
        """Seconds of the frozen layers together, and of the active ones."""
        times = [time.at(num_samples) for time in self._arranger.times[recompute]]
        return sum(times[: self._first_active]), LoadBounds(times[self._first_active :])

    def _bytes_of(self, num_samples: int, recompute: bool) -> LoadBounds:
        memory, layers = self._arranger.memory[recompute], self._arranger.layers
        return LoadBounds(memory.layer_bytes(layer, num_samples) for layer in layers)


def _sum(inner: list[tuple[float, int]]) -> float:
    return sum(boundary_s * count for boundary_s, count in inner)
