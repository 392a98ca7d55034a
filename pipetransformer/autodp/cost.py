"""What moving layers takes."""

from collections import Counter
from collections.abc import Iterable

from pipetransformer.autodp.moves import Move
from pipetransformer.autopipe.cluster import Cluster, Link
from pipetransformer.autopipe.cost import Profile
from pipetransformer.autopipe.plan import layer_above


def transfer_seconds(moves: Iterable[Move], profile: Profile, cluster: Cluster, num_frozen: int) -> float:
    """Seconds of moves that are all made at once: those of the busiest rank or node, in one direction.

    Args:
        num_frozen: Under the next plan; frozen layers bring no optimizer state along.
    """
    first_active, size = layer_above(num_frozen), cluster.node_size
    loads: Counter[tuple[Link, str, int]] = Counter()
    for move in moves:
        state_factor = profile.optimizer_state_factor if move.layer >= first_active else 0.0
        num_bytes = profile.layers[move.layer].parameter_bytes * (1 + state_factor)
        for direction, rank in (("out", move.source), ("in", move.target)):
            if size is not None and cluster.node_link and move.source // size != move.target // size:
                loads[cluster.node_link, direction, rank // size] += round(num_bytes)
            else:
                loads[cluster.link, direction, rank] += round(num_bytes)
    return max((link.seconds(num_bytes) for (link, _, _), num_bytes in loads.items()), default=0.0)
