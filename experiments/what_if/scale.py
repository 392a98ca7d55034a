"""Speed-up and share of the limit by the number of devices: ``python -m experiments.what_if.scale``.

One fixed global batch, so more devices mean fewer samples for each. The smaller model fits one device, the larger does
not.
"""

import argparse
from collections.abc import Sequence

from experiments.record import markdown
from pipetransformer.config.compose import compose_simulation
from pipetransformer.simulate.result import Row, simulate

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
    """The figures of one run, and the speed-up of one in which transitions cost only what they move and fill."""
    overrides = (*SETTING, *MODELS[model], f"cluster.num_nodes={num_nodes}")
    what_if = compose_simulation(overrides)
    outcome = simulate(what_if)
    free = simulate(compose_simulation((*overrides, "cluster.transition_s=0")))
    return (
        model,
        f"{what_if.cluster.num_devices:,}",
        _plan(outcome.rows[0]),
        _plan(outcome.rows[-1]),
        f"{outcome.static.samples_per_second:,.0f}",
        f"{outcome.train_seconds:,.0f} s",
        f"{outcome.speedup_vs_static:.2f}",
        f"{outcome.limit:.2f}",
        f"{outcome.share_of_limit:.0%}",
        f"{free.speedup_vs_static:.2f}",
    )


def _plan(found: Row) -> str:
    return f"{found.num_stages} x {found.num_replicas} m{found.num_microbatches}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--nodes", nargs="*", type=int, default=[1, 4, 16, 64, 256, 512], help="of 8 devices each")
    options = parser.parse_args(arguments)
    print(markdown(HEADER, (row(model, nodes) for model in options.models for nodes in options.nodes)))


if __name__ == "__main__":
    main()
