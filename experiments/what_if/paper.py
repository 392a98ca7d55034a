"""Replays the paper's own system on its own cluster: ``python -m experiments.what_if.paper``.

Not our planner: the paper halves the stages of a static pipeline when enough blocks are frozen, keeps the batch of each
pipeline (so that the global batch grows), and cuts it into two micro-batches. What each arrangement takes comes from
the same cost model as everything else.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from experiments.record import markdown
from pipetransformer.autopipe.constraints import PlanConstraints
from pipetransformer.autopipe.search.search import best_plan
from pipetransformer.config.compose import compose_simulation
from pipetransformer.config.schema import SimulationConfig
from pipetransformer.freeze.base import Signals
from pipetransformer.freeze.pipetransformer import PaperRule
from pipetransformer.planning.foresight import falling_norms
from pipetransformer.simulate.run import make_planner

HALVED_AT = {12: (5, 9, 11), 24: (9, 17, 21)}
"""Frozen blocks from which the paper's criterion allows 4, 2 and 1 stages, by the number of blocks."""
NUM_STAGES, NUM_MICROBATCHES = 8, 2
ABLATION = {
    "no freezing": 1.00,
    "freeze only": 0.95,
    "+ AutoPipe + AutoCache": 1.26,
    "+ AutoPipe + AutoDP": 2.27,
    "all": 2.83,
}
SWEEP = {"1/5": 2.04, "1/4": 2.44, "1/3": 2.83, "2/5": 3.29, "1/2": 3.86}
"""Speed-up by alpha, ViT-B/16 on CIFAR-100."""


@dataclass(frozen=True)
class Arm:
    """The paper's parts that are on."""

    freeze: bool = True
    autopipe: bool = True
    autodp: bool = True
    autocache: bool = True


ARMS = {
    "no freezing": Arm(freeze=False, autopipe=False, autodp=False, autocache=False),
    "freeze only": Arm(autopipe=False, autodp=False, autocache=False),
    "+ AutoPipe + AutoCache": Arm(autodp=False),
    "+ AutoPipe + AutoDP": Arm(autocache=False),
    "all": Arm(),
}


@dataclass(frozen=True)
class Assumptions:
    """The unknowns of the paper's system.

    Attributes:
        frozen_blocks_save: Frozen blocks that are computed take only their forward pass; else as long as active ones.
        cache_mb_per_s: What each pipeline reads from the cache; ``None``: what ``conf/cluster/paper.yaml`` says.
        batch_size: Samples of a pipeline's step.
    """

    frozen_blocks_save: bool = True
    cache_mb_per_s: float | None = None
    batch_size: int = 320


class Replay:
    """Epoch after epoch of the paper's system, in seconds per sample."""

    def __init__(self, config: SimulationConfig, assumptions: Assumptions) -> None:
        planner = make_planner(config)
        rate = assumptions.cache_mb_per_s
        self.profile = planner.profile if rate is None else replace(planner.profile, cache_read_s_per_byte=1e-6 / rate)
        self.cluster = replace(planner.cluster, device_memory_bytes=None)  # what ran has fitted
        self.num_blocks = config.shape.num_blocks
        self.num_devices = config.cluster.num_devices
        self.epochs, self.assumptions = config.epochs, assumptions

    def sample_seconds(self, arm: Arm, alpha: float) -> float:
        """Returns the mean over the epochs of a run."""
        prefixes = [0] * self.epochs if not arm.freeze else list(self._prefixes(alpha))
        levels = [0, *prefixes] if arm.autocache else [0] * (self.epochs + 1)  # an epoch reads what the last one stored
        return sum(self._epoch(arm, *one) for one in zip(prefixes, levels, strict=False)) / self.epochs

    def _epoch(self, arm: Arm, num_frozen: int, level: int) -> float:
        num_stages = NUM_STAGES >> sum(num_frozen >= least for least in HALVED_AT[self.num_blocks]) * arm.autopipe
        num_replicas = self.num_devices // (num_stages if arm.autodp else NUM_STAGES)
        batch_size = num_replicas * self.assumptions.batch_size
        computed = num_frozen if self.assumptions.frozen_blocks_save or arm.autocache else 0
        constraints = PlanConstraints(num_stages, num_replicas, NUM_MICROBATCHES, "gpipe", recompute=False)
        plan = best_plan(self.profile, self.cluster, batch_size, computed, level, constraints)
        return plan.predicted_step_s / batch_size

    def _prefixes(self, alpha: float) -> Iterator[int]:
        """Yields the frozen blocks of each epoch: the cap of the rule, decided once per epoch."""
        policy, num_frozen = PaperRule(alpha=alpha), 0
        state = policy.initial_state()
        for epoch in range(self.epochs):
            yield num_frozen
            signals = Signals(
                epoch, self.num_blocks, num_frozen, {"gradient_norm": falling_norms(self.num_blocks, num_frozen)}
            )
            decision, state = policy.decide(signals, state)
            num_frozen = decision.num_frozen


def _ratio(text: str) -> float:
    above, below = text.split("/")
    return int(above) / int(below)


def speedups(config: SimulationConfig, assumptions: Assumptions) -> dict[str, float]:
    """Returns the speed-up over no freezing of every arm at alpha = 1/3, and of all parts at every alpha."""
    replay = Replay(config, assumptions)
    static_s = replay.sample_seconds(ARMS["no freezing"], 1 / 3)
    arms = {name: static_s / replay.sample_seconds(arm, 1 / 3) for name, arm in ARMS.items()}
    sweep = {f"all, alpha={a}": static_s / replay.sample_seconds(ARMS["all"], _ratio(a)) for a in SWEEP}
    return arms | sweep


PAPER = ABLATION | {f"all, alpha={alpha}": speedup for alpha, speedup in SWEEP.items()}
FITTED = Assumptions(frozen_blocks_save=False, cache_mb_per_s=75)
VARIANTS = {
    "cost model": Assumptions(),
    "frozen blocks save nothing": replace(FITTED, cache_mb_per_s=None),
    "and each pipeline reads 75 MB/s": FITTED,
}


def rows(config: SimulationConfig) -> Iterator[tuple[str, ...]]:
    """Yields a row for each figure of the paper."""
    found = [speedups(config, assumptions) for assumptions in VARIANTS.values()]
    for name, paper in PAPER.items():
        values = [one[name] for one in found]
        yield name, f"{paper:.2f}", *(f"{value:.2f}" for value in values), f"{values[-1] / paper - 1:+.0%}"


def main() -> None:
    print(markdown(("arm", "paper", *VARIANTS, "difference of the last"), rows(compose_simulation())))


if __name__ == "__main__":
    main()
