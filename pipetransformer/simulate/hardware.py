"""Devices on paper: a user's description of a cluster, as the planner and the cost model need it."""

from dataclasses import dataclass, fields
from math import inf

from pipetransformer.autopipe.cluster import Cluster, Link
from pipetransformer.errors import UserError
from pipetransformer.simulate.analytic import DeviceSpeed

GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Equal nodes of equal devices.

    Attributes:
        num_nodes, devices_per_node: How many there are.
        memory_gib: Of a device, as far as training may use it.
        link_gb_per_s, link_latency_s: Between two devices of a node.
        node_link_gb_per_s, node_link_latency_s: Between two nodes, for all devices of a node together.
        peak_tflops: Of a device, as advertised for float32 (or for TF32, where that is what runs).
        efficiency: Share of the peak that matrix products reach, whatever the precision.
        memory_gb_per_s: Between a device's memory and its processors.
        launch_s: Launching one layer's kernels, for each of forward, input gradient and weight gradient.
        cache_gb_per_s: What a node reads from its cache, equal shares for its devices.
        transition_s: Going from one plan to the next, besides moving layers and filling the cache.
        bfloat16_tflops, float16_tflops, float64_tflops: Likewise in other precisions; ``None``: not known, or none.
    """

    num_nodes: int
    devices_per_node: int
    memory_gib: float
    link_gb_per_s: float
    node_link_gb_per_s: float
    peak_tflops: float
    efficiency: float
    memory_gb_per_s: float
    link_latency_s: float = 1e-5
    node_link_latency_s: float = 2e-5
    launch_s: float = 1e-4
    cache_gb_per_s: float = 3.0
    transition_s: float = 5.0
    bfloat16_tflops: float | None = None
    float16_tflops: float | None = None
    float64_tflops: float | None = None

    def __post_init__(self) -> None:
        may_be_zero = ("link_latency_s", "node_link_latency_s", "launch_s", "transition_s")
        for field in fields(self):
            value = getattr(self, field.name)
            is_enough = value is None or 0 < value < inf or (value == 0 and field.name in may_be_zero)
            if not is_enough:
                raise UserError(f"cluster.{field.name}={value} must be above 0 and finite")
        if self.efficiency > 1:
            raise UserError(f"cluster.efficiency={self.efficiency} is a fraction of the peak; give 1 at most")

    @property
    def num_devices(self) -> int:
        return self.num_nodes * self.devices_per_node

    def peak(self, precision: str) -> float:
        """Returns the peak in one of :data:`pipetransformer.config.schema.PRECISIONS`, in TFLOPS.

        Raises:
            UserError: It is not known.
        """
        name = "peak_tflops" if precision == "float32" else f"{precision}_tflops"
        peak_tflops = getattr(self, name)
        if peak_tflops is None:
            raise UserError(
                f"precision={precision} cannot be simulated: cluster.{name} is null, so nothing says how fast these "
                f"devices multiply in {precision}; give it in TFLOPS, or take another precision"
            )
        return peak_tflops

    def speed(self, precision: str) -> DeviceSpeed:
        """Returns the speed in a precision; see :meth:`peak`."""
        return DeviceSpeed(
            self.peak(precision) * 1e12 * self.efficiency,
            self.memory_gb_per_s * 1e9,
            self.launch_s,
            self.cache_gb_per_s * 1e9 / self.devices_per_node,
        )

    def cluster(self, memory_gib: float | None = None) -> Cluster:
        """Returns the planner's view of the devices; ``memory_gib`` narrows the budget of a device."""
        memory_bytes = int(min(self.memory_gib, memory_gib or self.memory_gib) * GIB)
        return Cluster(
            self.num_devices,
            memory_bytes,
            Link(self.link_latency_s, self.link_gb_per_s * 1e9),
            Link(self.node_link_latency_s, self.node_link_gb_per_s * 1e9),
            self.devices_per_node,
        )
