"""The words of the report: events as short phrases and labelled rows, the same on a terminal and in a log."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pipetransformer.report.format import (
    arrangement,
    byte_size,
    duration,
    num_devices,
    number,
    plural,
)
from pipetransformer.report.sinks import Values

Row = tuple[str, str]
Change = tuple[str, str, str]

SMALL_SHARE = 0.05  # parts of a transition's time below it are left out


def layers_per_stage(plan: Values) -> str:
    """Returns ``embedding-3 | 4-7 | 8-head``: the first and last layer of each stage, blocks by number."""
    head = plan["stages"][-1][1]
    return " | ".join(_layers(first, last, head) for first, last in plan["stages"])


def _layers(first: int, last: int, head: int) -> str:
    names = {0: "embedding", head: "head"}
    return "-".join(names.get(layer, str(layer)) for layer in dict.fromkeys((first, last)))


def moved_layers(values: Values) -> str:
    """Returns ``4-6 from rank 1 to 0, head from rank 3 to 2``; empty where nothing moved, as in older logs."""
    runs = list[list[int]]()  # first and last layer, source, target
    for layer, *ranks in sorted(values.get("moves", ()), key=lambda move: (*move[1:], move[0])):
        if runs and runs[-1][2:] == ranks and runs[-1][1] in (layer - 1, layer):
            runs[-1][1] = layer
        else:
            runs.append([layer, layer, *ranks])
    head = values["after"]["stages"][-1][1]
    return ", ".join(f"{_layers(run[0], run[1], head)} from rank {run[2]} to {run[3]}" for run in sorted(runs))


def named_values(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {number(value)}" for name, value in values.items())


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the leaves of nested dicts, names joined by slashes."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{name}/")
        else:
            yield prefix + name, value


def start_rows(values: Values) -> list[Row]:
    plan, note = values["plan"], values.get("data_note", "")  # runs of earlier versions have none
    num_used = num_devices(plan)
    idle = f", {values['world_size'] - num_used} idle" if num_used < values["world_size"] else ""
    return [
        (
            "model",
            f"{values['model']}: {values['num_parameters']:,} parameters, {plural(values['num_blocks'], 'block')}",
        ),
        ("data", f"{values['dataset']}, {values['task'].replace('_', ' ')}{note and f': {note}'}"),
        ("steps", _steps(values)),
        ("batch", _batch(values["batch_size"], plan)),
        *([("rate", _rate(values))] if "lr" in values else []),  # not in logs of earlier releases
        ("devices", f"{arrangement(plan)} = {plural(num_used, 'device')}{idle}"),
        ("layers", f"{layers_per_stage(plan)}, schedule {plan['schedule']}"),
        *_predicted(values),
        ("because", values["reason"]),
        *([("cache", _cache(values["cache"]))] if values.get("cache") else []),
        ("folder", values["run_dir"]),
    ]


def start_lines(values: Values) -> list[str]:
    """Returns the start in short: model and data, work and devices, folder."""
    rows = dict(start_rows(values))
    predicted = "" if "memory" in rows else f", {rows['predicted']} predicted"
    rate = f", learning rate {rows['rate'].partition(',')[0]}" if "rate" in rows else ""
    return [
        f"{rows['model']}; {rows['data']}",
        f"{rows['steps']} of {plural(values['batch_size'], 'sample')}{rate}; {rows['devices']}{predicted}",
        *([f"predicted: {rows['predicted']}; {rows['memory'].removesuffix(' (predicted)')}"] if not predicted else []),
        f"folder: {values['run_dir']}",
    ]


def _predicted(values: Values) -> list[Row]:
    """Returns how long the run is predicted to train, and what its devices hold."""
    found = values.get("estimate")
    if not found:
        return [("predicted", f"{duration(values['plan']['predicted_step_s'])} per step")]
    step_s, epoch_s = duration(found["step_seconds"]), duration(found["epoch_seconds"])
    times = f"{step_s} per step, {epoch_s} per epoch, {duration(found['train_seconds'])} in all"
    if found["train_seconds_frozen"] is not None:
        frozen = plural(found["num_frozen"], "block")
        times += f", {duration(found['train_seconds_frozen'])} where up to {frozen} freeze as early as they may"
    budget = found["device_budget"]
    limit = "" if budget is None else f" of {byte_size(budget)}"
    memory = f"{byte_size(max(found['device_bytes']))}{limit} on the fullest device"
    return [("predicted", f"{times}, evaluations not counted"), ("memory", f"{memory} (predicted)")]


def resume_line(values: Values) -> str:
    """Returns where a run goes on, and what it has lost."""
    lost = f"; {plural(values['num_steps_lost'], 'step')} after it are repeated" if values["num_steps_lost"] else ""
    return f"resumed at step {values['step']:,} from {values['checkpoint']}{lost}"


def _steps(values: Values) -> str:
    """Returns an equation where the run is not cut short by a number of steps."""
    per_epoch, total = values["steps_per_epoch"], values["num_steps"]
    if per_epoch * values["epochs"] == total:
        return f"{plural(per_epoch, 'step')} per epoch x {plural(values['epochs'], 'epoch')} = {plural(total, 'step')}"
    return f"{plural(total, 'step')} = {total / per_epoch:.3g} epochs of {per_epoch:,} steps"


def _rate(values: Values) -> str:
    """Returns the highest learning rate, the peak if it is another one, and where that comes from if not the user."""
    source = ", the recipe's for a model of this width; optim.lr= gives another" if values["lr_by_model"] else ""
    reached = values.get("lr_reached", values["lr"])  # not in logs of earlier releases
    short = "" if reached == values["lr"] else f" of {number(values['lr'], 2)}: the warm-up is longer than the run"
    return f"up to {number(reached, 2)}{short}{source}"


def _batch(batch_size: int, plan: Values) -> str:
    share = batch_size / plan["num_replicas"]
    cut = f"{plural(plan['num_microbatches'], 'micro-batch')} of {share / plan['num_microbatches']:.3g}"
    return f"{batch_size:,} samples = {plural(plan['num_replicas'], 'replica')} x {share:.3g}, in {cut}"


def _cache(values: Values) -> str:
    """Returns the cache's capacity, and the block from which on it pays."""
    room = " and ".join(f"{byte_size(size)} of {tier}" for tier, size in values["bytes_by_tier"].items())
    kept = "all samples" if values["missing"] == 0 else f"{1 - values['missing']:.1%} of the training samples"
    level = values["break_even_level"]
    if level is None:
        return f"{kept} fit in {room}; reading alone pays at no block; each transition weighs the whole step anew"
    read, forward = duration(values["read_seconds"]), duration(values["forward_seconds"])
    block = f"the output of block {level} takes {read} per sample to read and {forward} to compute"
    return f"{kept} fit in {room}; pays from block {level} on: {block}"


