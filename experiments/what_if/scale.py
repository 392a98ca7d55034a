"""Speed-up and share of the limit by the number of devices: ``python -m experiments.what_if.scale``.

One fixed global batch, so more devices mean fewer samples for each. The smaller model fits one device, the larger does
not.
"""

import argparse
from collections.abc import Sequence

from experiments.record import markdown
from pipetransformer.config.compose import compose_simulation
from pipetransformer.simulate.result import PlanRow
from pipetransformer.simulate.run import simulate

MODELS = {
    "ViT-B/16": (),
    "ViT of 9.7 B": ("shape.num_blocks=48", "shape.hidden_size=4096", "shape.num_heads=32"),
}
HEADER = (
    "model",
    "devices",
    "first plan",
    "last plan",
    "best static, samples/s",
    "training",
    "freezing and cache: speed-up",
    "limit",
    "share",
    "with free transitions",
)
SETTING = ("cluster=dgx", "batch_size=4096", "epochs=10")


def row(model: str, num_nodes: int) -> tuple[str, ...]:
    """Returns the figures of a run, and the speed-up of one whose transitions cost only moving and filling."""
    overrides = (*SETTING, *MODELS[model], f"cluster.num_nodes={num_nodes}")
    config = compose_simulation(overrides)
    result = simulate(config)
    free = simulate(compose_simulation((*overrides, "cluster.transition_s=0")))
    return (
        model,
        f"{config.cluster.num_devices:,}",
        _plan(result.rows[0]),
        _plan(result.rows[-1]),
        f"{result.static.samples_per_second:,.0f}",
        f"{result.train_seconds:,.0f} s",
        f"{result.speedup_vs_static:.2f}",
        f"{result.limit:.2f}",
        f"{result.share_of_limit:.0%}",
        f"{free.speedup_vs_static:.2f}",
    )


def _plan(found: PlanRow) -> str:
    return f"{found.num_stages} x {found.num_replicas} m{found.num_microbatches}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--nodes", nargs="*", type=int, default=[1, 4, 16, 64, 256, 512], help="of 8 devices each")
    options = parser.parse_args(arguments)
    print(markdown(HEADER, (row(model, nodes) for model in options.models for nodes in options.nodes)))


if __name__ == "__main__":
    main()
