"""The charts of a run in a tracking service: the values of each event by the names of their charts."""

from __future__ import annotations

from pipetransformer.report.decisions import PARTS
from pipetransformer.report.sinks import EventName, Values

STEP_SECTIONS = {
    "num_frozen": "topology",
    "num_stages": "topology",
    "num_replicas": "topology",
    "num_idle_devices": "topology",
    "cache_level": "topology",
    "step_seconds": "throughput",
    "samples_per_second": "throughput",
    "cache_wait_seconds": "cache",
    "input_wait_seconds": "throughput",
}


GAINS = ("speedup_vs_static", "share_of_limit")
RESULTS = (*GAINS, "limit", "mean_frozen_fraction", "train_seconds")


def step_of(values: Values) -> int:
    """Returns the step of an event; the summary counts as the last one."""
    return values["step"] if "step" in values else values.get("last_step", 0)


def charts(event: EventName, values: Values) -> Values:
    """Returns the values of one event under the names of their charts."""
    if event == "step":
        return {f"{STEP_SECTIONS.get(name, 'train')}/{name}": value for name, value in values.items() if name != "step"}
    if event == "decision":
        norms = {
            f"gradient_norm/block_{block:02d}": norm
            for block, norm in enumerate(values["gradient_norms"], start=1)
            if norm
        }
        signals = {
            f"{name}/block_{block:02d}": number
            for name, numbers in values.get("signals", {}).items()
            if len(numbers) == len(values["gradient_norms"])  # not the shares of prefixes
            for block, number in enumerate(numbers, start=1)
        }
        terms = {f"freeze/{name}": value for name, value in values["terms"].items()}
        frozen = {"freeze/num_frozen": values["num_frozen"], "freeze/bound": values["bound"]}
        return frozen | terms | norms | signals
    if event == "transition":
        names = ("seconds", *(f"{part}_seconds" for part in PARTS), "bytes_moved", "num_moves", "predicted_gain")
        return {f"transition/{name}": values[name] for name in names if name in values}
    if event == "plan_timed":
        return {f"plan/{name}": values[name] for name in ("predicted_step_s", "measured_step_s")}
    if event == "cache_fill":
        return {
            f"cache_fill/{name}": values[name] for name in ("to_level", "num_samples", "num_found", "seconds", "bytes")
        }
    if event == "evaluate":
        return {f"{values['split']}/{name}": value for name, value in values["metrics"].items()}
    if event == "summary":
        return _result(values)
    return {}


def without_idle_gains(summary: Values) -> Values:
    """Returns a summary without the gains of a run that was the best static plan itself.

    It has none over it: its steps would be held against their prediction.
    """
    return {name: value for name, value in summary.items() if not (summary.get("is_static") and name in GAINS)}


def _result(summary: Values) -> Values:
    """Returns how a run ended, in the figures by which runs are compared; without those that it has not."""
    metric, cache, told = summary.get("metric") or {}, summary.get("cache") or {}, without_idle_gains(summary)
    found = {name: told.get(name) for name in RESULTS} | {"cache_hit_rate": cache.get("hit_rate")}
    if metric:
        found[metric["name"]] = metric["value"]
    return {f"result/{name}": value for name, value in found.items() if value is not None}
