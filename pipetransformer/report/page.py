"""Pages of HTML that need no other file: of one run, and of several side by side."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from pipetransformer.errors import UserError
from pipetransformer.report import figures, summary_text, text
from pipetransformer.report.comparison import COLUMNS, CONFIDENCE, Arm, errors, keep_file
from pipetransformer.report.decisions import DECISION_COLUMNS, decision_rows
from pipetransformer.report.figures import Drawing, Subject
from pipetransformer.report.format import byte_size, duration, grid, plural
from pipetransformer.report.run_folder import Run, read_run
from pipetransformer.report.style import DPI

MAX_LAYERS = 10_000
MAX_UNWRAPPED = 32  # characters of a cell
FIGURES, COMPARISONS = figures.OF_A_RUN, figures.OF_ARMS
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
"""Content security policy: a browser refuses whatever would come from anywhere but the page."""
BEGINNING = (
    '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
    f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
)
"""Beginning of every page, by which one is told from a file of the user's."""
STYLE = """
body { font-family: system-ui, sans-serif; line-height: 1.45; max-width: 62rem; margin: 2rem auto; padding: 0 1rem;
  color: #1a1a1a; background: white; }
h1 { margin-bottom: 0.3rem; } h2 { margin: 2.2rem 0 0.6rem; border-bottom: 1px solid #ddd; padding-bottom: 0.2rem; }
nav a { margin-right: 1rem; white-space: nowrap; } figure { margin: 1rem 0; overflow-x: auto; }
img { display: block; width: 100%; min-width: 34rem; height: auto; }
figcaption, .note { color: #555; font-size: 0.9rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: 0.9rem; margin: 0.5rem 0; }
th, td { padding: 0.2rem 1.2rem 0.2rem 0; text-align: left; vertical-align: top; }
td { overflow-wrap: anywhere; } th { font-weight: 600; } th[scope=row] { white-space: nowrap; }
.grid th, .grid td { border-bottom: 1px solid #e5e5e5; padding-right: 0.9rem; } .grid td { white-space: nowrap; }
.grid td.words { white-space: normal; min-width: 14rem; }
summary { cursor: pointer; padding: 0.3rem 0; overflow-wrap: anywhere; }
"""
INTERVAL = (
    f"Runs of an arm differ by their seed alone: the mean of those that completed, where there are any, ± half its "
    f"{CONFIDENCE:.0%} interval (Student's t)."
)
TRANSITION_COLUMNS = (
    "step", "frozen", "stages x replicas", "cached", "moved", "took", "choosing", "filling", "groups", "moving",
    "rebuilding", "gain", "cost",
)  # fmt: skip
FILL_COLUMNS = ("step", "block", "from block", "samples", "found", "stored", "took")


def page(run: Run) -> str:
    """Returns a page with settings, figures, decisions, transitions and summary, without links to other files."""
    title = _title(run)
    return _document(title, [*_sections(run)])


def comparison_page(arms: Sequence[Arm]) -> str:
    """Returns a page with the table and figures of several runs, and the parts of each arm's first run to unfold."""
    titles = dict.fromkeys(_title(run) for arm in arms for run in arm.started)
    table = _grid([COLUMNS, *(arm.row() for arm in arms)]) + f'<p class="note">{INTERVAL}</p>'
    failed = [("Errors", _table(errors(arms)))] if errors(arms) else []
    parts = [("Runs", table), *failed, *_drawn_sections(COMPARISONS, arms)]
    details = [_details(f"{arm.name}: {arm.started[0].folder}", _of_one(arm.started[0])) for arm in arms if arm.started]
    return _document(", ".join(titles) or "runs", [*parts, ("First run of each arm", "".join(details))])


def _title(run: Run) -> str:
    return f"{run.start['model']} on {run.start['dataset']}"


