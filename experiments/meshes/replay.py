"""The systems' own headline ratios by the cost model, on clusters like theirs: ``python -m experiments.meshes.replay``.

A ratio in their papers compares two arrangements on one cluster. Here both are planned and predicted as a run would be.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from experiments.record import markdown
from pipetransformer.autopipe.memory import device_memory_bytes
from pipetransformer.autopipe.offload import model_bytes
from pipetransformer.autopipe.plan import Plan
from pipetransformer.config.compose import compose_simulation
from pipetransformer.config.schema import SimulationConfig
from pipetransformer.planning.planner import Planner
from pipetransformer.simulate.run import make_planner

Options = tuple[str, ...]

# 64 Quadro RTX 5000, 4 in a node, as Optimus and Tesseract had them; a model of 19 billion weights
GRID: Options = (
    "cluster=paper", "cluster.num_nodes=16", "cluster.devices_per_node=4", "cluster.memory_gib=1e6", "freeze=none",
    "shape.num_blocks=24", "shape.hidden_size=8192", "shape.num_heads=64", "shape.num_tokens=512",
    "parallel.num_stages=1", "parallel.num_microbatches=1",
)  # fmt: skip
MESHES: dict[str, Options] = {
    "1d, tp 64": ("parallel.tp=64", "parallel.num_replicas=1"),
    "1d, tp 4 x dp_shard 16": ("parallel.tp=4", "parallel.dp_shard=16", "parallel.num_replicas=1"),
    "2d, 8 x 8": ("parallel.tp=8", "parallel.dp_shard=8", "parallel.tp_algorithm=2d", "parallel.num_replicas=1"),
    "2.5d, 4 x 4 x 4": ("parallel.tp=4", "parallel.dp_shard=4", "parallel.tp_algorithm=2d", "parallel.num_replicas=4"),
    "3d, 4 x 4 x 4": ("parallel.tp=4", "parallel.dp_shard=4", "parallel.tp_algorithm=3d", "parallel.num_replicas=1"),
}
# P100 of 16 GB, one in a node, as the ring had them; BERT-base
RING: Options = (
    "cluster=paper", "cluster.num_nodes=64", "cluster.devices_per_node=1", "cluster.node_link_gb_per_s=9",
    "cluster.peak_tflops=9.3", "cluster.memory_gib=14.5", "freeze=none", "shape.num_blocks=12", "shape.hidden_size=768",
    "shape.num_heads=12", "parallel.num_stages=1", "parallel.num_replicas=1", "parallel.num_microbatches=1",
)  # fmt: skip


@dataclass(frozen=True)
class Headline:
    """A ratio of a paper: of samples per second at one batch.

    Attributes:
        published: The paper's ratio; ``None``: no paper has it.
        mesh, over: Keys of :data:`MESHES`.
    """

    system: str
    published: float | None
    mesh: str
    over: str


HEADLINES = (
    Headline("Optimus over Megatron", 1.48, "2d, 8 x 8", "1d, tp 64"),
    Headline("Tesseract over Optimus", 1.45, "2.5d, 4 x 4 x 4", "2d, 8 x 8"),
    Headline("Colossal-AI's 3d over 1d", 2.32, "3d, 4 x 4 x 4", "1d, tp 64"),
    Headline("Colossal-AI's 3d over 2d", 1.57, "3d, 4 x 4 x 4", "2d, 8 x 8"),
    Headline("rows x Megatron over Megatron", None, "1d, tp 4 x dp_shard 16", "1d, tp 64"),
)
BATCHES = (64, 384)


def planned(options: Options) -> tuple[SimulationConfig, Planner, Plan]:
    """Returns the only plan that the options leave."""
    config = compose_simulation(options)
    planner = make_planner(config)
    return config, planner, planner.initial()


@cache
def seconds(mesh: str, batch_size: int) -> float:
    """Returns the predicted seconds of a step."""
    _, planner, plan = planned((*GRID, *MESHES[mesh], f"batch_size={batch_size}"))
    return planner.predict(plan)


def device_bytes(options: Options, batch_size: int) -> int:
    """Returns the memory of a device in a step of a batch."""
    _, planner, plan = planned((*options, f"batch_size={batch_size}"))
    return max(device_memory_bytes(planner.profile, plan, batch_size))


def ratio(headline: Headline, batch_size: int) -> float:
    """Returns how many times as many samples per second a mesh is predicted to compute."""
    return seconds(headline.over, batch_size) / seconds(headline.mesh, batch_size)


def largest_batch(options: Options) -> int:
    """Returns the largest batch of 512 tokens that fits a device of the ring's cluster."""
    config, planner, plan = planned((*RING, *options, "shape.num_tokens=512", "batch_size=64"))
    budget = config.cluster.memory_gib * 2**30
    return _last(lambda size: max(device_memory_bytes(planner.profile, plan, size)) <= budget)