def decision_line(values: Values) -> str:
    before, after, num_blocks = values["num_frozen_before"], values["num_frozen"], len(values["gradient_norms"])
    frozen = f"{before} -> {after}" if after != before else f"still {after}"
    if values["bound"] == "guard":
        return (
            f"guard at step {values['step']:,}: {values['reason']} ({frozen} of {plural(num_blocks, 'block')} frozen)"
        )
    where = f"{_freezes(before, after)} at step {values['step']:,}"
    return f"{where}: {frozen} of {plural(num_blocks, 'block')} ({values['reason']})"


def _freezes(before: int, after: int) -> str:
    return "unfreeze" if after < before else "freeze"


def gradient_norms(norms: Sequence[float | None]) -> list[str]:
    """Returns one number per block, ``-`` for a frozen block."""
    return [f"{norm:.2g}" if norm else "-" for norm in norms]


def signal_lines(values: Values) -> Iterator[str]:
    """Yields a line for each signal that the policy asked for besides the gradient norm, and what measuring took."""
    signals = values.get("signals", {})
    shown = {name: numbers for name, numbers in signals.items() if any(numbers)}  # else all blocks are frozen
    for name, numbers in shown.items():
        yield f"{name.replace('_', ' ')}: {' '.join(gradient_norms(numbers))}"
    if (seconds := values.get("signal_seconds")) and (shown or not signals):
        took = ", ".join(f"{name.replace('_', ' ')} {duration(each)}" for name, each in seconds.items())
        yield f"measuring took: {took}"


