"""The outcome of a simulated run in words and numbers, as Markdown."""

from collections.abc import Iterable, Sequence

from pipetransformer.report.units import duration
from pipetransformer.simulate.result import Outcome, Row

HEADER = (
    "plan",
    "epoch",
    "frozen",
    "cached",
    "stages x replicas",
    "micro-batches",
    "schedule",
    "bubble",
    "samples/s",
    "GiB per device",
)


def table(outcome: Outcome) -> str:
    """A line for each plan of the run, and for the two static ones that it is compared with."""
    named = [(str(number), row) for number, row in enumerate(outcome.rows)]
    named.append(("best static", outcome.static))
    if outcome.pipeline is not None:
        named.append(("static pipeline", outcome.pipeline))
    return _aligned([HEADER, *(_cells(name, row) for name, row in named)])


def summary(outcome: Outcome) -> str:
    """The run as a whole."""
    lines = [
        f"training time                      {duration(outcome.train_seconds)}",
        f"mean frozen fraction               {outcome.mean_frozen_fraction:.0%}",
        f"speed-up over best static plan     {outcome.speedup_vs_static:.2f}",
    ]
    if outcome.speedup_vs_pipeline is not None:
        lines.append(f"speed-up over static pipeline      {outcome.speedup_vs_pipeline:.2f}")
    lines.append(f"limit of these freeze decisions    {outcome.limit:.2f}")
    lines.append(f"share of the limit                 {outcome.share_of_limit:.0%}")
    if outcome.no_pipeline:
        lines.append(f"no static pipeline to compare with: {outcome.no_pipeline}")
    return "\n".join(lines)


def _cells(name: str, row: Row) -> tuple[str, ...]:
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
    lines = [_line(row, widths) for row in rows]
    return "\n".join([lines[0], _line(["-" * width for width in widths], widths), *lines[1:]])


def _line(cells: Iterable[str], widths: Sequence[int]) -> str:
    return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"
