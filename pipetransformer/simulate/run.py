"""Simulates a whole run without devices: the timeline, freeze policy, planner and history of a run, predicted times.

There are no gradients, so policies are asked with made-up norms that fall from block to block: the topmost block
always has the smallest one. The paper's rule is then bound by its cap alone.
"""

from __future__ import annotations

from pipetransformer.autopipe.constraints import PlanConstraints
from pipetransformer.autopipe.memory import device_memory_bytes
from pipetransformer.autopipe.plan import Plan
from pipetransformer.autopipe.search.search import best_plan
from pipetransformer.config.names import OPTIONS, in_options, of_section
from pipetransformer.config.schema import SimulationConfig, StaticPipeline
from pipetransformer.errors import InfeasiblePlan
from pipetransformer.freeze.base import Decision, Signals
from pipetransformer.planning.history import PlanRecord, RunHistory
from pipetransformer.planning.planner import Planner, RemainingRun
from pipetransformer.planning.timeline import Timeline
from pipetransformer.report.format import plural
from pipetransformer.report.trace import Event
from pipetransformer.simulate.analytic import WIDTHS, analytic_profile
from pipetransformer.simulate.hardware import GIB
from pipetransformer.simulate.result import PlanRow, SimulationResult
from pipetransformer.simulate.step import idle_share, step_events