def transition_title(values: Values) -> str:
    """Returns ``freeze at step 243: 4 -> 5 blocks, arrangement kept``."""
    before, after = values["before"]["num_frozen"], values["after"]["num_frozen"]
    frozen = f"{before} -> {plural(after, 'block')}" if before != after else f"still {plural(after, 'block')}"
    is_kept = arrangement(values["before"]) == arrangement(values["after"])
    what = _freezes(before, after) if before != after else "new plan"
    return f"{what} at step {values['step']:,}: {frozen}, {'arrangement kept' if is_kept else 'new arrangement'}"


def transition_changes(values: Values) -> list[Change]:
    """Returns label, before and after of everything in a plan that changes, besides frozen blocks and times."""
    before, after = values["before"], values["after"]
    rows = [
        ("arrangement", arrangement(before), arrangement(after)),
        ("read from cache", _cached(before), _cached(after)),
        ("layers per stage", layers_per_stage(before), layers_per_stage(after)),
        ("micro-batches", str(before["num_microbatches"]), str(after["num_microbatches"])),
        ("schedule", before["schedule"], after["schedule"]),
    ]
    return [row for row in rows if row[1] != row[2]]


def _cached(plan: Values) -> str:
    return f"block {plan['cache_level']}" if plan["cache_level"] else "nothing"


def transition_line(values: Values) -> str:
    """Returns ``1 stage x 4 replicas, block 4 from the cache: 130 ms -> 80 ms per step predicted, took 1.9 s``."""
    before, after = values["before"], values["after"]
    is_kept = arrangement(before) == arrangement(after)
    parts = ["arrangement kept" if is_kept else arrangement(after)]
    if state := _returned_state(values):
        parts.append(state)
    if before["cache_level"] != after["cache_level"]:
        falls_back = 0 < after["cache_level"] < before["cache_level"]
        parts.append(f"the cache falls back to {_cached(after)}" if falls_back else f"{_cached(after)} from the cache")
    old, new = duration(before["predicted_step_s"]), duration(after["predicted_step_s"])
    return f"{', '.join(parts)}: {old} -> {new} per step predicted, took {duration(values['seconds'])}"


def _returned_state(values: Values) -> str:
    """Returns where the optimizer state of blocks that train again comes from; empty where there are none."""
    is_unfrozen = values["after"]["num_frozen"] < values["before"]["num_frozen"]
    if not is_unfrozen or "parks" not in values:  # not in logs of earlier releases
        return ""
    return "optimizer state as it was at the freeze" if values["parks"] else "optimizer state anew"


def timed_line(values: Values) -> str:
    """Returns ``timed at step 8: 54 ms per step, 36 ms predicted (2 stages x 1 replica)``."""
    measured, predicted = duration(values["measured_step_s"]), duration(values["predicted_step_s"])
    where = f"timed at step {values['step']:,}"
    parts = plural(values["num_stages"], "stage"), plural(values["num_replicas"], "replica"), values.get("mesh")
    return f"{where}: {measured} per step, {predicted} predicted ({' x '.join(filter(None, parts))})"


def new_plan_line(values: Values) -> str | None:
    """Returns why a run goes to another arrangement with as many frozen blocks; ``None`` for other transitions."""
    before, after = values["before"], values["after"]
    if before["num_frozen"] != after["num_frozen"] or arrangement(before) == arrangement(after):
        return None
    return f"new plan at step {values['step']:,}: {values['reason']}"


