"""The charts of a run in a tracking service: the values of each event by the names of their charts."""

from __future__ import annotations

from pipetransformer.report.reporter import EventName, Values

STEP_SECTIONS = {
    "num_frozen": "topology",
    "num_stages": "topology",
    "num_replicas": "topology",
    "cache_level": "topology",
    "step_seconds": "throughput",
    "samples_per_second": "throughput",
    "cache_wait_seconds": "cache",
    "input_wait_seconds": "throughput",
}


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
        names = ("seconds", "bytes_moved", "num_moves", "predicted_gain")
        return {f"transition/{name}": values[name] for name in names}
    if event == "cache_fill":
        return {
            f"cache_fill/{name}": values[name] for name in ("to_level", "num_samples", "num_found", "seconds", "bytes")
        }
    if event == "evaluate":
        return {f"{values['split']}/{name}": value for name, value in values["metrics"].items()}
    return {}