def longest_samples(options: Options) -> int:
    """Returns the most tokens of a sample, in multiples of 64, with which a batch of 64 fits."""
    budget = planned((*RING, *options, "shape.num_tokens=512", "batch_size=64"))[0].cluster.memory_gib * 2**30
    free = (*RING, *options, "cluster.memory_gib=1e6")  # or nothing could be planned that does not fit
    return 64 * _last(lambda number: device_bytes((*free, f"shape.num_tokens={64 * number}"), 64) <= budget)


def _last(fits: Callable[[int], bool]) -> int:
    """Returns the largest number that fits, where smaller ones do."""
    high = 1
    while fits(2 * high):
        high *= 2
    low = high
    high *= 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def ring_rows() -> list[tuple[str, ...]]:
    """Returns batch and length on 64 devices around a ring, over those of tensor parallelism, which 12 heads limit."""
    tensor, ring = ("parallel.tp=12",), ("parallel.cp=64",)
    batches = largest_batch(ring), largest_batch(tensor)
    lengths = longest_samples(ring), longest_samples(tensor)
    return [
        ("ring over Megatron: largest batch of 512 tokens", "13.70", f"{batches[0] / batches[1]:.2f}", f"{batches}"),
        (
            "ring over Megatron: longest samples in batches of 64",
            "3.00",
            f"{lengths[0] / lengths[1]:.2f}",
            f"{lengths}",
        ),
    ]


def chunk_row() -> tuple[str, ...]:
    """Returns the largest model of 240 GB of host memory, in billions of weights, by the bytes of a weight."""
    _, planner, plan = planned((*RING, "shape.num_tokens=512", "batch_size=64"))
    num_weights = sum(layer.parameter_bytes for layer in planner.profile.layers) // 4  # in float32
    own, theirs = model_bytes(planner.profile, plan) / num_weights, 14
    return (
        "PatrickStar: bytes of a weight on the host",
        f"{theirs}",
        f"{own:.0f}",
        f"{240 / own:.0f} and {240 / theirs:.0f} billion in 240 GB",
    )


def tables() -> str:
    """Returns the tables of the README."""
    grids = [
        (
            each.system,
            "-" if each.published is None else f"{each.published:.2f}",
            *(f"{ratio(each, batch):.2f}" for batch in BATCHES),
        )
        for each in HEADLINES
    ]
    steps = [
        (
            mesh,
            *(f"{seconds(mesh, batch):.1f} s" for batch in BATCHES),
            *(f"{device_bytes((*GRID, *MESHES[mesh]), batch) / 2**30:.0f}" for batch in BATCHES),
        )
        for mesh in MESHES
    ]
    names = [f"batch {batch}" for batch in BATCHES]
    return "\n\n".join(
        [
            markdown(("samples per second", "paper", *names), grids),
            markdown(("step", *names, *(f"GiB, {name}" for name in names)), steps),
            markdown(("memory", "paper", "here", "numbers"), [*ring_rows(), chunk_row()]),
        ]
    )


def main(arguments: Sequence[str] | None = None) -> None:
    argparse.ArgumentParser(description=__doc__).parse_args(arguments)
    print(tables())


if __name__ == "__main__":
    main()
