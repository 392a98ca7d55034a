"""Keeps what an experiment measured: ``results.json`` beside its README, and the table inside the README."""

import re
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from pipetransformer.report.environment import environment
from pipetransformer.report.event_log import write_json

BEGIN, END = "<!-- results -->", "<!-- end of results -->"


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a markdown table; the first column is left-aligned, the others right."""
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [header, rule, *rows])


def spread(ratios: Sequence[float]) -> tuple[str, str]:
    """Returns their median, and the least and the most, as cells of a table."""
    return f"{median(ratios):.2f}", f"{min(ratios):.2f}-{max(ratios):.2f}"


def share(shares: Iterable[float | None]) -> str:
    """Returns the median of those that are known as a cell of a table."""
    known = [each for each in shares if each is not None]
    return f"{median(known):.0%}" if known else "-"


def record(folder: Path, results: Any, table: str) -> None:
    """Writes the figures and the environment to ``results.json`` and puts the table between the README's markers.

    Raises:
        ValueError: The folder has no README.md with both markers in order.
    """
    readme = folder / "README.md"
    text = readme.read_text(encoding="utf-8") if readme.is_file() else ""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{readme} has no place for a table; it takes the lines {BEGIN} and {END}")
    readme.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}", encoding="utf-8")
    known = environment()
    packages = {name: version(name) for name in ("torch", "timm", "transformers")}  # also where only they are installed
    file = folder / "results.json"
    write_json(file, {"num_cpus": known["num_cpus"], "packages": packages, "results": results})
    file.write_text(with_numbers_in_line(file.read_text(encoding="utf-8")), encoding="utf-8")


def with_numbers_in_line(text: str) -> str:
    """Returns JSON whose lists of numbers take a line each, so that a person can look through it."""
    return re.sub(r"\[\n([^\[\]{}\"]+?)\n *\]", lambda found: f"[{' '.join(found[1].split())}]", text)


def publish(table: str, results: Any, into: Path | None) -> None:
    """Prints the table, and records it with the results if there is a folder for them.

    Raises:
        ValueError: See :func:`record`.
    """
    print(table)
    if into is not None:
        record(into, results, table)
