"""Writes a run folder as one page of HTML: ``python -m pipetransformer.report <run folder>``."""

from __future__ import annotations

import argparse
import base64
import io
import sys
from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path

from matplotlib.figure import Figure

from pipetransformer.errors import UserError
from pipetransformer.report import plots, text
from pipetransformer.report.run_folder import Run, read_run

PAGE = "report.html"
MAX_LAYERS = 10_000
FIGURES: tuple[Callable[[Run], Figure], ...] = (
    plots.signals,
    plots.stages_over_time,
    plots.throughput,
    plots.loss,
    plots.accuracy,
)
STYLE = (
    "body { font-family: sans-serif; max-width: 62rem; margin: 2rem auto; } img { max-width: 100%; } "
    "td, th { padding-right: 1.5rem; text-align: left; vertical-align: top; }"
)


def page(run: Run) -> str:
    """Returns a page with settings, figures, decisions, transitions and summary, without links to other files."""
    title = escape(f"{run.start['model']} on {run.start['dataset']}")
    parts = [f"<h1>{title}</h1>", _table(text.start_rows(run.start))]
    parts += [_image(figure(run)) for figure in FIGURES]
    for transition in run.events["transition"]:
        changes = [(label, f"{old} -> {new}") for label, old, new in text.transition_changes(transition)]
        rows = [*changes, *text.transition_rows(transition, run.start["world_size"])]
        parts.append(f"<h2>{escape(text.transition_title(transition))}</h2>{_table(rows)}")
    if run.summary:
        plans = [text.PLAN_COLUMNS, *map(text.plan_row, run.summary.get("plans", []))]
        parts.append(f"<h2>summary</h2>{_table(text.summary_rows(run.summary))}<h2>plans</h2>{_table(plans)}")
    body = "\n".join(parts)
    return f'<!doctype html><meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>\n{body}\n'


def read_page(folder: Path) -> str:
    """Reads a run folder and returns its page.

    Raises:
        UserError: The folder holds no run, or values that a run does not write.
    """
    run = read_run(folder)
    try:
        _check_layers(run)
        return page(run)
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise UserError(f"{folder} holds values that a run does not write ({reason}); its files are damaged") from error


def _check_layers(run: Run) -> None:
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


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m pipetransformer.report", description=__doc__)
    parser.add_argument("folder", type=Path, help="the folder of one run, for example outputs/2026-01-31/12-00-00")
    parser.add_argument("--into", type=Path, help=f"the page; {PAGE} in the folder by default")
    options = parser.parse_args(arguments)
    try:
        content = read_page(options.folder)
    except UserError as error:
        sys.exit(str(error))
    file = options.into or options.folder / PAGE
    file.write_text(content, encoding="utf-8")
    print(file)


if __name__ == "__main__":
    main()
