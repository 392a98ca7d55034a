"""Simulates a whole run without devices: the timeline, freeze policy, planner and history of a run, predicted times."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from pipetransformer.autopipe.constraints import PlanConstraints
from pipetransformer.autopipe.memory import device_memory_bytes
from pipetransformer.autopipe.meshes import mesh_candidates
from pipetransformer.autopipe.plan import Plan
from pipetransformer.autopipe.search.search import best_plan
from pipetransformer.config.kinds import SIMULATED
from pipetransformer.config.names import OPTIONS, in_options, of_section
from pipetransformer.config.no_effect import not_counted, warnings
from pipetransformer.config.schema import SimulationConfig
from pipetransformer.config.sections import StaticPipeline
from pipetransformer.config.validate import validate
from pipetransformer.errors import InfeasiblePlan, UserError
from pipetransformer.kinds import check_kinds
from pipetransformer.mesh import SINGLE, StageMesh
from pipetransformer.planning.cache_rule import obstacle, refused
from pipetransformer.planning.foresight import Foresight
from pipetransformer.planning.history import PlanRecord, RunHistory
from pipetransformer.planning.planner import Planner
from pipetransformer.planning.timeline import Timeline
from pipetransformer.report.format import plural
from pipetransformer.report.trace import Event
from pipetransformer.simulate.analytic import WIDTHS, analytic_profile
from pipetransformer.simulate.analytic_mesh import analytic_mesh_profile
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
        UserError: The freeze policy does not fit the model, or ``cache.require`` asks for a cache that cannot be.
    """
    check_kinds({"config": config}, SIMULATED)
    validate(config, with_data=False)
    config.freeze.check(config.shape.num_blocks)
    if config.cache.require and (note := _no_cache(config)):
        raise refused(note)
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
        time_parts=summary["time_parts"],
        traces=tuple(_events(config, planner, entry.plan) for entry in history.entries),
    )


def make_planner(config: SimulationConfig) -> Planner:
    """Returns the planner of a run on the described cluster, with counted work in place of measured work."""
    speed, widths = config.cluster.speed(config.precision), WIDTHS[config.precision]
    profile = analytic_profile(config.shape, speed, config.optim.state_factor, widths)
    cluster = config.cluster.cluster(config.parallel.device_memory_gib)
    meshes = _meshes(config)
    counted = partial(analytic_mesh_profile, config.shape, speed, config.optim.state_factor, widths)
    on_meshes = (counted(mesh) for mesh in meshes if mesh != SINGLE)
    profile = replace(profile, meshes=tuple(on_meshes))
    return Planner(profile, cluster, config.parallel, config.batch_size, config.parks, meshes)


def _meshes(config: SimulationConfig) -> tuple[StageMesh, ...]:
    """Returns the meshes that a plan may have, the simplest first.

    Raises:
        UserError: A mesh that the user asks for cannot be, by the model or the optimizer.
    """
    parallel, shape = config.parallel, config.shape
    if not parallel.splits_stages:
        return (SINGLE,)
    if parallel.mesh.num_ranks > 1:
        _check_mesh(config)
    elif not (shape.has_tp_plan and config.optim.takes_parts):
        return (SINGLE,)
    widths = {"heads": shape.num_heads, "width": shape.hidden_size, "MLP": round(shape.mlp_ratio * shape.hidden_size)}
    parallel.mesh.check(widths)
    size = config.cluster.devices_per_node
    return mesh_candidates(parallel.mesh_sizes, parallel.mesh, widths, shape.num_tokens, size, is_limited=True)


def _check_mesh(config: SimulationConfig) -> None:
    """Refuses a mesh that the user asks for and on which the run itself could not begin."""
    config.optim.check_parts()
    if not config.shape.has_tp_plan:
        raise UserError(
            f"no mesh splits the layers of {config.model.name} (shape.has_tp_plan=false); drop parallel.tp=, cp= and "
            "dp_shard="
        )


def run_history(config: SimulationConfig, planner: Planner) -> RunHistory:
    """Returns the history of a run from its first step to its last."""
    timeline = Timeline.of(config, config.samples_of_an_epoch)
    may_cache = config.cache.enabled and config.parallel.autopipe and _no_cache(config) is None
    num_draws = max(1, config.cache.num_draws) if config.dataset.is_random else 1

    def num_samples(step: int) -> int:
        """Returns the samples of a fill: of each the draws that the epochs which are left may read."""
        return timeline.samples_left(step) * min(num_draws, len(timeline.epochs_left(step)))

    return Foresight(
        planner, timeline, config.freeze, config.shape.num_blocks, may_cache, config.cluster.transition_s,
        config.optim.for_model(config.shape.hidden_size).rate, config.cache.require, num_samples,
    ).history()  # fmt: skip


def _no_cache(config: SimulationConfig) -> str | None:
    """Returns why the training data leaves the cache off, as the run says it; ``None`` where it does not."""
    data = config.dataset
    return obstacle(config.cache, data.is_random, data.has_flip_pair, data.is_mixed)


def _setting(config: SimulationConfig, planner: Planner) -> tuple[tuple[str, str], ...]:
    """Returns model, data and devices in words, and what of the run is made up."""
    shape, cluster = config.shape, config.cluster
    millions = sum(layer.parameter_bytes for layer in planner.profile.layers) / WIDTHS[config.precision].wide / 1e6
    size = f"{shape.num_blocks} blocks of width {shape.hidden_size}, {shape.num_tokens} tokens"
    steps = f"{plural(config.epochs, 'epoch')} in batches of {config.batch_size:,}"
    devices = f"{plural(cluster.num_nodes, 'node')} x {plural(cluster.devices_per_node, 'device')}"
    speed = f"{cluster.peak(config.precision):g} TFLOPS peak x {cluster.efficiency:g}"
    rows = [
        ("model", f"{config.model.name}: {size}, {millions:,.0f} M parameters, {config.precision}"),
        ("data", f"{config.dataset.name}: {config.samples_of_an_epoch:,} training samples, {steps}"),
        ("devices", f"{devices}, each {cluster.memory_gib:g} GiB and {speed} in {config.precision}"),
    ]
    if not config.freeze.never_freezes:
        signals = [f"{name.replace('_', ' ')}s" for name in config.freeze.signals if name != "step_share"]  # is known
        if signals:
            early = "are made up, so that blocks freeze as early as the rule can"
            rows.append(("freezing", f"{' and '.join(signals)} {early}"))
        note = _no_cache(config)
        if note is not None and config.cache.enabled and config.parallel.autopipe:
            rows.append(("cache", note))
    rows += [("warning", text) for text in _warnings(config, planner)]
    uncounted = not_counted(config)
    if uncounted:
        rows.append(("left out", f"{', '.join(uncounted)}: what a run takes with it, a simulation does not count"))
    return tuple(rows)


def _warnings(config: SimulationConfig, planner: Planner) -> list[str]:
    """Returns what the run itself would warn of."""
    timeline = Timeline.of(config, config.samples_of_an_epoch)
    note = config.freeze.shortfall(planner.step_shares())
    return [*warnings(config, timeline.num_steps, timeline.decision_every), *([note] if note else [])]


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
    return entry.step / -(-config.samples_of_an_epoch // config.batch_size)


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
    mesh = f", {plan.mesh}" if plan.mesh != SINGLE else ""
    return plan.schedule + stages + ", recompute" * plan.recompute + ", sharded" * plan.fsdp + mesh
