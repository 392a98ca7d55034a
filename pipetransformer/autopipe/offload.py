"""Chunks: weights and gradients that lie in host memory, and are on the device while they are used (PatrickStar).

A chunk is all numbers of one kind of one layer. Which one leaves the device to make room for another follows from the
order of uses, which is that of the step before: the one that is needed last (Belady, 1966)::

    uses of a step      W0 W1 W2 W3   W3+G3 W2+G2 W1+G1      room for W0 W1 and a gradient
                              ^ evicts W0: needed last, in the next step

Here is the decision alone. The runtime carries it out, and the planner counts its bytes. Fang et al. (2021) cut chunks
of one size across layers instead, for which they search a size and lose a part of the memory.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Generic, Literal, NamedTuple, TypeVar

from pipetransformer.autopipe.plan import Plan
from pipetransformer.autopipe.profile import AffineTime, LayerProfile, Profile


class Chunk(NamedTuple):
    """All numbers of one kind of one layer."""

    layer: int
    kind: Literal["weights", "gradient"]


Key = TypeVar("Key", bound=Hashable)


class Eviction(NamedTuple, Generic[Key]):
    """A chunk that leaves the device.

    Attributes:
        is_written: It has changed, and is copied to its home first.
    """

    chunk: Key
    is_written: bool


@dataclass
class HostTraffic:
    """Bytes between host and device.

    Attributes:
        fetched: To the device.
        written: To the host.
        peak: The most bytes of chunks that were on the device at a time.
        ahead: Those of the fetched bytes that began to come before their use.
    """

    fetched: int = 0
    written: int = 0
    peak: int = 0
    ahead: int = 0


class Residency(Generic[Key]):
    """Which chunks are on the device.

    Args:
        sizes: Bytes of each chunk.
        budget: Bytes of chunks that the device takes at most.
        order: The uses that come; without it the least recently used chunk leaves, until :meth:`end_step`.

    Attributes:
        traffic: Since the last :meth:`end_step`.
    """

    def __init__(self, sizes: Mapping[Key, int], budget: int, order: Sequence[Key] | None = None) -> None:
        self._sizes, self._budget, self.traffic = sizes, budget, HostTraffic()
        self._pins: dict[Key, int] = {}  # of what is on the device
        self._changed: set[Key] = set()
        self._last_use: dict[Key, int] = {}
        self._trace: list[Key] = []
        self._expect(order)
        self._used, self._kind = 0, ""
        self._orders: dict[str, Sequence[Key] | None] = {}

    def expect(self, kind: str) -> None:
        """Expects the order of uses of the last step of a kind; without one the least recently used chunk leaves."""
        self._orders[self._kind] = self._order
        self._kind = kind
        self._expect(self._orders.get(kind))

    def _expect(self, order: Sequence[Key] | None) -> None:
        self._order, self._uses = order, None if order is None else _positions(order)

    def __contains__(self, chunk: Key) -> bool:
        return chunk in self._pins

    def begin(self, chunk: Key, is_fresh: bool = False) -> list[Eviction[Key]]:
        """Puts a chunk on the device, where it stays until :meth:`end`.

        Args:
            is_fresh: It begins as zeros, so that nothing is fetched.

        Returns:
            What has to leave before it, in order.
        """
        self._last_use[chunk] = len(self._trace)
        self._trace.append(chunk)
        if chunk in self._pins:
            self._pins[chunk] += 1
            return []
        evictions = self._make_room(self._sizes[chunk])
        self._put(chunk, pins=1, is_fresh=is_fresh)
        return evictions

    def end(self, chunk: Key, changed: bool = False) -> None:
        """Ends a use; from then on the chunk may leave."""
        self._pins[chunk] -= 1
        if changed:
            self._changed.add(chunk)

    def _make_room(self, num_bytes: int) -> list[Eviction[Key]]:
        free = [chunk for chunk, pins in self._pins.items() if not pins]
        evictions = [self.evict(chunk) for chunk in self._needed_last(num_bytes, free)]
        assert self._used + num_bytes <= self._budget, (
            f"{self._used} bytes in use and {num_bytes} more exceed the budget of {self._budget}"
        )
        return evictions

    def _needed_last(self, num_bytes: int, among: Iterable[Key]) -> list[Key]:
        """Returns the chunks that leave so that there is room, of some of those on the device the ones needed last."""
        lacking, leaving = self._used + num_bytes - self._budget, list[Key]()
        for chunk in sorted(among, key=self._next_use, reverse=True) if lacking > 0 else ():
            if lacking <= 0:
                break
            leaving.append(chunk)
            lacking -= self._sizes[chunk]
        return leaving

    def _next_use(self, chunk: Key) -> float:
        """Returns when a chunk is needed again, in uses from now; in the first step how long it was not."""
        now = len(self._trace)
        if self._uses is None:
            return now - self._last_use[chunk]
        uses = self._uses.get(chunk)
        if not uses:
            return inf
        index = bisect_left(uses, now)
        assert self._order is not None
        return uses[index] if index < len(uses) else uses[0] + len(self._order)

    @property
    def next(self) -> Key | None:
        """The chunk of the next use of this step, where it is known and not on the device."""
        if self._order is None or len(self._trace) >= len(self._order):
            return None
        chunk = self._order[len(self._trace)]
        return None if chunk in self._pins else chunk

    def prefetch(self, chunk: Key) -> list[Eviction[Key]] | None:
        """Puts the :attr:`next` chunk on the device before its use, while that costs no byte more.

        Returns:
            What has to leave before it, in order: the same chunks that would leave at its use. ``None`` where one of
            those is in use, so that the chunk cannot come before.
        """
        leaving = self._needed_last(self._sizes[chunk], self._pins)
        left = sum(self._sizes[each] for each in leaving)
        if any(self._pins[each] for each in leaving) or self._used - left + self._sizes[chunk] > self._budget:
            return None
        evictions = [self.evict(each) for each in leaving]
        self._put(chunk, pins=0, is_fresh=False)
        self.traffic.ahead += self._sizes[chunk]
        return evictions

    def _put(self, chunk: Key, pins: int, is_fresh: bool) -> None:
        self._pins[chunk] = pins
        self._used += self._sizes[chunk]
        self.traffic.peak = max(self.traffic.peak, self._used)
        self.traffic.fetched += 0 if is_fresh else self._sizes[chunk]

    def evict(self, chunk: Key) -> Eviction[Key]:
        """Takes a chunk from the device."""
        assert not self._pins.pop(chunk), f"{chunk} is in use"
        self._used -= self._sizes[chunk]
        is_written = chunk in self._changed
        self._changed.discard(chunk)
        self.traffic.written += is_written * self._sizes[chunk]
        return Eviction(chunk, is_written)

    def end_step(self, leaving: Iterable[Key]) -> list[Eviction[Key]]:
        """Ends a step, whose order of uses is expected of the next one.

        Args:
            leaving: What does not stay, as far as it is on the device.
        """
        evictions = [self.evict(chunk) for chunk in leaving if chunk in self._pins]
        self._expect(self._trace)
        self._trace, self._last_use = [], dict.fromkeys(self._last_use, -1)
        self.traffic = HostTraffic(peak=self._used)
        return evictions


def _positions(order: Sequence[Key]) -> dict[Key, list[int]]:
    positions: defaultdict[Key, list[int]] = defaultdict(list)
    for position, chunk in enumerate(order):
        positions[chunk].append(position)
    return dict(positions)


def fetch_ahead(residency: Residency[Chunk]) -> tuple[Chunk, list[Eviction[Chunk]]] | None:
    """Puts the weights that come next on the device, while those that are there compute, where that costs nothing.

    Gradients come with their weights, most of them as zeros.

    Returns:
        What comes, and what leaves for it; ``None`` where nothing comes.
    """
    chunk = residency.next
    if chunk is None or chunk.kind != "weights":
        return None
    evictions = residency.prefetch(chunk)
    return None if evictions is None else (chunk, evictions)


def step_uses(layers: range, first_active: int, num_microbatches: int) -> Iterator[tuple[Chunk, ...]]:
    """Yields the chunks that each pass of a step uses at a time, for a single stage."""
    for _ in range(num_microbatches):
        for layer in layers:
            yield (Chunk(layer, "weights"),)
        for layer in reversed(layers[max(0, first_active - layers[0]) :]):
            yield Chunk(layer, "weights"), Chunk(layer, "gradient")


def step_traffic(
    sizes: Mapping[Chunk, int], budget: int, layers: range, first_active: int, num_microbatches: int
) -> tuple[HostTraffic, HostTraffic]:
    """Returns the bytes of the first step, and of each later one, of a device that runs a single stage.

    Active weights change between steps, on the host, and gradients are needed there: neither stays on the device.

    Args:
        sizes: Bytes of the weights of each layer, and of the gradient of the active ones.
        budget: Bytes of chunks on the device.
        layers: That run.
        first_active: The first layer that takes a gradient.
        num_microbatches: Micro-batches of a step.
    """
    residency, found = Residency[Chunk](sizes, budget), list[HostTraffic]()
    for _ in range(3):  # the first has no order yet, the second begins with what that has left
        written, traffic = set[Chunk](), residency.traffic
        for uses in step_uses(layers, first_active, num_microbatches):
            for chunk in filter(sizes.__contains__, uses):
                is_fresh = chunk.kind == "gradient" and chunk not in written
                evictions = residency.begin(chunk, is_fresh)
                written |= {each.chunk for each in evictions if each.is_written}
            _, evictions = fetch_ahead(residency) or (None, [])
            written |= {each.chunk for each in evictions if each.is_written}
            for chunk in filter(sizes.__contains__, uses):
                residency.end(chunk, changed=chunk.kind == "gradient")
        residency.end_step(leaving(sizes, first_active))
        found.append(traffic)
    return found[0], found[2]


def leaving(chunks: Iterable[Chunk], first_active: int) -> list[Chunk]:
    """Returns the chunks that do not stay on the device from step to step."""
    return [chunk for chunk in chunks if chunk.layer >= first_active]


def smallest_budget(sizes: Mapping[Chunk, int]) -> int:
    """Returns the bytes of chunks that a device has at least: weights and gradient of a layer at a time."""
    by_layer: defaultdict[int, int] = defaultdict(int)
    for chunk, num_bytes in sizes.items():
        by_layer[chunk.layer] += num_bytes
    return max(by_layer.values())


def chunk_sizes(profile: Profile, layers: Iterable[int], first_active: int) -> dict[Chunk, int]:
    """Returns the bytes of the chunks of layers."""
    sizes: dict[Chunk, int] = {}
    for layer in layers:
        sizes[Chunk(layer, "weights")] = profile.layers[layer].parameter_bytes
        if layer >= first_active:
            sizes[Chunk(layer, "gradient")] = profile.layers[layer].trainable_bytes
    return sizes


def on_host(profile: Profile) -> Profile:
    """Returns the profile of layers whose chunks come from the host for each pass, and go back.

    An estimate for any budget; :func:`step_traffic` has the bytes for one. What stays on the device between two passes
    is not fetched again. Of several micro-batches, where there is little room, gradients are fetched back as well.
    """
    layers = tuple(_fetched(layer, profile.host_copy_s_per_byte) for layer in profile.layers)
    return replace(profile, layers=layers, is_on_host=True)


def _fetched(layer: LayerProfile, seconds_per_byte: float) -> LayerProfile:
    fetch = AffineTime(layer.parameter_bytes * seconds_per_byte, 0.0)
    write = AffineTime(layer.trainable_bytes * seconds_per_byte, 0.0)
    lowest_grad = layer.backward_as_lowest + write
    return replace(layer, forward=layer.forward + fetch, weight_grad=layer.weight_grad + write, lowest_grad=lowest_grad)


def model_bytes(profile: Profile, plan: Plan) -> int:
    """Returns the bytes of weights, gradients and optimizer state of the fullest device of a plan."""
    state_factor = 1 + profile.optimizer_state_factor
    return max(
        sum(
            profile.layers[layer].parameter_bytes
            + round(profile.layers[layer].trainable_bytes * state_factor) * (layer >= plan.first_active_layer)
            for layer in plan.device_layers(device)
        )
        for device in range(plan.pipeline_size)
    )
