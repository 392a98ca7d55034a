"""What a simulated run comes to: a row per plan, and its speed-up over arrangements that never change."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from pipetransformer.autopipe.constraints import PlanConstraints
from pipetransformer.autopipe.memory import device_memory_bytes
from pipetransformer.autopipe.plan import Plan
from pipetransformer.autopipe.search.search import best_plan
from pipetransformer.config.names import OPTIONS, in_options, of_section
from pipetransformer.config.schema import SimulationConfig, StaticPipeline
from pipetransformer.errors import InfeasiblePlan
from pipetransformer.planning.history import PlanRecord
from pipetransformer.planning.planner import Planner
from pipetransformer.report.trace import Event
from pipetransformer.simulate.analytic import WIDTHS, analytic_profile
from pipetransformer.simulate.hardware import GIB
from pipetransformer.simulate.run import play
from pipetransformer.simulate.step import idle_share, step_events


@dataclass(frozen=True)
class Row:
    """One plan in force; ``epoch`` is where it begins, ``bubble`` the share of its pipeline's time spent waiting."""

    epoch: float
    num_frozen: int
    cache_level: int
    num_stages: int
    num_replicas: int
    num_microbatches: int
    schedule: str
    bubble: float
    samples_per_second: float
    memory_gib: float


@dataclass(frozen=True)
class Outcome:
    """A simulated run.

    Attributes:
        rows: A row for each plan of the run.
        static: The best plan that never freezes.
        pipeline: The static pipeline to compare with; ``None`` where it does not fit, and ``no_pipeline`` says why.
        train_seconds: Steps, transitions and cache filling.
        speedup_vs_static, speedup_vs_pipeline: Times of the two over that of the run.
        limit, share_of_limit: See :mod:`pipetransformer.autopipe.limit`.
        traces: The events of one step under each plan.
    """

    rows: tuple[Row, ...]
    static: Row
    pipeline: Row | None
    no_pipeline: str
    train_seconds: float
    mean_frozen_fraction: float
    speedup_vs_static: float
    speedup_vs_pipeline: float | None
    limit: float
    share_of_limit: float
    traces: tuple[list[Event], ...]

    def as_dict(self) -> dict[str, Any]:
        """Everything but the traces as plain values."""
        return {name: value for name, value in asdict(self).items() if name != "traces"}


def make_planner(config: SimulationConfig) -> Planner:
    """The planner of a run on the described cluster, with counted work for measured work."""
    speed, widths = config.cluster.speed(config.precision), WIDTHS[config.precision]
    profile = analytic_profile(config.shape, speed, config.optim.state_factor, widths)
    cluster = config.cluster.cluster(config.parallel.device_memory_gib)
    return Planner(profile, cluster, config.parallel, config.batch_size)


def simulate(config: SimulationConfig) -> Outcome:
    """Plays the run and compares it.

    Raises:
        InfeasiblePlan: Nothing fits the devices.
        ValueError: The freeze policy does not fit the model.
    """
    config.freeze.check(config.shape.num_blocks)
    planner = make_planner(config)
    history = play(config, planner)
    summary = history.summary(planner)
    pipeline, no_pipeline = _pipeline(config, planner)
    num_steps, seconds = summary["optimizer_steps"], summary["train_seconds"]
    return Outcome(
        rows=tuple(_row(config, planner, entry.plan, _epoch(config, entry)) for entry in history.entries),
        static=_row(config, planner, planner.static),
        pipeline=_row(config, planner, pipeline) if pipeline else None,
        no_pipeline=no_pipeline,
        train_seconds=seconds,
        mean_frozen_fraction=summary["mean_frozen_fraction"],
        speedup_vs_static=summary["speedup_vs_static"],
        speedup_vs_pipeline=num_steps * planner.predict(pipeline) / seconds if pipeline else None,
        limit=summary["limit"],
        share_of_limit=summary["share_of_limit"],
        traces=tuple(_events(config, planner, entry.plan) for entry in history.entries),
    )


def _pipeline(config: SimulationConfig, planner: Planner) -> tuple[Plan | None, str]:
    wanted = config.pipeline
    constraints = PlanConstraints(
        wanted.num_stages, wanted.num_replicas, wanted.num_microbatches, wanted.schedule, stages_per_rank=1
    )
    try:
        return best_plan(planner.profile, planner.cluster, config.batch_size, constraints=constraints), ""
    except InfeasiblePlan as error:
        return None, in_options(error, option_names(config) | of_section("pipeline", StaticPipeline))


def option_names(config: SimulationConfig) -> dict[str, str]:
    """Maps fields that the planner's errors name to the options by which a simulation describes its devices."""
    names = OPTIONS | {"num_devices": "cluster.num_nodes"}
    budget_gib = config.parallel.device_memory_gib
    if budget_gib is None or budget_gib >= config.cluster.memory_gib:
        names["device_memory_gib"] = "cluster.memory_gib"
    return names


def _epoch(config: SimulationConfig, entry: PlanRecord) -> float:
    return entry.step / -(-config.num_samples // config.batch_size)


def _events(config: SimulationConfig, planner: Planner, plan: Plan) -> list[Event]:
    return step_events(planner.profile, planner.cluster, plan, config.batch_size)


def _row(config: SimulationConfig, planner: Planner, plan: Plan, epoch: float = 0.0) -> Row:
    batch_size = config.batch_size
    return Row(
        epoch,
        plan.num_frozen,
        plan.cache_level,
        plan.num_stages,
        plan.num_replicas,
        plan.num_microbatches,
        _schedule(plan),
        idle_share(_events(config, planner, plan)),
        batch_size / planner.predict(plan),
        max(device_memory_bytes(planner.profile, plan, batch_size)) / GIB,
    )


def _schedule(plan: Plan) -> str:
    """The schedule, with what goes beyond one stage on a device that keeps its layers and activations."""
    chunks = f", {plan.stages_per_rank} chunks" if plan.stages_per_rank > 1 else ""
    return plan.schedule + chunks + ", checkpoint" * plan.recompute + ", sharded" * plan.fsdp
