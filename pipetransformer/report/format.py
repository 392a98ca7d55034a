"""Numbers with their units, and the progress of a run, for reading."""

from __future__ import annotations

from math import floor, isnan, log10
from typing import Any

from pipetransformer.metric import sign_of

Values = dict[str, Any]

SMOOTHING = 0.1  # weight of the newest step in the time per step


def number(value: float | None, digits: int = 4) -> str:
    return "-" if value is None else f"{value:.{digits}g}"


def two_digits(value: float) -> str:
    """Returns ``0.77``, ``1.6``, ``12``, ``140``: two significant digits, without an exponent from 0.0001 on."""
    if not value:
        return "0"
    decimals = 1 - floor(log10(abs(value)))
    value = round(value, decimals)
    decimals = max(0, 1 - floor(log10(abs(value))))  # 0.996 has become 1.0
    return f"{value:.{decimals}f}"


def duration(seconds: float | None) -> str:
    """Returns ``0.042 ms``, ``42 ms``, ``870 ms``, ``12 s``, ``12m23s``, ``5h07m``."""
    if seconds is None:
        return "-"
    if seconds < 0.995:
        return f"{_short(seconds * 1000)} ms"
    if seconds < 59.5:
        return f"{_short(seconds)} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m{rest:02d}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02d}m"


def _short(value: float) -> str:
    """Returns two significant digits, without a trailing ``.0``."""
    return two_digits(value).removesuffix(".0")


def byte_size(num_bytes: float) -> str:
    """Returns ``1023 bytes``, ``3.29 MiB``, ``388 GiB``."""
    unit = "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if num_bytes < 1024:
            break
        num_bytes, unit = num_bytes / 1024, larger
    return f"{num_bytes:.3g} {unit}" if num_bytes < 999.5 else f"{num_bytes:.0f} {unit}"


def plural(count: int, thing: str) -> str:
    return f"{count:,} {thing}" if count == 1 else f"{count:,} {thing}{'es' if thing.endswith('tch') else 's'}"


def arrangement(plan: Values) -> str:
    """Returns ``2 stages x 4 replicas``, with a mesh ``2 stages x 4 replicas x tp 2``."""
    more = f" x {plan['mesh']}" if plan.get("mesh") else ", sharded" * plan["sharded"]
    if plan.get("chunk_bytes"):
        more += f", {byte_size(plan['chunk_bytes'])} of it on a device at a time"
    return f"{plural(len(plan['stages']), 'stage')} x {plural(plan['num_replicas'], 'replica')}{more}"


def grid(plan: Values) -> str:
    """Returns ``2 x 4``, stages and replicas, with a mesh ``2 x 4 x tp 2``."""
    return " x ".join(filter(None, (str(len(plan["stages"])), replicas(plan))))


def replicas(plan: Values) -> str:
    """Returns ``4``, with a mesh ``4 x tp 2``."""
    return " x ".join(filter(None, (str(plan["num_replicas"]), plan.get("mesh"))))


def num_devices(plan: Values) -> int:
    """Returns the devices that a plan uses."""
    if "num_devices" in plan:  # not in logs of earlier releases
        return plan["num_devices"]
    return len(plan["stages"]) // plan.get("stages_per_rank", 1) * plan["num_replicas"]


class BestMetric:
    """The best value so far of a metric of each split.

    Args:
        best: Where the values are kept, by split; ``None`` keeps them here.
    """

    def __init__(self, best: dict[str, dict[str, Any]] | None = None) -> None:
        self._best = {} if best is None else best

    def update(self, split: str, metrics: dict[str, float], step: int, name: str | None = None) -> bool:
        """Takes an evaluation; returns True where it is the best so far.

        Args:
            name: Of the metric that counts; ``None``: the first one.
        """
        name = name or next(iter(metrics))
        value, known = metrics[name], self._best.get(split)
        is_best = known is None or isnan(known["value"]) or sign_of(name) * (value - known["value"]) > 0
        if is_best:
            self._best[split] = {"name": name, "value": value, "split": split, "step": step}
        return is_best

    def of(self, split: str) -> dict[str, Any] | None:
        """Returns ``name``, ``value``, ``split`` and ``step``; ``None`` before the first evaluation of the split."""
        return self._best.get(split)


class Progress:
    """The progress of a run: how far it is, how long it will still take, and its state.

    Args:
        start: The values of the start event.
    """

    def __init__(self, start: Values) -> None:
        self.num_steps: int = start["num_steps"]
        self.world_size: int = start["world_size"]
        self._epochs: float = start["epochs"]
        self._num_blocks: int = start["num_blocks"]
        self._plan: Values = start["plan"]
        self._step_s: float | None = None
        self._best = BestMetric({**start.get("best", {})})  # of a resumed run
        self._main: dict[str, str | None] = start.get("main_metric", {})
        self._metric = ""

    def step(self, values: Values) -> None:
        newest = values["step_seconds"]
        self._step_s = newest if self._step_s is None else self._step_s + SMOOTHING * (newest - self._step_s)

    def transition(self, values: Values) -> None:
        """Takes up the new plan; its time per step starts anew."""
        self._plan, self._step_s = values["after"], None

    def evaluation(self, values: Values) -> bool:
        """Takes up an evaluation; returns True where it is the best of its split so far."""
        split, metrics = values["split"], values["metrics"]
        wanted = self._main.get("name") if split == self._main.get("split") else None
        is_best = self._best.update(split, metrics, values["step"], wanted)
        best = self._best.of(split)
        assert best is not None
        name, value = best["name"], metrics[best["name"]]
        earlier = "" if is_best else f" (best {number(best['value'])})"
        self._metric = f"{split} {name} {number(value)}{earlier}"
        return is_best

    def left(self, step: int) -> str:
        """Returns ``left 12 s``; empty after the last step and before the first one under a plan."""
        num_left = self.num_steps - step
        return f"left {duration(self._step_s * num_left)}" if self._step_s is not None and num_left else ""

    def status(self, values: Values) -> str:
        """Returns one line about a step event."""
        return "  ".join([*self.learning(values), *self.topology(values)])

    def learning(self, values: Values) -> list[str]:
        """Returns what is learned, and how fast."""
        parts = [
            f"epoch {values['epoch']:.2f}/{self._epochs:g}",
            f"loss {number(values['loss'])}",
            f"{number(values['samples_per_second'], 3)} samples/s",
        ]
        return [*parts, self._metric] if self._metric else parts

    def topology(self, values: Values) -> list[str]:
        """Returns what is frozen, and the arrangement."""
        frozen = f"{values['num_frozen']}/{self._num_blocks} frozen"
        cached = f", {values['cache_level']} cached" if values["cache_level"] else ""
        return [frozen + cached, arrangement(self._plan)]
