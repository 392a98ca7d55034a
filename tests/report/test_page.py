"""The page of a run."""

import re
from pathlib import Path

import pytest

from pipetransformer.errors import UserError
from pipetransformer.report import __main__
from pipetransformer.report import page as pages
from pipetransformer.report.__main__ import main
from pipetransformer.report.event_log import EVENT_LOG, SUMMARY
from pipetransformer.report.figures import OF_A_RUN
from pipetransformer.report.run_folder import read_run


def test_the_page_holds_figures_transitions_and_summary(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(run_folder)])
    file = run_folder / "report.html"
    assert capsys.readouterr().out == f"{file}\n"
    html = file.read_text()
    assert html.count("data:image/png;base64,") == len(OF_A_RUN)
    assert "freeze at step 16: 2 -&gt; 4 blocks, new arrangement" in html
    assert "2.0 times the best static plan" in html
    assert not re.search(r"(href|src)=\"(?!data:|#)", html), "it needs no other file"
    links, anchors = re.findall(r'href="#([^"]*)"', html), re.findall(r'<h2 id="([^"]*)"', html)
    assert links == anchors


def rows_of(html: str, *columns: str) -> list[list[str]]:
    """The rows of the table whose first columns these are."""
    head = "".join(f'<th scope="col">{column}</th>' for column in columns)
    body = html.partition(head)[2].partition("<tbody>")[2].partition("</tbody>")[0]
    return [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", body)]


def test_decisions_transitions_and_fills_stand_in_tables(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "FIGURES", ())
    html = pages.page(read_run(run_folder))
    reason = "at most a third of the active blocks"
    assert rows_of(html, "step", "decision", "bound") == [
        ["8", "freeze", "cap", reason, "0", "2", ""],
        ["16", "freeze", "cap", reason, "2", "4", ""],
    ]
    assert [row[:6] for row in rows_of(html, "step", "frozen", "stages x replicas")] == [
        ["8", "0 -&gt; 2", "2 x 2", "-", "3 MiB in 5 moves", "1.9 s"],
        ["16", "2 -&gt; 4", "1 x 4", "4", "3 MiB in 5 moves", "1.9 s"],
    ]
    assert rows_of(html, "step", "block", "from block") == [["16", "4", "-", "512", "0", "16 MiB", "3.2 s"]]


def test_what_a_run_does_not_have_is_said_in_words(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = [drawing for drawing in OF_A_RUN if drawing.name in ("signals", "timeline")]
    monkeypatch.setattr(pages, "FIGURES", missing)
    for trace in run_folder.glob("trace_*.json"):
        trace.unlink()
    run = read_run(run_folder)
    run.events["decision"].clear()
    html = pages.page(run)
    assert "<img" not in html
    assert all(drawing.absent in html for drawing in missing)


def test_a_damaged_trace_ends_in_one_line(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "FIGURES", [drawing for drawing in OF_A_RUN if drawing.name == "timeline"])
    (run_folder / "trace_1.json").write_text('{"traceEvents": [{"ph": "X", "cat": "forward"}]}')
    with pytest.raises(UserError, match="its files are damaged"):
        pages.read_page(run_folder)


def test_the_page_of_a_run_that_goes_on_has_no_summary(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "FIGURES", ())
    assert "In short" in pages.page(read_run(run_folder))
    (run_folder / SUMMARY).unlink()
    assert "In short" not in pages.page(read_run(run_folder))


def test_the_page_of_a_resumed_run_has_the_setting_of_each_part(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "FIGURES", ())
    run = read_run(run_folder)
    more = {"step": 24, "checkpoint": "checkpoints/step-24", "num_steps_lost": 3, "epochs": 5, "num_steps": 40}
    run.events["resume"].append(run.start | more)
    html = pages.page(run)
    assert "8 steps per epoch x 3 epochs = 24 steps" in html
    assert "<summary>resumed at step 24 from checkpoints/step-24; 3 steps after it are repeated</summary>" in html
    assert "8 steps per epoch x 5 epochs = 40 steps" in html


def test_page_and_figures_go_where_they_are_asked_for(
    run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "FIGURES", ())
    monkeypatch.setattr(__main__, "OF_A_RUN", OF_A_RUN[3:4])
    main([str(run_folder), f"out={tmp_path / 'elsewhere.html'}", f"figures={tmp_path / 'figures'}"])
    assert (tmp_path / "elsewhere.html").is_file()
    assert sorted(file.name for file in (tmp_path / "figures").iterdir()) == ["devices.png", "devices.svg"]


@pytest.mark.parametrize(
    ("name", "words"), [("precious.csv", "does not end in .html"), ("precious.html", "is no page of this command")]
)
def test_a_page_replaces_no_file_of_the_users(
    name: str, words: str, run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "FIGURES", ())
    precious = tmp_path / name
    precious.write_text("a,b\n1,2\n")
    with pytest.raises(SystemExit, match=rf"{words}.*; .* out=.*$"):
        main([str(run_folder), f"out={precious}"])
    assert precious.read_text() == "a,b\n1,2\n"


def test_a_page_replaces_an_earlier_one(run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "FIGURES", ())
    file = tmp_path / "page.html"
    for _ in range(2):
        main([str(run_folder), f"out={file}"])
    assert file.read_text().startswith(pages.BEGINNING)


def test_the_folder_is_named_as_for_the_other_commands_and_may_have_an_equals_sign(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "FIGURES", ())
    monkeypatch.chdir(run_folder.rename(run_folder.with_name("seed=1")).parent)
    for written in ("run=seed=1", "seed=1"):
        main([written])
        page = Path("seed=1/report.html")
        assert page.is_file()
        page.unlink()


def test_a_folder_without_a_run_ends_in_one_line(run_folder: Path) -> None:
    (run_folder / EVENT_LOG).unlink()
    with pytest.raises(SystemExit, match="is not a run folder"):
        main([str(run_folder)])


def test_names_of_the_user_are_no_markup(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "FIGURES", ())
    run = read_run(run_folder)
    run.start["dataset"] = "<b>birds</b>"
    assert "<b>birds" not in pages.page(run)
