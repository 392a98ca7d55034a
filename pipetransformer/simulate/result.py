"""The result of a simulated run: a row per plan, its speed-up over arrangements that never change, and its table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pipetransformer.report.format import duration
from pipetransformer.report.summary_text import time_spent
from pipetransformer.report.trace import Event


@dataclass(frozen=True)
class PlanRow:
    """One plan in force.

    Attributes:
        epoch: Where it begins.
        schedule: The schedule, with everything that goes beyond one stage per device and stored activations.
        bubble: Share of the pipeline's time in which devices wait.
        memory_gib: Of the device that needs most.
    """

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
class SimulationResult:
    """A simulated run.

    Attributes:
        setting: What was simulated: labels (model, data, devices, and what is made up) with words.
        rows: A row for each plan of the run.
        static: The best plan that never freezes.
        pipeline: The static pipeline to compare with; ``None`` where it does not fit, and ``no_pipeline`` says why.
        train_seconds: Steps, transitions and cache filling.
        speedup_vs_static, speedup_vs_pipeline: Times of the two over that of the run.
        limit, share_of_limit: See :mod:`pipetransformer.autopipe.limit`.
        time_parts: Seconds of the run by what they go to, see :mod:`pipetransformer.autopipe.breakdown`.
        traces: The events of one step under each plan.
    """

    setting: tuple[tuple[str, str], ...]
    rows: tuple[PlanRow, ...]
    static: PlanRow
    pipeline: PlanRow | None
    no_pipeline: str
    train_seconds: float
    mean_frozen_fraction: float
    speedup_vs_static: float
    speedup_vs_pipeline: float | None
    limit: float
    share_of_limit: float
    time_parts: dict[str, float]
    traces: tuple[list[Event], ...]

    def as_dict(self) -> dict[str, Any]:
        """Returns everything but the traces as plain values."""
        return {name: value for name, value in asdict(self).items() if name != "traces"}

    def header(self) -> str:
        """Returns a line for each entry of ``setting``."""
        return "\n".join(f"{label:10}{words}" for label, words in self.setting)

    def table(self) -> str:
        """Returns a Markdown table: a line for each plan of the run and for the static ones it is compared with."""
        named = [(str(number), row) for number, row in enumerate(self.rows)]
        named.append(("static", self.static))
        if self.pipeline is not None:
            named.append(("pipeline", self.pipeline))
        return _aligned([HEADER, *(_cells(name, row) for name, row in named)])

    def summary(self) -> str:
        """Returns the run as a whole, a line for each figure."""
        lines = [
            f"training time                      {duration(self.train_seconds)}",
            f"goes to                            {time_spent(vars(self))}",
            f"mean frozen fraction               {self.mean_frozen_fraction:.0%}",
            f"speed-up over best static plan     {self.speedup_vs_static:.2f}",
        ]
        if self.speedup_vs_pipeline is not None:
            lines.append(f"speed-up over static pipeline      {self.speedup_vs_pipeline:.2f}")
        lines.append(f"limit of these freeze decisions    {self.limit:.2f}")
        lines.append(f"share of the limit                 {self.share_of_limit:.0%}")
        if self.no_pipeline:
            lines.append(f"no static pipeline to compare with: {self.no_pipeline}")
        return "\n".join(lines)


HEADER = ("plan", "epoch", "frozen", "cached", "layout", "micro", "schedule", "bubble", "samples/s", "GiB")
LEGEND = "layout: stages x replicas; micro: micro-batches; GiB: of the device that needs most"


def _cells(name: str, row: PlanRow) -> tuple[str, ...]:
    return (
        name,
        f"{row.epoch:g}",
        f"{row.num_frozen}",
        f"{row.cache_level}",
        f"{row.num_stages} x {row.num_replicas}",
        f"{row.num_microbatches}",
        row.schedule,
        f"{row.bubble:.0%}",
        f"{row.samples_per_second:,.0f}",
        f"{row.memory_gib:.2f}",
    )


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [_joined(row, widths) for row in rows]
    return "\n".join([lines[0], _joined(["-" * width for width in widths], widths), *lines[1:]])


def _joined(cells: Iterable[str], widths: Sequence[int]) -> str:
    return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"