def _document(title: str, sections: Sequence[tuple[str, str]]) -> str:
    links = " ".join(f'<a href="#{_anchor(heading)}">{escape(heading)}</a>' for heading, _ in sections)
    body = "\n".join(
        f'<section><h2 id="{_anchor(heading)}">{escape(heading)}</h2>\n{content}</section>'
        for heading, content in sections
    )
    head = (
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style>"
    )
    return f"{BEGINNING}{head}</head>\n<body><h1>{escape(title)}</h1>\n<nav>{links}</nav>\n{body}\n</body></html>\n"


def _anchor(heading: str) -> str:
    return "-".join(heading.lower().split())


def _of_one(run: Run) -> str:
    """Returns the parts of a run among several, below smaller headings."""
    with undamaged(run.folder):
        return "".join(f"<h3>{escape(heading)}</h3>\n{content}" for heading, content in _sections(run))


def _sections(run: Run) -> Iterator[tuple[str, str]]:
    """Yields the headings of a run's page, each with its content."""
    if run.summary:
        yield "In short", _table(summary_text.summary_rows(run.summary))
    resumed = [_details(text.resume_line(each), _table(text.start_rows(each))) for each in run.events["resume"]]
    yield "Setting", _table(text.start_rows(run.start)) + "".join(resumed)
    tables = {
        figures.DECISIONS: _decisions(run),
        figures.TRANSITIONS: _transitions(run),
        figures.CACHE: _cache(run),
        figures.SPEED: _plans(run),
    }
    drawn = dict(_drawn_sections(FIGURES, run))
    for heading in dict.fromkeys([*drawn, *tables]):
        yield heading, drawn.get(heading, "") + tables.get(heading, "")


def _drawn_sections(drawings: Sequence[Drawing[Subject]], subject: Subject) -> Iterator[tuple[str, str]]:
    for section in dict.fromkeys(drawing.section for drawing in drawings):
        own = [drawing for drawing in drawings if drawing.section == section]
        yield section, "".join(_figure(drawing, subject) for drawing in own)


def _figure(drawing: Drawing[Subject], subject: Subject) -> str:
    """Returns a figure as an image inside the page, or why there is none."""
    figure = drawing.draw(subject)
    if figure is None:
        return f'<p class="note">{escape(drawing.absent)}</p>'
    caption = f"<figcaption>{escape(drawing.caption)}</figcaption>" if drawing.caption else ""
    return f"<figure>{_image(figure, drawing.name.replace('_', ' '))}{caption}</figure>"


def _image(figure: Figure, name: str) -> str:
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=1.5 * DPI)  # sharp on dense screens
    width, height = (round(DPI * inches) for inches in figure.get_size_inches())
    source = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return f'<img alt="{escape(name)}" width="{width}" height="{height}" src="{source}">'


def _decisions(run: Run) -> str:
    if not run.events["decision"]:
        return ""
    rows = [[*map(_cell, row)] for row in decision_rows(run.events["decision"])]
    return _grid([[name.replace("_", " ").replace("num ", "") for name in DECISION_COLUMNS], *rows])


def _cell(value: Any) -> str:
    return {True: "yes", False: ""}.get(value, str(value)) if isinstance(value, bool) else str(value)


def _transitions(run: Run) -> str:
    """Returns the transitions in a table, and each in words to unfold."""
    transitions = run.events["transition"]
    if not transitions:
        return ""
    words = []
    for each in transitions:
        changes = [(label, f"{old} -> {new}") for label, old, new in text.transition_changes(each)]
        rows = [*changes, *text.transition_rows(each, run.world_size(each["time"]))]
        words.append(_details(text.transition_title(each), _table(rows)))
    note = '<p class="note">Gain until the end of the run, and cost, as they were predicted.</p>'
    return _grid([TRANSITION_COLUMNS, *map(_transition_row, transitions)]) + note + "".join(words)


