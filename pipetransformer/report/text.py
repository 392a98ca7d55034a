"""The words of the report: events as short phrases and labelled rows, the same on a terminal and in a log."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pipetransformer.report.reporter import Values
from pipetransformer.report.units import byte_size, duration, number, plural

Row = tuple[str, str]
Change = tuple[str, str, str]


def arrangement(plan: Values) -> str:
    sharded = ", sharded" * plan["sharded"]
    return f"{plural(len(plan['stages']), 'stage')} x {plural(plan['num_replicas'], 'replica')}{sharded}"


def layers_per_stage(plan: Values) -> str:
    """``embedding-3 | 4-7 | 8-head``: the first and last layer of each stage, blocks by number."""
    head = plan["stages"][-1][1]
    names = {0: "embedding", head: "head"}
    runs = ([names.get(layer, str(layer)) for layer in dict.fromkeys(stage)] for stage in plan["stages"])
    return " | ".join("-".join(run) for run in runs)


def named_values(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {number(value)}" for name, value in values.items())


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested dicts, names joined by slashes."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{name}/")
        else:
            yield prefix + name, value


def start_rows(values: Values) -> list[Row]:
    plan = values["plan"]
    num_devices = len(plan["stages"]) * plan["num_replicas"]
    idle = f", {values['world_size'] - num_devices} idle" if num_devices < values["world_size"] else ""
    return [
        (
            "model",
            f"{values['model']}: {values['num_parameters']:,} parameters, {plural(values['num_blocks'], 'block')}",
        ),
        ("data", f"{values['dataset']}, {values['task'].replace('_', ' ')}"),
        ("steps", _steps(values)),
        ("batch", _batch(values["batch_size"], plan)),
        ("devices", f"{arrangement(plan)} = {plural(num_devices, 'device')}{idle}"),
        ("layers", f"{layers_per_stage(plan)}, schedule {plan['schedule']}"),
        ("predicted", f"{duration(plan['predicted_step_s'])} per step"),
        ("because", values["reason"]),
        *([("cache", _cache(values["cache"]))] if values.get("cache") else []),
        ("folder", values["run_dir"]),
    ]


def _steps(values: Values) -> str:
    """As an equation where the run is not cut short by a number of steps."""
    per_epoch, total = values["steps_per_epoch"], values["num_steps"]
    if per_epoch * values["epochs"] == total:
        return f"{per_epoch:,} steps/epoch x {values['epochs']:g} epochs = {total:,} steps"
    return f"{total:,} steps = {total / per_epoch:.3g} epochs of {per_epoch:,} steps"


def _batch(batch_size: int, plan: Values) -> str:
    share = batch_size / plan["num_replicas"]
    cut = f"{plural(plan['num_microbatches'], 'micro-batch')} of {share / plan['num_microbatches']:.3g}"
    return f"{batch_size:,} samples = {plural(plan['num_replicas'], 'replica')} x {share:.3g}, in {cut}"


def _cache(values: Values) -> str:
    """Its room, and from which block on it pays."""
    room = " and ".join(f"{byte_size(size)} of {tier}" for tier, size in values["bytes_by_tier"].items())
    kept = "all samples" if values["missing"] == 0 else f"{1 - values['missing']:.1%} of the training samples"
    level = values["break_even_level"]
    if level is None:
        return f"room for {kept} in {room}; reading is slower than computing at every block, so it is not used"
    read, forward = duration(values["read_seconds"]), duration(values["forward_seconds"])
    block = f"the output of block {level} takes {read} per sample to read and {forward} to compute"
    return f"room for {kept} in {room}; pays from block {level} on: {block}"


def decision_line(values: Values) -> str:
    before, after = values["num_frozen_before"], values["num_frozen"]
    frozen = f"{before} -> {after} blocks frozen" if after != before else f"still {plural(after, 'block')} frozen"
    terms = f" ({named_values(values['terms'])})" if values["terms"] else ""
    return f"decision at step {values['step']:,}: {frozen}, bound by {values['bound']}{terms}: {values['reason']}"


def gradient_norms(norms: Sequence[float | None]) -> list[str]:
    """One number per block, ``-`` for a frozen block."""
    return [f"{norm:.2g}" if norm else "-" for norm in norms]


def transition_title(values: Values) -> str:
    before, after = arrangement(values["before"]), arrangement(values["after"])
    change = f"{before} -> {after}" if before != after else f"still {after}"
    return f"transition at step {values['step']:,}: {change}"


def transition_changes(before: Values, after: Values) -> list[Change]:
    """Label, before and after of everything that makes a plan."""
    return [
        ("frozen blocks", str(before["num_frozen"]), str(after["num_frozen"])),
        ("read from cache", _cached(before), _cached(after)),
        ("layers per stage", layers_per_stage(before), layers_per_stage(after)),
        ("replicas", str(before["num_replicas"]), str(after["num_replicas"])),
        ("micro-batches", str(before["num_microbatches"]), str(after["num_microbatches"])),
        ("schedule", before["schedule"], after["schedule"]),
        ("predicted step", duration(before["predicted_step_s"]), duration(after["predicted_step_s"])),
    ]


def _cached(plan: Values) -> str:
    return f"block {plan['cache_level']}" if plan["cache_level"] else "nothing"


def transition_costs(values: Values) -> list[Row]:
    parts = {name.removesuffix("_seconds"): value for name, value in values.items() if name.endswith("_seconds")}
    took = ", ".join(f"{part} {duration(seconds)}" for part, seconds in parts.items())
    return [
        ("because", values["reason"]),
        ("moved", f"{byte_size(values['bytes_moved'])} in {plural(values['num_moves'], 'move')}"),
        ("took", f"{duration(values['seconds'])} ({took})"),
        ("gain", f"steps {number(values['predicted_gain'])} times as fast (predicted)"),
        ("choice", values["choice"]),
    ]


def cache_fill_line(values: Values) -> str:
    source = f"block {values['from_level']} (cached)" if values["from_level"] else "the input"
    work = f"{plural(values['num_samples'], 'sample')}, {byte_size(values['bytes'])}, {duration(values['seconds'])}"
    if values["num_found"]:
        work += f"; {plural(values['num_found'], 'sample')} were there from an earlier run"
    return f"cache at step {values['step']:,}: output of block {values['to_level']} from {source}: {work}"


def evaluation_line(values: Values) -> str:
    amount = f"{plural(values['num_samples'], 'sample')} in {duration(values['seconds'])}"
    return f"{values['split']} at step {values['step']:,}: {named_values(values['metrics'])} ({amount})"


def summary_rows(values: Values) -> list[Row]:
    """How the run ended; a run that failed knows less."""
    rows = [("status", values["status"])]
    rows += [("error", str(values["error"]))] if values.get("error") else []
    rows += _results(values)
    rows += _work(values) if values.get("optimizer_steps") else []
    if values.get("speedup_vs_static") is not None:
        rows.append(("speed-up", f"{number(values['speedup_vs_static'])} times the best static plan"))
    if values.get("share_of_limit") is not None:
        reached = f"{values['share_of_limit']:.1%} of it reached"
        if values["share_of_limit"] > 1:
            reached += ", for steps went faster than the layers did when they were measured at the start"
        rows.append(("limit", f"{number(values['limit'])} times with the same freeze decisions; {reached}"))
    if values.get("cache"):
        rows.append(("cache", _reads(values["cache"])))
    if values.get("traces"):
        rows.append(("traces", f"{', '.join(values['traces'])}: one step of each plan, for ui.perfetto.dev"))
    return rows


def _reads(values: Values) -> str:
    sizes = " and ".join(f"{byte_size(size)} of {tier}" for tier, size in values["bytes_by_tier"].items())
    hits = f", {values['hit_rate']:.1%} hits" if values["hit_rate"] is not None else ""
    read, waited = duration(values["read_seconds"]), duration(values["wait_seconds"])
    return f"{sizes}{hits}; filled in {duration(values['fill_seconds'])}, read for {read}, waited for {waited}"


def _results(values: Values) -> list[Row]:
    metric, others = values.get("metric"), dict(flatten(values.get("metrics") or {}))
    amount = f" on {metric['split']}, {plural(metric['num_samples'], 'sample')}" if metric else ""
    rows = [(metric["name"], number(metric["value"]) + amount)] if metric else []
    return rows + ([("all metrics", named_values(others))] if len(others) > 1 else [])


def _work(values: Values) -> list[Row]:
    pace = f"{values['optimizer_steps']:,} steps, {number(values['samples_per_second'])} samples/s"
    share = f"{values['mean_frozen_fraction']:.1%} on average"
    rows = [
        ("training time", f"{duration(values['train_seconds'])}: {pace}"),
        ("frozen", f"{values['num_frozen']} of {plural(values['num_blocks'], 'block')} at the end, {share}"),
    ]
    if "loss_scale" in values:
        skipped = plural(values["num_skipped_steps"], "step")
        rows.append(("loss scale", f"{values['loss_scale']:,.0f} at the end, {skipped} skipped for overflow"))
    return rows


PLAN_COLUMNS = (
    "from step",
    "frozen",
    "cached",
    "layers per stage",
    "replicas",
    "micro-batches",
    "predicted",
    "measured",
)


def plan_row(plan: Values) -> tuple[str, ...]:
    """One cell for each of :data:`PLAN_COLUMNS`."""
    return (
        f"{plan['step']:,}",
        str(plan["num_frozen"]),
        str(plan["cache_level"]),
        layers_per_stage(plan),
        str(plan["num_replicas"]),
        str(plan["num_microbatches"]),
        duration(plan["predicted_step_s"]),
        duration(plan.get("median_step_s")),
    )


def plan_line(plan: Values) -> str:
    where = f"{arrangement(plan)} ({layers_per_stage(plan)}), {plural(plan['num_microbatches'], 'micro-batch')}"
    state = f"{plan['num_frozen']} frozen, {plan['cache_level']} cached"
    return f"plan from step {plan['step']:,}: {state}, {where}, {duration(plan['predicted_step_s'])} per step"
