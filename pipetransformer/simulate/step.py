"""The timeline of one optimizer step of a plan on every device of a pipeline. All replicas do the same."""

from collections import deque

from pipetransformer.autopipe.cluster import Cluster, allreduce_links, boundary_links
from pipetransformer.autopipe.cost import UpdateCosts, boundary_seconds, compute_seconds, exchange_seconds, layer_time
from pipetransformer.autopipe.meshes import without_mesh
from pipetransformer.autopipe.plan import Plan
from pipetransformer.autopipe.profile import Profile
from pipetransformer.autopipe.schedules import SCHEDULES, Pass
from pipetransformer.report.trace import Event, pass_name


def step_events(profile: Profile, cluster: Cluster, plan: Plan, batch_size: int) -> list[Event]:
    """Returns the events of one step on the devices of the first replica, by time.

    A pass starts when its device is free and its input has come; transfers run beside the computing. A stage without
    active layers has no backward pass. On a mesh a device stands for the ranks that run its stages together.
    """
    profile, cluster, plan, batch_size = without_mesh(profile, cluster, plan, batch_size)
    drawing = _Drawing(profile, cluster, plan, batch_size)
    waiting = [deque(SCHEDULES[plan.schedule].order(plan, device)) for device in range(plan.pipeline_size)]
    while any(waiting):
        ready = [queue for queue in waiting if queue and drawing.is_ready(queue[0])]
        assert ready, "the order of the passes is circular"
        for queue in ready:
            drawing.add(queue.popleft())
    for device in range(plan.pipeline_size):
        drawing.add_update(device)
    return sorted(drawing.events, key=lambda event: (event.start_s, event.rank))


def idle_share(events: list[Event]) -> float:
    """Returns the share of the pipeline's time, from the first to the last pass, in which devices wait: its bubble."""
    passes = [event for event in events if event.category in ("forward", "backward")]
    num_devices = len({event.rank for event in passes})
    span_s = max(event.end_s for event in passes) - min(event.start_s for event in passes)
    return 1 - sum(event.seconds for event in passes) / (num_devices * span_s)


class _Drawing:
    """The events so far, and when each device and each pass has ended."""

    def __init__(self, profile: Profile, cluster: Cluster, plan: Plan, batch_size: int) -> None:
        self.profile, self.plan = profile, plan
        self.num_samples = plan.microbatch_size(batch_size)
        self.events: list[Event] = []
        self._free_s = [0.0] * plan.pipeline_size
        self._arrived_s: dict[Pass, float] = {}  # when the pass's result is where it is needed
        self._links = boundary_links(cluster, plan.devices)
        self._updates = UpdateCosts(
            profile, plan.num_frozen, plan.num_replicas, allreduce_links(cluster, plan.devices), plan.fsdp
        )
        self._exchange_s = exchange_seconds(profile, cluster, plan)
        self._backward_s = [self._backward_seconds(stage) for stage in range(plan.num_stages)]
        stage_s = compute_seconds(profile, plan, batch_size)
        self._forward_s = [whole - back for whole, back in zip(stage_s, self._backward_s, strict=True)]

    def is_ready(self, one: Pass) -> bool:
        return all(needed in self._arrived_s for needed in self._needs(one))

    def add(self, one: Pass) -> None:
        """Draws a pass, the exchange of shards before it and the transfer of its result."""
        device = one.stage % self.plan.pipeline_size
        start_s = max([self._free_s[device], *(self._arrived_s[needed] for needed in self._needs(one))])
        name = pass_name(one.is_forward, one.microbatch, one.stage, self.plan.stages_per_rank)
        if exchange_s := self._exchange_s[not one.is_forward]:
            self.events.append(Event(f"shards of {name}", start_s, exchange_s, device, "transfer"))
            start_s += exchange_s
        seconds = self._seconds(one)
        self._free_s[device] = self._arrived_s[one] = start_s + seconds
        if seconds:
            self.events.append(Event(name, start_s, seconds, device, "forward" if one.is_forward else "backward"))
        transfer_s = self._transfer_seconds(one)
        if transfer_s:
            event = Event(f"send {name}", start_s + seconds, transfer_s, device, "transfer")
            self.events.append(event)
            self._arrived_s[one] = event.end_s

    def add_update(self, device: int) -> None:
        """Draws the end of the step on a device: all-reduce over the replicas, optimizer."""
        runs = self.plan.stages[device :: self.plan.pipeline_size]
        update_s, optimizer_s = self._updates.seconds(device, runs), self._updates.optimizer_seconds(runs)
        start_s = self._free_s[device]
        if update_s > optimizer_s:
            self.events.append(Event("all-reduce", start_s, update_s - optimizer_s, device, "all-reduce"))
        if optimizer_s:
            self.events.append(Event("optimizer", start_s + update_s - optimizer_s, optimizer_s, device, "optimizer"))

    def _needs(self, one: Pass) -> list[Pass]:
        """Returns the passes of other stages that come before; the device's order takes care of its own."""
        if one.is_forward:
            return [Pass(True, one.stage - 1, one.microbatch)] if one.stage else []
        is_last = one.stage + 1 == self.plan.num_stages
        return [] if is_last else [Pass(False, one.stage + 1, one.microbatch)]

    def _seconds(self, one: Pass) -> float:
        return (self._forward_s if one.is_forward else self._backward_s)[one.stage]

    def _backward_seconds(self, stage: int) -> float:
        """Returns the time of the active layers after their forward pass, with recomputing it where that is needed."""
        layers = (layer for layer in self.plan.stage_layers(stage) if layer >= self.plan.first_active_layer)
        return sum(self._layer_backward_seconds(layer) for layer in layers)

    def _layer_backward_seconds(self, layer: int) -> float:
        whole = layer_time(self.profile, layer, self.plan.num_frozen, self.plan.recompute)
        return whole.at(self.num_samples) - self.profile.layers[layer].forward.at(self.num_samples)

    def _transfer_seconds(self, one: Pass) -> float:
        """Returns the time to send the output to the stage above, or the gradient to the one below if that learns."""
        below = one.stage if one.is_forward else one.stage - 1
        if below < 0 or self.plan.pipeline_size == 1:
            return 0.0
        layer = self.plan.stages[below][1]
        goes_both_ways = layer >= self.plan.first_active_layer
        if not one.is_forward and not goes_both_ways:
            return 0.0
        link = self._links[below % len(self._links)]
        seconds = boundary_seconds(self.profile, link, layer, self.plan.num_frozen, self.num_samples)
        return seconds / 2 if goes_both_ways else seconds