def transition_rows(values: Values, world_size: int) -> list[Row]:
    """Returns what a transition gains and takes.

    Args:
        world_size: Devices of the run.
    """
    rows = [("step", _step_times(values))]
    if values.get("predicted_gain_s"):
        gain, cost = duration(values["predicted_gain_s"]), duration(values["predicted_cost_s"])
        rows.append(("worth it", f"saves {gain} until the end of the run, takes {cost} (predicted)"))
    elif values["choice"]:
        rows.append(("choice", values["choice"]))
    if state := _returned_state(values):
        rows.append(("trains again", state))
    rows.append(("took", _time_taken(values)))
    if values["bytes_moved"]:
        moved = f"{byte_size(values['bytes_moved'])} in {plural(values['num_moves'], 'move')}"
        rows.append(("moved", ": ".join(filter(None, (moved, moved_layers(values))))))
    num_idle = world_size - num_devices(values["after"])
    is_timed = values["reason"].startswith("baseline:")  # idle for the moment, whatever is faster
    if num_idle and not is_timed and arrangement(values["before"]) != arrangement(values["after"]):
        why = "no plan with more devices is predicted to be faster"
        rows.append(("idle", f"{num_idle} of {plural(world_size, 'device')}: {why}"))
    return rows


def _step_times(values: Values) -> str:
    """Returns what the step takes, and where it gains, how much of that the frozen blocks alone would give."""
    before, after = values["before"], values["after"]
    before_s, after_s = duration(before["predicted_step_s"]), duration(after["predicted_step_s"])
    if not values.get("predicted_gain_s"):
        return f"{before_s} -> {after_s} (predicted)"
    arranged = _arrangement_of(before) != _arrangement_of(after)
    cached = before["cache_level"] != after["cache_level"]
    what = " and ".join(["new arrangement"] * arranged + ["cache"] * cached) or "fewer layers"
    stay_s = duration(after["predicted_step_s"] + values["predicted_gain_s"] / values["num_steps_left"])
    return f"frozen blocks alone {before_s} -> {stay_s}; {what} {stay_s} -> {after_s} (predicted)"


def _arrangement_of(plan: Values) -> tuple[Any, ...]:
    """Returns all that decides who computes what, but for the layers that the cache replaces."""
    last_layers = [last for _, last in plan["stages"]]
    others = ("mesh", "stages_per_rank", "chunk_bytes", "sharded")  # which older runs do not name
    fixed = plan["num_replicas"], plan["num_microbatches"], plan["schedule"]
    return last_layers, *fixed, *(plan.get(name) for name in others)


def _time_taken(values: Values) -> str:
    """Returns the seconds of a transition, and of its parts that count."""
    seconds = values["seconds"]
    parts = {name.removesuffix("_seconds"): value for name, value in values.items() if name.endswith("_seconds")}
    shown = [f"{part} {duration(part_s)}" for part, part_s in parts.items() if part_s >= SMALL_SHARE * seconds]
    return f"{duration(seconds)} ({', '.join(shown)})" if shown else duration(seconds)


def cache_plan_line(values: Values) -> str:
    """Returns what a fill of the cache is about to take, where its bytes go, and when it has paid back."""
    room = " and ".join(f"{byte_size(size)} of {tier}" for tier, size in values["bytes_by_tier"].items())
    where = f" in {values['folder']}" if values["folder"] else ""
    passes = "" if values["passes"] is None else number(values["passes"], 2)
    over = f"paid back after {passes} {'pass' if passes == '1' else 'passes'} over them"
    back = over if passes else "reading is no faster"
    work = f"{plural(values['num_samples'], 'sample')} in about {duration(values['seconds'])}"
    return f"cache: stores the output of block {values['to_level']}, {room}{where}: {work}, {back}"


def cache_fill_line(values: Values) -> str:
    source = f"block {values['from_level']} (cached)" if values["from_level"] else "the input"
    work = f"{plural(values['num_samples'], 'sample')}, {byte_size(values['bytes'])}, {duration(values['seconds'])}"
    if values["num_found"]:
        work += f"; {plural(values['num_found'], 'sample')} were there from an earlier run"
    return f"cache at step {values['step']:,}: output of block {values['to_level']} from {source}: {work}"


def evaluation_line(values: Values) -> str:
    amount = f"{plural(values['num_samples'], 'sample')} in {duration(values['seconds'])}"
    return f"{values['split']} at step {values['step']:,}: {named_values(values['metrics'])} ({amount})"
