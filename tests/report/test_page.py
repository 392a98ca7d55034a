"""The page of a run."""

import re
from pathlib import Path

import pytest

from pipetransformer.report.__main__ import main
from pipetransformer.report.page import page
from pipetransformer.report.run_folder import EVENT_LOG, SUMMARY, read_run


def test_the_page_holds_figures_transitions_and_summary(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(run_folder)])
    file = run_folder / "report.html"
    assert capsys.readouterr().out == f"{file}\n"
    html = file.read_text()
    assert html.count("data:image/png;base64,") == 5
    assert "freeze at step 16: 2 -&gt; 4 blocks, new arrangement" in html
    assert "2.0 times the best static plan" in html
    assert not re.search(r"(href|src)=\"(?!data:)", html), "it needs no other file"


def test_the_page_of_a_run_that_goes_on_has_no_summary(run_folder: Path) -> None:
    (run_folder / SUMMARY).unlink()
    assert "<h2>summary</h2>" not in page(read_run(run_folder))


def test_the_page_goes_where_it_is_asked_for(run_folder: Path, tmp_path: Path) -> None:
    main([str(run_folder), f"out={tmp_path / 'elsewhere.html'}"])
    assert (tmp_path / "elsewhere.html").is_file()


def test_a_folder_without_a_run_ends_in_one_line(run_folder: Path) -> None:
    (run_folder / EVENT_LOG).unlink()
    with pytest.raises(SystemExit, match="is not a run folder"):
        main([str(run_folder)])


def test_names_of_the_user_are_no_markup(run_folder: Path) -> None:
    run = read_run(run_folder)
    run.start["dataset"] = "<b>birds</b>"
    assert "<b>birds" not in page(run)
