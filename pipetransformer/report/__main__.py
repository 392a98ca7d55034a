"""The command ``pipetransformer-report``: one run as a page of HTML, or several side by side."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path

from pipetransformer.errors import INTERRUPTED, UserError, without_number
from pipetransformer.report.comparison import Arm, check_csv, find_runs, read_arms, write_csv
from pipetransformer.report.figures import OF_A_RUN, OF_ARMS, save_all
from pipetransformer.report.page import check_place, check_values, comparison_page, read_page, undamaged
from pipetransformer.report.run_folder import patterns, read_run
from pipetransformer.report.sweep import print_arms

PAGE, COMPARISON, CSV = "report.html", "comparison.html", "comparison.csv"
HELP = f"""\
Writes one run as a page of HTML, or compares several: a table here, and the same with figures as a page and a CSV file.

  pipetransformer-report outputs/2026-01-31/12-00-00
  pipetransformer-report runs=multirun/2026-01-31/12-00-00
  pipetransformer-report runs=outputs/a,'outputs/2026-01-*' out=comparison figures=comparison/figures

  <folder>        the folder of one run, also as run=<folder>; the page is <folder>/{PAGE}
  runs=<folders>  folders that hold runs, at any depth, or globs, separated by commas; runs that differ by their seed
                  alone are one row, with the mean and its interval
  out=<path>      the page of one run, <name>.html; of several the folder of {COMPARISON} and {CSV}, by
                  default the first of runs=
  figures=<path>  a folder for every figure of the page, each as PNG and as SVG"""
OPTIONS = ("run", "runs", "out", "figures")


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs ``pipetransformer-report``."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or {"-h", "--help"} & {*given}:
        print(HELP)
        return
    try:
        _run(given)
    except UserError as error:
        sys.exit(str(error))
    except OSError as error:
        sys.exit(f"{without_number(error)}; name another place by out=")
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def _run(given: Sequence[str]) -> None:
    options, folders = dict[str, str](), list[str]()
    for each in given:
        name, is_option, value = each.partition("=")
        if is_option and name in OPTIONS:
            options[name] = value
        elif each.startswith("-") or (is_option and name.isidentifier() and not Path(each).exists()):
            raise UserError(_unknown(each))
        else:
            folders.append(each)
    folders += [options["run"]] if "run" in options else []
    if len(folders) + ("runs" in options) != 1:
        raise UserError(f"{' '.join(given)}: give the folder of one run, or runs=<folders or globs> (--help)")
    out, figures = (Path(options[name]) if options.get(name) else None for name in ("out", "figures"))
    if "runs" in options:
        compare(options["runs"], out, figures)
    else:
        write_page(Path(folders[0]), out, figures)


def _unknown(argument: str) -> str:
    """Returns one line about an argument that is no option, with the nearest one."""
    from pipetransformer.config.arguments import unknown_key

    name, _, value = argument.partition("=")
    if not argument.startswith("-"):
        return unknown_key(name, OPTIONS)
    near = get_close_matches(name.lstrip("-"), ("help", *OPTIONS), n=1)
    if near == ["help"]:
        return f"{argument} is not an option; did you mean --help?"
    return f"{argument} is not an option; " + (f"write {near[0]}={value or '<value>'}" if near else "--help lists them")


def write_page(folder: Path, out: Path | None = None, figures: Path | None = None) -> None:
    """Writes a run as a page.

    Args:
        folder: Of the run.
        out: The page; by default a file in the folder.
        figures: A folder for its figures as files; ``None`` writes none.

    Raises:
        UserError: See :func:`~pipetransformer.report.page.read_page` and
            :func:`~pipetransformer.report.page.check_place`.
    """
    file = out or folder / PAGE
    check_place(file)
    content = read_page(folder)
    file.write_text(content, encoding="utf-8")
    print(file)
    if figures is not None:
        print(*save_all(OF_A_RUN, read_run(folder), figures), sep="\n")


def compare(runs: str, out: Path | None = None, figures: Path | None = None) -> None:
    """Prints the table of several runs, and writes it as a page and as a CSV file.

    Args:
        runs: Folders and globs, separated by commas.
        out: A folder; by default the first one that holds runs.
        figures: A folder for the figures as files, each arm's first run below; ``None`` writes none.

    Raises:
        UserError: No run can be read, or see :func:`~pipetransformer.report.page.check_place` and
            :func:`~pipetransformer.report.comparison.check_csv`.
    """
    folders = find_runs(runs)
    arms, problems = read_arms(folders, check_values)
    first = Path(patterns(runs)[0])
    folder = out or (first if first.is_dir() else folders[0].parent)
    check_place(folder / COMPARISON)
    check_csv(folder / CSV)
    with undamaged(runs):
        print_arms(arms)
        content = comparison_page(arms)
    folder.mkdir(parents=True, exist_ok=True)
    write_csv(arms, folder / CSV)
    (folder / COMPARISON).write_text(content, encoding="utf-8")
    print(*(f"left out: {problem}" for problem in problems), folder / CSV, folder / COMPARISON, sep="\n")
    if figures is not None:
        print(*_save_figures(arms, figures), sep="\n")


def _save_figures(arms: Sequence[Arm], folder: Path) -> Iterator[Path]:
    yield from save_all(OF_ARMS, arms, folder)
    for number, arm in enumerate(arms, start=1):
        for run in arm.started[:1]:
            yield from save_all(OF_A_RUN, run, folder / f"arm_{number}")


if __name__ == "__main__":
    main()
