"""The words of a summary: how a run ended, what it gained, and its plans as rows of a table."""

from __future__ import annotations

from pipetransformer.report.format import arrangement, byte_size, duration, number, plural, replicas, two_digits
from pipetransformer.report.sinks import Values
from pipetransformer.report.text import Row, flatten, layers_per_stage, named_values

LONG_WAIT = 0.05  # part of the steps' time; a shorter wait for input is not worth a line
LONG_REPORT, LEAST_REPORT_S = 0.01, 1.0  # of the training's time; logs that take less are not worth a line
SMALL_PART = 0.01  # of the training's time; what takes less is not named
TIME_PARTS = {
    "active": "active layers",
    "frozen": "frozen layers",
    "recompute": "recomputing",
    "launch": "launching micro-batches",
    "cache": "reading the cache",
    "wait": "waiting for stages",
    "transfer": "transfers",
    "all_reduce": "all-reduce",
    "optimizer": "optimizer",
    "fixed": "fixed costs of a step",
    "transitions": "transitions",
    "trained_again": "steps trained again",
}
"""Names of the parts of a run's time, see :class:`~pipetransformer.autopipe.breakdown.StepParts`."""


def summary_rows(values: Values) -> list[Row]:
    """Returns how the run ended; a run that failed knows less."""
    is_dry = values["status"] == "dry_run"
    rows = [("status", "dry run: it stopped before its first step, as asked" if is_dry else values["status"])]
    rows += [("error", str(values["error"]))] if values.get("error") else []
    if early := values.get("stopped_early"):
        rows.append(("stopped early", f"at step {early['step']:,}: {early['reason']}"))
    rows += _results(values)
    rows += _work(values) if values.get("optimizer_steps") else []
    rows += _gain(values) if values.get("speedup_vs_static") is not None else []
    if values.get("cache"):
        rows.append(("cache", cache_reads(values["cache"])))
    if waited := _input_wait(values):
        rows.append(("input", waited))
    if waited := _report_wait(values):
        rows.append(("logging", waited))
    if values.get("traces"):
        rows.append(("traces", f"{', '.join(values['traces'])}: one step of each plan, for ui.perfetto.dev"))
    return rows


def _gain(values: Values) -> list[Row]:
    """Returns speed-up and limit; nothing for a run that was the best static plan from start to end."""
    if values.get("is_static"):
        return []
    speedup = f"{two_digits(values['speedup_vs_static'])} times the best static plan{_static_step(values)}"
    if compares_a_part(values):
        part = f"{values['compared_steps']:,} of its {plural(values['optimizer_steps'], 'step')}"
        speedup += f"; it and the limit are of the {part} that the run took on its present devices"
    if values.get("share_of_limit") is None:
        return [("speed-up", speedup)]
    share = values["share_of_limit"]
    reached = f"{share:.0%} of it reached"
    if share > 1:
        reached += ": steps went faster than the layers did when they were measured at the start"
    limit = f"{two_digits(values['limit'])} times with the same freeze decisions, no communication and no waiting"
    return [("speed-up", speedup), ("limit", f"{limit}; {reached}")]


def compares_a_part(values: Values) -> bool:
    """Returns whether a run went on with other devices, so that speed-up and limit are of its last part."""
    return values.get("compared_steps", values.get("optimizer_steps")) != values.get("optimizer_steps")


def _static_step(values: Values) -> str:
    """Returns where the static plan's time comes from."""
    if values.get("speedup_is") != "measured":
        untimed = ": blocks froze, or the run ended, before static plans of all kinds were timed"
        return f" (predicted{untimed if values.get('baseline') else '; baseline=true measures it'})"
    timed = sorted(values["static_plans"], key=lambda plan: plan["median_step_s"])
    steps = ", ".join(f"{arrangement(plan)} {duration(plan['median_step_s'])}" for plan in timed)
    return f" (measured: {steps} per step)"


def cache_reads(values: Values) -> str:
    """Returns what the cache held, how often it had a sample, and how long it was filled, read and waited for."""
    sizes = " and ".join(f"{byte_size(size)} of {tier}" for tier, size in values["bytes_by_tier"].items())
    hits = f", {values['hit_rate']:.1%} hits" if values["hit_rate"] is not None else ""
    read, waited = duration(values["read_seconds"]), duration(values["wait_seconds"])
    return f"{sizes}{hits}; filled in {duration(values['fill_seconds'])}, read for {read}, waited for {waited}"


def _input_wait(values: Values) -> str:
    """Returns how long steps waited for samples, where that is worth a change."""
    reading, step_s = values.get("input"), values.get("step_seconds")
    if not reading or not step_s or reading["wait_seconds"] < LONG_WAIT * step_s:
        return ""
    share, workers = reading["wait_seconds"] / step_s, plural(reading["num_workers"], "worker")
    return f"steps waited for it for {share:.0%} of their time, with {workers} per rank; raise loader.num_workers="