def _transition_row(each: dict[str, Any]) -> list[str]:
    before, after = each["before"], each["after"]
    parts = [each.get(f"{part}_seconds") for part in ("plan", "fill", "group", "move", "rebuild")]
    return [
        f"{each['step']:,}",
        f"{before['num_frozen']} -> {after['num_frozen']}",
        grid(after),
        str(after["cache_level"] or "-"),
        f"{byte_size(each['bytes_moved'])} in {plural(each['num_moves'], 'move')}" if each["bytes_moved"] else "-",
        *map(duration, [each["seconds"], *parts, each.get("predicted_gain_s"), each.get("predicted_cost_s")]),
    ]


def _cache(run: Run) -> str:
    """Returns hits and waiting of the cache, and its fills in a table."""
    found, fills = run.summary.get("cache"), run.events["cache_fill"]
    rows = [
        [
            f"{each['step']:,}",
            str(each["to_level"]),
            str(each["from_level"] or "-"),
            f"{each['num_samples']:,}",
            f"{each['num_found']:,}",
            byte_size(each["bytes"]),
            duration(each["seconds"]),
        ]
        for each in fills
    ]
    in_all = _table([("in all", summary_text.cache_reads(found))]) if found else ""
    return in_all + (_grid([FILL_COLUMNS, *rows]) if rows else "")


def _plans(run: Run) -> str:
    plans = run.summary.get("plans", [])
    return _grid([summary_text.PLAN_COLUMNS, *map(summary_text.plan_row, plans)]) if plans else ""


def read_page(folder: Path) -> str:
    """Reads a run folder and returns its page.

    Raises:
        UserError: The folder holds no run, or values that a run does not write.
    """
    run = read_run(folder)
    check_values(run)
    with undamaged(folder):
        return page(run)


def check_place(file: Path) -> None:
    """Keeps a file of the user's where a page is to be written.

    Raises:
        UserError: The name does not end in ``.html``, or the file is there and is no page of this package.
    """
    if file.suffix != ".html":
        raise UserError(f"{file} does not end in .html, as the page of a run does; give out=<name>.html")
    keep_file(file, BEGINNING, "page")


def check_values(run: Run) -> None:
    """Raises UserError for a run whose plans or figures have values that a run does not write."""
    with undamaged(run.folder):
        if run.has_started:
            _check_layers(run)
        Arm("", (run,)).row()


@contextmanager
def undamaged(name: object) -> Iterator[None]:
    """Raises UserError for values that a run does not write, where the code inside stumbles over them."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        if isinstance(error, UserError):
            raise
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise UserError(f"{name} holds values that a run does not write ({reason}); its files are damaged") from error


def _check_layers(run: Run) -> None:
    """Raises UserError for plans with more layers, each of which is drawn, than a model has."""
    for step, plan in run.plans:
        if not all(0 <= layer < MAX_LAYERS for stage in plan["stages"] for layer in stage):
            raise UserError(f"the plan from step {step} has layers beyond {MAX_LAYERS}")


def _details(label: str, content: str) -> str:
    return f"<details><summary>{escape(label)}</summary>\n{content}</details>\n"


def _table(rows: Iterable[Sequence[str]]) -> str:
    """Returns a table of labels, each with its words."""
    cells = (f'<th scope="row">{escape(label)}</th><td>{escape(words)}</td>' for label, words in rows)
    return _wide("<table>" + "".join(f"<tr>{row}</tr>" for row in cells) + "</table>")


def _grid(rows: Sequence[Sequence[str]]) -> str:
    """Returns a table whose first row names its columns."""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in rows[0])
    cells = ("".join(map(_grid_cell, row)) for row in rows[1:])
    body = "".join(f"<tr>{row}</tr>" for row in cells)
    return _wide(f'<table class="grid"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>')


def _grid_cell(cell: str) -> str:
    """Returns a cell, which wraps where it holds many words."""
    return f'<td class="words">{escape(cell)}</td>' if len(cell) > MAX_UNWRAPPED else f"<td>{escape(cell)}</td>"


def _wide(table: str) -> str:
    return f'<div class="wide">{table}</div>\n'
