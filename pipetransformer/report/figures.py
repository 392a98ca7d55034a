"""All figures of a run and of a comparison, in the order of the page, and their files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from matplotlib.figure import Figure

from pipetransformer.report import comparison_plots, plots, style, system_plots
from pipetransformer.report.comparison import CONFIDENCE, Arm
from pipetransformer.report.run_folder import Run

Subject = TypeVar("Subject")
OF_SAMPLES = f"bars are the {CONFIDENCE:.0%} interval that the number of samples gives (Wilson)"
OF_SEEDS = f"bands are the {CONFIDENCE:.0%} interval of the mean over runs (Student's t)"


@dataclass(frozen=True)
class Drawing(Generic[Subject]):
    """A figure of the page.

    Attributes:
        name: Of its files.
        section: Heading under which it stands.
        draw: Returns ``None`` where there is nothing to show.
        caption: What is to be seen in it.
        absent: Stands in its place where there is nothing to show.
    """

    name: str
    section: str
    draw: Callable[[Subject], Figure | None]
    caption: str
    absent: str


def _result(run: Run) -> Figure | None:
    return comparison_plots.metric_over_time([Arm("this run", (run,))])


RESULT, DECISIONS, PLANS, TRANSITIONS, SPEED, CACHE, STEP, LEARNING = (
    "Result over time", "Decisions", "Stages and replicas", "Transitions", "Speed and limit", "Cache",
    "A step on each device", "Loss and metrics",
)  # fmt: skip
NOT_EVALUATED = "No evaluation was made."
OF_A_RUN: tuple[Drawing[Run], ...] = (
    Drawing(
        "result_over_time", RESULT, _result, f"Time of training, transitions and fills; {OF_SAMPLES}.", NOT_EVALUATED
    ),
    Drawing(
        "signals", DECISIONS, plots.signals,
        "What the policy saw of each block between two decisions; blocks below the line are frozen, blank ones gave no "
        "gradient.", "The policy measured nothing.",
    ),
    Drawing(
        "stages_over_time", PLANS, plots.stages_over_time,
        "Which stage has which layer; frozen layers have left the pipeline, cached ones are not even computed.", "",
    ),
    Drawing("devices", PLANS, plots.devices, "Equal numbers lie on each other.", ""),
    Drawing(
        "transitions", TRANSITIONS, system_plots.transitions,
        "What each transition took, and what it moved.", "The run made no transition.",
    ),
    Drawing(
        "throughput", SPEED, plots.throughput,
        "Each step, and the median under each plan; dotted lines are transitions.", "",
    ),
    Drawing(
        "step_parts", SPEED, system_plots.step_parts,
        "Bars are predicted from the measured layers; layers, launches and cache reads are those of all devices over "
        "their number.",
        "The run has not ended yet, or is of an earlier release.",
    ),
    Drawing(
        "gain", SPEED, system_plots.gain,
        "The limit is what the same freeze decisions could gain without communication and waiting.",
        "The run was the best static plan from start to end, made no step, or has not ended yet.",
    ),
    Drawing(
        "cache", CACHE, system_plots.cache,
        "The block whose output is read in place of computing it, what is stored, and how long steps waited for it.",
        "No step read from the cache.",
    ),
    Drawing(
        "timeline", STEP, system_plots.timeline,
        "F and B are the forward and backward passes of a micro-batch; blank is waiting, or the loading of the batch. "
        "trace_*.json in the run's folder open in ui.perfetto.dev.",
        "The run was not traced; trace=true traces a step of each plan.",
    ),
    Drawing("loss", LEARNING, plots.loss, "Dotted lines are transitions, which must not show in the loss.", ""),
    Drawing("metrics", LEARNING, plots.metrics, "", NOT_EVALUATED),
)  # fmt: skip
OF_ARMS: tuple[Drawing[Sequence[Arm]], ...] = (
    Drawing(
        "result_over_time", RESULT, comparison_plots.metric_over_time,
        f"Time of training, transitions and fills. Of several runs: {OF_SEEDS}; of one: {OF_SAMPLES}.", NOT_EVALUATED,
    ),
    Drawing(
        "gain", SPEED, comparison_plots.gain, "Thin marks are single runs.",
        "No run that was other than the best static plan made a step and has ended.",
    ),
    Drawing(
        "plans_over_steps", PLANS, comparison_plots.plans_over_steps, "Equal numbers lie on each other.",
        "No run came to its first plan.",
    ),
    Drawing("cache", CACHE, comparison_plots.cache, "Thin marks are single runs.", "No run read from the cache."),
)  # fmt: skip


def save_all(drawings: Iterable[Drawing[Subject]], subject: Subject, folder: Path) -> Iterator[Path]:
    """Writes each figure that has something to show as PNG and SVG, and yields the files."""
    for drawing in drawings:
        figure = drawing.draw(subject)
        if figure is not None:
            yield from style.save(figure, folder, drawing.name)