def _report_wait(values: Values) -> str:
    """Returns how long the training waited for its logs, where that is worth a change."""
    report_s, train_s = values.get("report_seconds"), values.get("train_seconds")
    if not report_s or not train_s or report_s < max(LEAST_REPORT_S, LONG_REPORT * train_s):
        return ""
    share = f"{report_s / train_s:.1%}"
    remedy = "logger=none writes the run folder alone, logger.max_share= bounds the service"
    return f"the training waited for it for {share} of its time; {remedy}"


def _results(values: Values) -> list[Row]:
    metric, others = values.get("metric"), dict(flatten(values.get("metrics") or {}))
    amount = f" on {metric['split']}, {plural(metric['num_samples'], 'sample')}" if metric else ""
    model, last = values.get("model"), values.get("last_step")
    scored = (metric or {}).get("step", last)  # of earlier releases the last one
    other = model if model and scored is not None and model["step"] != scored else None
    if other:
        amount += f", with the weights of step {scored:,}, which are not the saved ones"
    elif metric and scored is not None and scored != last:
        amount += f", with the weights of step {scored:,}"
    rows = [(metric["name"], number(metric["value"]) + amount)] if metric else []
    best = values.get("best")
    if metric and best and best["value"] != metric["value"]:
        rows.append(("best", f"{best['name']} {number(best['value'])} at step {best['step']:,}"))
    if other:
        scores = named_values(dict(flatten(other.get("metrics") or {})))
        rows.append(("saved", f"the weights of step {other['step']:,}{': ' if scores else ''}{scores}"))
    return rows + ([("all metrics", named_values(others))] if len(others) > 1 else [])


def _work(values: Values) -> list[Row]:
    pace = f"{plural(values['optimizer_steps'], 'step')}, {number(values['samples_per_second'], 3)} samples/s"
    share = f"{values['mean_frozen_fraction']:.0%} on average"
    rows = [
        ("training time", f"{duration(values['train_seconds'])}: {pace}{_foreseen(values)}"),
        ("frozen", f"{values['num_frozen']} of {plural(values['num_blocks'], 'block')} at the end, {share}"),
    ]
    if spent := time_spent(values):
        rows.insert(1, ("went to", spent))
    if "loss_scale" in values:
        skipped = plural(values["num_skipped_steps"], "step")
        rows.append(("loss scale", f"{values['loss_scale']:,.0f} at the end, {skipped} skipped for overflow"))
    if guard := values.get("guard"):
        skipped, again = plural(guard["num_skipped"], "bad step"), plural(guard["num_steps_lost"], "step")
        back = f"rolled back {plural(guard['num_rollbacks'], 'time')}, {again} trained again"
        rows.append(("guard", f"{skipped} without an update; {back}"))
    return rows


def time_spent(values: Values) -> str:
    """Returns the parts of the training's time, the largest first; empty for runs of earlier releases.

    The parts of steps are predicted from measured layers, and what they took more or less comes last.
    """
    parts, train_s = values.get("time_parts"), values.get("train_seconds")
    if not parts or not train_s:
        return ""
    known = {name: parts.get(name, 0.0) / train_s for name in TIME_PARTS}  # earlier releases have fewer
    shares = dict(sorted(known.items(), key=lambda part: -part[1]))
    words = [f"{share:.0%} {TIME_PARTS[name]}" for name, share in shares.items() if share >= SMALL_PART]
    rest = parts["unpredicted"] / train_s
    if abs(rest) >= SMALL_PART:
        words.append(f"{abs(rest):.0%} {'not predicted' if rest > 0 else 'less than predicted'}")
    return ", ".join(words)


def _foreseen(values: Values) -> str:
    """Returns how good the predicted times of the steps were."""
    predicted_s = values.get("predicted_step_seconds")
    if not predicted_s:
        return ""
    return f"; its steps took {two_digits(values['step_seconds'] / predicted_s)} times what was predicted"


PLAN_COLUMNS = (
    "from",
    "frozen",
    "cached",
    "layers per stage",
    "replicas",
    "micro",
    "predicted",
    "measured",
)


def plan_row(plan: Values) -> tuple[str, ...]:
    """Returns a cell for each of :data:`PLAN_COLUMNS`."""
    return (
        f"{plan['step']:,}",
        str(plan["num_frozen"]),
        str(plan["cache_level"]),
        layers_per_stage(plan),
        replicas(plan),
        str(plan["num_microbatches"]),
        duration(plan["predicted_step_s"]),
        duration(plan.get("median_step_s")),
    )


def plan_line(plan: Values) -> str:
    where = f"{arrangement(plan)} ({layers_per_stage(plan)}), {plural(plan['num_microbatches'], 'micro-batch')}"
    state = f"{plan['num_frozen']} frozen, {plan['cache_level']} cached"
    median_s = plan.get("median_step_s")  # none of a plan under which no step was made
    measured = "" if median_s is None else f", {duration(median_s)} measured"
    times = f"{duration(plan['predicted_step_s'])} per step predicted{measured}"
    return f"plan from step {plan['step']:,}: {state}, {where}, {times}"
