"""Pages of HTML that need no other file: of one run, and of several side by side."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from html import escape
from pathlib import Path

from matplotlib.figure import Figure

from pipetransformer.errors import UserError
from pipetransformer.report import comparison_plots, plots, text
from pipetransformer.report.comparison import COLUMNS, CONFIDENCE, Arm
from pipetransformer.report.run_folder import Run, read_run

MAX_LAYERS = 10_000
FIGURES: tuple[Callable[[Run], Figure], ...] = (
    plots.signals,
    plots.stages_over_time,
    plots.throughput,
    plots.loss,
    plots.accuracy,
)
COMPARISONS: tuple[Callable[[Sequence[Arm]], Figure], ...] = (
    comparison_plots.metric_over_time,
    comparison_plots.frozen_over_steps,
    comparison_plots.share_of_limit,
)
STYLE = (
    "body { font-family: sans-serif; max-width: 62rem; margin: 2rem auto; } img { max-width: 100%; } "
    "td, th { padding-right: 1.5rem; text-align: left; vertical-align: top; } summary { cursor: pointer; }"
)
INTERVAL = f"Runs of an arm differ by their seed alone: the mean, ± half its {CONFIDENCE:.0%} interval (Student's t)."


def page(run: Run) -> str:
    """Returns a page with settings, figures, decisions, transitions and summary, without links to other files."""
    title = _title(run)
    return _document(title, [f"<h1>{escape(title)}</h1>", *_parts(run)])


def comparison_page(arms: Sequence[Arm]) -> str:
    """Returns a page with the table and figures of several runs, and the parts of each arm's first run to unfold."""
    title = ", ".join(dict.fromkeys(_title(run) for arm in arms for run in arm.runs))
    parts = [f"<h1>{escape(title)}</h1>", _table([COLUMNS, *(arm.row() for arm in arms)]), f"<p>{INTERVAL}</p>"]
    parts += [_image(figure(arms)) for figure in COMPARISONS]
    for arm in arms:
        label = escape(f"{arm.name}: {arm.runs[0].folder}")
        parts.append(f"<details><summary>{label}</summary>{''.join(_parts(arm.runs[0]))}</details>")
    return _document(title, parts)


def _title(run: Run) -> str:
    return f"{run.start['model']} on {run.start['dataset']}"


def _document(title: str, parts: Iterable[str]) -> str:
    body = "\n".join(parts)
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>'
    return f"<!doctype html>{head}\n{body}\n"


def _parts(run: Run) -> list[str]:
    """Returns settings, figures, transitions and summary of a run."""
    parts = [_table(text.start_rows(run.start)), *(_image(figure(run)) for figure in FIGURES)]
    for transition in run.events["transition"]:
        changes = [(label, f"{old} -> {new}") for label, old, new in text.transition_changes(transition)]
        rows = [*changes, *text.transition_rows(transition, run.start["world_size"])]
        parts.append(f"<h2>{escape(text.transition_title(transition))}</h2>{_table(rows)}")
    if run.summary:
        plans = [text.PLAN_COLUMNS, *map(text.plan_row, run.summary.get("plans", []))]
        parts.append(f"<h2>summary</h2>{_table(text.summary_rows(run.summary))}<h2>plans</h2>{_table(plans)}")
    return parts


def read_page(folder: Path) -> str:
    """Reads a run folder and returns its page.

    Raises:
        UserError: The folder holds no run, or values that a run does not write.
    """
    run = read_run(folder)
    with undamaged(folder):
        check_layers(run)
        return page(run)


@contextmanager
def undamaged(name: object) -> Iterator[None]:
    """Raises UserError for values that a run does not write, where the code inside stumbles over them."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise UserError(f"{name} holds values that a run does not write ({reason}); its files are damaged") from error


def check_layers(run: Run) -> None:
    """Raises UserError for plans with more layers, each of which is drawn, than a model has."""
    for step, plan in run.plans:
        if not all(0 <= layer < MAX_LAYERS for stage in plan["stages"] for layer in stage):
            raise UserError(f"the plan from step {step} has layers beyond {MAX_LAYERS}")


def _table(rows: Iterable[Sequence[str]]) -> str:
    cells = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows)
    return "<table>" + "".join(f"<tr>{row}</tr>" for row in cells) + "</table>"


def _image(figure: Figure) -> str:
    """Returns a figure as an image inside the page."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=110)
    return f'<p><img src="data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"></p>'