def simulate(config: SimulationConfig) -> SimulationResult:
    """Simulates a run and compares it with arrangements that never change. Imports no torch.

    Example::

        config = SimulationConfig(
            model=TimmModel(name="vit_base_patch16_224"), dataset=Digits(), freeze=PaperRule(), optim=AdamW(),
            logger=NoLogger(), cluster=Hardware(num_nodes=2, devices_per_node=8, ...),
            shape=TransformerShape(num_blocks=12, hidden_size=768, num_heads=12, num_tokens=197),
            num_samples=50_000, batch_size=640, epochs=10,
        )
        result = simulate(config)
        print(result.speedup_vs_static, result.rows[-1].num_replicas)
        print(result.table())

    Args:
        config: A run's options, and what stands for devices, model and data.

    Raises:
        InfeasiblePlan: Nothing fits the devices.
        UserError: The freeze policy does not fit the model.
    """
    config.freeze.check(config.shape.num_blocks)
    planner = make_planner(config)
    history = run_history(config, planner)
    summary = history.summary(planner)
    pipeline, no_pipeline = _static_pipeline(config, planner)
    num_steps, seconds = summary["optimizer_steps"], summary["train_seconds"]
    return SimulationResult(
        setting=_setting(config, planner),
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


def make_planner(config: SimulationConfig) -> Planner:
    """Returns the planner of a run on the described cluster, with counted work in place of measured work."""
    speed, widths = config.cluster.speed(config.precision), WIDTHS[config.precision]
    profile = analytic_profile(config.shape, speed, config.optim.state_factor, widths)
    cluster = config.cluster.cluster(config.parallel.device_memory_gib)
    return Planner(profile, cluster, config.parallel, config.batch_size)


def run_history(config: SimulationConfig, planner: Planner) -> RunHistory:
    """Returns the history of a run from its first step to its last."""
    run = _SimulatedRun(config, planner)
    for step in range(run.timeline.num_steps):
        if run.timeline.is_decision_step(step) and not config.freeze.never_freezes:
            run.decide(step)
        run.step(step)
    return run.history


class _SimulatedRun:
    def __init__(self, config: SimulationConfig, planner: Planner) -> None:
        assert config.num_samples is not None
        self.config, self.planner, self.num_samples = config, planner, config.num_samples
        self.timeline = Timeline.of(config, config.num_samples)
        self.num_blocks = config.shape.num_blocks
        self._may_cache = config.cache.enabled and config.parallel.autopipe
        self.history = RunHistory(self.num_blocks, self._may_cache)
        self._last = planner.first
        self.history.plan(PlanRecord(self._last.after, 0, self._last.reason))
        self._policy_state = config.freeze.initial_state()
        self._num_decisions = 0
        self._step_s = planner.predict(self.plan)

    @property
    def plan(self) -> Plan:
        return self.history.entries[-1].plan

    def decide(self, step: int) -> None:
        frozen = self.plan.num_frozen
        signals = Signals(self._num_decisions, self.num_blocks, frozen, falling_norms(self.num_blocks, frozen))
        decision, self._policy_state = self.config.freeze.decide(signals, self._policy_state)
        self._num_decisions += 1
        if decision.num_frozen != frozen:
            self._transition(step, decision)

    def step(self, step: int) -> None:
        index, batch_size = step % self.timeline.steps_per_epoch, self.config.batch_size
        self.history.step(min(batch_size, self.num_samples - index * batch_size), self._step_s)

    def _transition(self, step: int, decision: Decision) -> None:
        timeline, overhead_s = self.timeline, self.config.cluster.transition_s
        remaining = RemainingRun(timeline.steps_left(step), timeline.samples_left(step), overhead_s, self._may_cache)
        self._last = transition = self.planner.transition(self._last, decision.num_frozen, remaining)
        plan, seconds, why = transition.after, transition.cost_s, transition.reason
        self.history.plan(PlanRecord(plan, step, decision.reason, seconds, remaining.num_samples, why))
        self._step_s = self.planner.predict(plan)


def falling_norms(num_blocks: int, num_frozen: int) -> tuple[float, ...]:
    """Returns norms with which the paper's rule is bound by its cap: zero where frozen, smallest at the top."""
    return tuple(0.0 if block < num_frozen else float(num_blocks - block) for block in range(num_blocks))


def _setting(config: SimulationConfig, planner: Planner) -> tuple[tuple[str, str], ...]:
    """Returns model, data and devices in words, and what of the run is made up."""
    shape, cluster = config.shape, config.cluster
    millions = sum(layer.parameter_bytes for layer in planner.profile.layers) / WIDTHS[config.precision].wide / 1e6
    size = f"{shape.num_blocks} blocks of width {shape.hidden_size}, {shape.num_tokens} tokens"
    steps = f"{plural(config.epochs, 'epoch')} in batches of {config.batch_size:,}"
    devices = f"{plural(cluster.num_nodes, 'node')} x {plural(cluster.devices_per_node, 'device')}"
    speed = f"{cluster.peak_tflops:g} TFLOPS peak x {cluster.efficiency:g}"
    rows = [
        ("model", f"{config.model.name}: {size}, {millions:,.0f} M parameters, {config.precision}"),
        ("data", f"{config.dataset.name}: {config.num_samples:,} training samples, {steps}"),
        ("devices", f"{devices}, each {cluster.memory_gib:g} GiB and {speed} in float32"),
    ]
    if not config.freeze.never_freezes:
        rows.append(("freezing", "gradient norms are made up, so the paper's rule freezes as much as its cap allows"))
    return tuple(rows)


def _static_pipeline(config: SimulationConfig, planner: Planner) -> tuple[Plan | None, str]:
    """Returns the pipeline to compare with, or why it cannot be."""
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
    assert config.num_samples is not None
    return entry.step / -(-config.num_samples // config.batch_size)


def _events(config: SimulationConfig, planner: Planner, plan: Plan) -> list[Event]:
    return step_events(planner.profile, planner.cluster, plan, config.batch_size)


def _row(config: SimulationConfig, planner: Planner, plan: Plan, epoch: float = 0.0) -> PlanRow:
    batch_size = config.batch_size
    return PlanRow(
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
    stages = f", stages_per_rank={plan.stages_per_rank}" if plan.stages_per_rank > 1 else ""
    return plan.schedule + stages + ", recompute" * plan.recompute + ", sharded" * plan.fsdp
