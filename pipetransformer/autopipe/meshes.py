"""Plans on meshes: a mesh turns profile and cluster into those of larger devices, so that the search stays as it is.

The ranks of a mesh are one device of the cluster that it makes, and a sample of that is what each of them computes::

    8 devices, mesh dp_shard 2 x tp 2      2 devices, each 4 ranks
    batch of 32                            batch of 16: each rank computes one of two rows
    a layer's passes                       those of a rank's part, and their exchanges as lines in the samples
"""

from collections.abc import Mapping
from dataclasses import replace
from itertools import product

from pipetransformer.autopipe.cluster import Cluster, Link
from pipetransformer.autopipe.plan import Plan
from pipetransformer.autopipe.profile import AffineTime, LayerProfile, LayerShard, Profile, Traffic, Volume
from pipetransformer.errors import InfeasiblePlan
from pipetransformer.mesh import SINGLE, StageMesh

LONG_SEQUENCE = 1024  # tokens from which a ring may pay


def mesh_batch_size(batch_size: int, mesh: StageMesh) -> int:
    """Returns the samples of a batch as the devices that the mesh makes see them."""
    return -(-batch_size // mesh.batch_ways)


def on_mesh(profile: Profile, cluster: Cluster, mesh: StageMesh) -> tuple[Profile, Cluster]:
    """Returns profile and cluster of the devices that a mesh makes.

    Args:
        profile: Has the layers on the mesh.
        cluster: The ranks.

    Raises:
        InfeasiblePlan: The mesh has more ranks than there are.
    """
    check_num_ranks(mesh, cluster.num_devices)
    _, shards, exchange = profile.on(mesh)
    link, allreduce_link = _links_inside(cluster, mesh)
    layers = tuple(_with_exchanges(shard, exchange, link, allreduce_link) for shard in shards)
    num_sums = len({ranks for shard in shards for ranks, _ in shard.copied_bytes})
    widening = mesh.rows_multiple * profile.layers[1].output_bytes / layers[1].output_bytes  # features are read whole
    return (
        replace(
            profile.sharded(mesh),  # by whose copies the memory of a rank is counted
            layers=layers,
            step_overhead_s=profile.step_overhead_s + num_sums * allreduce_link.latency_s,
            read=_of_rows(profile.read, mesh),
            read_besides=_of_rows(profile.read_besides, mesh),
            fill_read_s=profile.fill_read_s * mesh.rows_multiple,
            cache_read_s_per_byte=profile.cache_read_s_per_byte * widening,
            kind="mesh",
        ),
        _cluster_of(cluster, mesh),
    )


def _of_rows(read: AffineTime, mesh: StageMesh) -> AffineTime:
    """Returns the time of reading by samples of which each rank has a part, and reads all rows."""
    return AffineTime(read.fixed_s, read.per_sample_s * mesh.rows_multiple)


def without_mesh(profile: Profile, cluster: Cluster, plan: Plan, batch_size: int) -> tuple[Profile, Cluster, Plan, int]:
    """Returns what the search has seen of a plan: itself, or on a mesh a plan of the devices that the mesh makes."""
    if plan.mesh == SINGLE:
        return profile, cluster, plan, batch_size
    return *on_mesh(profile, cluster, plan.mesh), replace(plan, mesh=SINGLE), mesh_batch_size(batch_size, plan.mesh)


def check_num_ranks(mesh: StageMesh, num_devices: int) -> None:
    """Refuses a mesh of more ranks than there are devices.

    Raises:
        InfeasiblePlan: With both numbers.
    """
    if mesh.num_ranks > num_devices:
        raise InfeasiblePlan(
            f"a mesh of {mesh} takes {mesh.num_ranks} devices, and there are {num_devices}; lower `tp`, `cp` or "
            "`dp_shard`, or raise `num_devices`"
        )


def _links_inside(cluster: Cluster, mesh: StageMesh) -> tuple[Link, Link]:
    """Returns the links of messages and of collectives along the axes of a mesh: within a node where it fits one.

    Meshes lie one after the other, so that some reach into a second node where their size does not divide a node's.
    """
    link, node_link = cluster.link, cluster.node_link
    if cluster.node_size is None or node_link is None or cluster.node_size % mesh.num_ranks == 0:
        return link, cluster.allreduce_link or link
    shared = node_link.shared(cluster.node_size)
    return shared, (cluster.node_allreduce_link or node_link).shared(cluster.node_size)


def _cluster_of(cluster: Cluster, mesh: StageMesh) -> Cluster:
    """Returns the cluster whose devices are meshes; the ranks of a mesh send at once, and share what leaves a node."""
    size, per_node = mesh.num_ranks, cluster.devices_per_node
    users = size if per_node is None else min(size, per_node)
    return replace(
        cluster,
        num_devices=cluster.num_devices // size,
        devices_per_node=None if per_node is None else max(1, per_node // size),
        node_link=cluster.node_link and cluster.node_link.shared(users),
        node_allreduce_link=cluster.node_allreduce_link and cluster.node_allreduce_link.shared(users),
        ranks_per_device=size,
    )


def _with_exchanges(shard: LayerShard, exchange: AffineTime | None, link: Link, allreduce_link: Link) -> LayerProfile:
    def seconds(traffic: Traffic) -> AffineTime:
        collectives, messages = traffic
        return _seconds(collectives, exchange, allreduce_link) + _seconds(messages, exchange, link)

    layer, bandwidth = shard.layer, allreduce_link.bandwidth_bytes_per_s
    copied_s = sum(2 * (ranks - 1) / ranks * num_bytes / bandwidth for ranks, num_bytes in shard.copied_bytes)
    return replace(
        layer,
        forward=layer.forward + seconds(shard.forward),
        input_grad=layer.input_grad + seconds(shard.input_grad),
        weight_grad=layer.weight_grad + seconds(shard.weight_grad),
        lowest_grad=layer.backward_as_lowest + seconds(shard.lowest_grad),
        optimizer_s=layer.optimizer_s + copied_s,
    )


def _seconds(volume: Volume, exchange: AffineTime | None, link: Link) -> AffineTime:
    """Returns the seconds of exchanges, each of which takes no less than the link's latency."""
    each = exchange or AffineTime(0.0, 0.0)
    fixed_s = volume.number * max(link.latency_s, each.fixed_s) + volume.fixed_bytes / link.bandwidth_bytes_per_s
    return AffineTime(fixed_s, volume.number * each.per_sample_s + volume.sample_bytes / link.bandwidth_bytes_per_s)


def mesh_candidates(
    wanted: Mapping[str, int | None], like: StageMesh, widths: Mapping[str, int], num_tokens: int,
    num_devices: int, is_limited: bool,
) -> tuple[StageMesh, ...]:  # fmt: skip
    """Returns the meshes that a plan may have, the smallest first.

    What is left open: ``tp`` as far as it divides heads and widths, ``dp_shard`` where memory is limited, ``cp`` from
    :data:`LONG_SEQUENCE` tokens on.

    Args:
        wanted: ``tp``, ``cp`` and ``dp_shard``; ``None`` leaves one open.
        like: Has the algorithm and the type of sums of all of them; ``2d`` and ``3d`` are for those who ask for them.
        widths: Heads and widths of the model.
        num_tokens: Of a sample.
        num_devices: Of a node, which meshes that are left open divide.
        is_limited: The devices' memory has a limit.

    Raises:
        InfeasiblePlan: None of them divides a node.
    """
    divisors = [size for size in range(1, num_devices + 1) if num_devices % size == 0]
    plain = replace(like, algorithm="1d")
    may_ring = num_tokens >= LONG_SEQUENCE and like.algorithm != "3d"
    open_sizes = {
        "dp_shard": divisors if is_limited else [1],
        "cp": divisors if may_ring else [1],
        "tp": range(1, num_devices + 1),
    }
    sizes = (each if (size := wanted[name]) is None else [size] for name, each in open_sizes.items())
    found = [
        replace(plain if tp == 1 and wanted["tp"] is None else like, dp_shard=dp_shard, cp=cp, tp=tp)
        for dp_shard, cp, tp in product(*sizes)
    ]
    is_open = None in wanted.values()
    fitting = [mesh for mesh in found if not is_open or (num_devices % mesh.num_ranks == 0 and mesh.divides(widths))]
    if not fitting:
        fixed = ", ".join(f"{name}={size}" for name, size in wanted.items() if size is not None)
        raise InfeasiblePlan(
            f"no mesh with {fixed} divides the {num_devices} devices of a node, as one that is left open has to; give "
            "all of `tp`, `cp` and `dp_shard`, or sizes that divide it"
        )
    return tuple(dict.fromkeys(SINGLE if mesh.num_ranks == 1 else mesh for mesh in sorted(fitting, key=_simplicity)))


def _simplicity(mesh: StageMesh) -> tuple[int, int, int, int]:
    """Returns the key by which the simpler one of equally fast meshes comes first."""
    return mesh.num_ranks, mesh.cp, mesh.dp_shard, mesh.tp
