"""What elasticity adds to freezing, by devices, interconnect and model: ``python -m experiments.what_if.elasticity``.

The arms are those of the ablation. The best of the static plans is what all of them are compared with, plain data
parallelism included. The last columns ask the planner itself when going to another arrangement pays.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from experiments.record import markdown, publish
from pipetransformer.autopipe.plan import Plan
from pipetransformer.config.compose import compose_simulation
from pipetransformer.config.schema import SimulationConfig
from pipetransformer.planning.planner import Planner, RemainingRun
from pipetransformer.planning.timeline import Timeline
from pipetransformer.report.event_log import write_json
from pipetransformer.simulate.run import make_planner, run_history

MODELS = {
    "ViT-B/16, ImageNet": ("model=vit", "dataset=imagenet"),
    "BERT-large, SQuAD": ("model=bert_large", "dataset=squad"),
    "ViT of 9.7 B, ImageNet": ("shape.num_blocks=48", "shape.hidden_size=4096", "shape.num_heads=32"),
}
INTERCONNECTS = {
    "NVLink, InfiniBand": (),
    "PCIe, 100 Gbit/s Ethernet": (
        "cluster.link_gb_per_s=25", "cluster.node_link_gb_per_s=12.5", "cluster.node_link_latency_s=5e-5",
    ),
}  # fmt: skip
NODES = (1, 8, 64, 512)  # of 8 devices
SETTING = ("cluster=dgx", "batch_size=4096", "epochs=10", "freeze=pipetransformer", "freeze.interval=0.2")
FIXED, AUTODP_OFF, CACHE_OFF = "parallel.autopipe=false", "parallel.autodp=false", "cache=off"
ARMS = {
    "freeze only": (FIXED, AUTODP_OFF, CACHE_OFF),
    "+ AutoPipe": (AUTODP_OFF, CACHE_OFF),
    "+ AutoPipe + AutoDP": (CACHE_OFF,),
    "+ AutoPipe + AutoCache": (AUTODP_OFF,),
    "all": (),
}
FROZEN = (1 / 4, 1 / 2, 3 / 4)
HEADER = (
    "model", "interconnect", "devices", "first plan", "last plan", *ARMS, "share of limit", "all / freeze only",
    *(f"{share:.0%} frozen: pays back after" for share in FROZEN),
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A model on devices that are not there.

    Attributes:
        speedups: Of each arm over the best static plan.
        limit: Of the same decisions.
        paybacks: For each of :data:`FROZEN` the fraction of the run's steps after which going from the first plan to
            the fastest one has paid back; ``None`` where no other plan is faster.
    """

    model: str
    interconnect: str
    num_devices: int
    first: str
    last: str
    speedups: dict[str, float]
    limit: float
    paybacks: list[float | None]

    def row(self) -> tuple[str, ...]:
        speedups, everything = self.speedups, self.speedups["all"]
        return (
            *(self.model, self.interconnect, f"{self.num_devices:,}", self.first, self.last),
            *(f"{speedups[arm]:.2f}" for arm in ARMS),
            *(f"{everything / self.limit:.0%}", f"{everything / speedups['freeze only']:.2f}"),
            *map(_payback, self.paybacks),
        )


def _payback(fraction: float | None) -> str:
    """Returns it in percent of the run; what takes longer than the run never pays."""
    if fraction is None:
        return "no gain"
    return f"{fraction:.1%}" if fraction <= 1 else "never"


def simulate_case(model: str, interconnect: str, num_nodes: int) -> Case:
    """Simulates all arms of a row."""
    common = (*SETTING, *MODELS[model], *INTERCONNECTS[interconnect], f"cluster.num_nodes={num_nodes}")
    configs = {arm: compose_simulation((*common, *options)) for arm, options in ARMS.items()}
    planners = {arm: make_planner(config) for arm, config in configs.items()}
    last = planners["all"]
    for planner in planners.values():  # nothing is frozen yet, so that all begin alike, and as the best static plan
        planner.first, planner.static = last.first, last.initial()
    histories = {arm: run_history(configs[arm], planner) for arm, planner in planners.items()}
    summaries = {arm: history.summary(planners[arm]) for arm, history in histories.items()}
    plans = [entry.plan for entry in histories["all"].entries]
    return Case(
        *(model, interconnect, last.cluster.num_devices, _plan(plans[0]), _plan(plans[-1])),
        *({arm: summary["speedup_vs_static"] for arm, summary in summaries.items()}, summaries["all"]["limit"]),
        list(paybacks(configs["all"], last)),
    )


def _plan(plan: Plan) -> str:
    return f"{plan.num_stages} x {plan.num_replicas} m{plan.num_microbatches}"


def paybacks(config: SimulationConfig, planner: Planner) -> Iterator[float | None]:
    """Yields :attr:`Case.paybacks`."""
    timeline, num_blocks = Timeline.of(config, config.num_samples), config.shape.num_blocks
    first, overhead_s = planner.first, config.cluster.transition_s
    for share in FROZEN:
        num_frozen = math.ceil(share * num_blocks)
        endless = RemainingRun(10**12, timeline.num_samples, overhead_s, may_cache=True)  # any gain pays: the fastest
        best = planner.transition(first, num_frozen, endless)
        saved_s = planner.keep(first.after, num_frozen).predicted_step_s - best.after.predicted_step_s
        yield best.cost_s / saved_s / timeline.num_steps if best.gain_s > 0 else None


def simulate_all(cases: Sequence[tuple[str, str, int]], file: Path) -> list[Case]:
    """Simulates the cases, but for those that are in the file, and keeps each there as soon as it is known."""
    known = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    for case in cases:
        name = " | ".join(map(str, case))
        if name not in known:
            known[name] = asdict(simulate_case(*case))
            write_json(file, known)
            print(name, flush=True)
    return [Case(**known[" | ".join(map(str, case))]) for case in cases]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, help="keeps what is known; the same command goes on where it was stopped")
    parser.add_argument("--models", nargs="*", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--nodes", nargs="*", type=int, default=NODES, help="of 8 devices each")
    parser.add_argument("--into", type=Path, default=Path(__file__).parent, help="whose README.md takes the table")
    given = parser.parse_args(arguments)
    wanted = [(model, link, nodes) for nodes in given.nodes for model in given.models for link in INTERCONNECTS]
    cases = simulate_all(wanted, given.file)
    order = list(MODELS), list(INTERCONNECTS)
    cases.sort(key=lambda case: (order[0].index(case.model), order[1].index(case.interconnect), case.num_devices))
    publish(markdown(HEADER, (case.row() for case in cases)), [asdict(case) for case in cases], given.into)


if __name__ == "__main__":
    main()
