"""A table goes between the markers of a README, again and again, and nowhere else."""

import json
from pathlib import Path

import pytest

from experiments.record import BEGIN, END, markdown, publish, record


def test_a_table_has_a_row_for_each_row_and_numbers_to_the_right() -> None:
    assert markdown(["arm", "s"], [("one", "1"), ("two", "2")]).splitlines() == [
        "| arm | s |",
        "| --- | ---: |",
        "| one | 1 |",
        "| two | 2 |",
    ]


def test_the_newest_table_stands_between_the_markers(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{BEGIN}\n{END}\nafter\n")
    record(tmp_path, [1], "old table")
    record(tmp_path, [2], "new table")
    assert readme.read_text() == f"before\n{BEGIN}\nnew table\n{END}\nafter\n"
    assert json.loads((tmp_path / "results.json").read_text())["results"] == [2]


def test_a_list_of_numbers_takes_one_line(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(f"{BEGIN}\n{END}\n")
    results = {"arm": "[ 1, 2 ]", "rounds": [[0.5, -1e-9], [None, 3]], "none": []}
    record(tmp_path, results, "table")
    written = (tmp_path / "results.json").read_text()
    assert json.loads(written)["results"] == results
    assert "[0.5, -1e-09],\n" in written


@pytest.mark.parametrize("text", [None, "no markers", f"{END}\n{BEGIN}\n"])
def test_a_readme_without_a_place_for_the_table_is_refused_untouched(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "README.md").write_text(text)
    with pytest.raises(ValueError, match=r"README.md has no place for a table; it takes the lines"):
        record(tmp_path, [], "table")
    assert not (tmp_path / "results.json").exists()


def test_a_table_is_printed_and_kept_where_there_is_a_folder_for_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"{BEGIN}\n{END}\n")
    publish("the table", [1], into=None)
    assert readme.read_text() == f"{BEGIN}\n{END}\n"
    publish("the table", [1], tmp_path)
    assert readme.read_text() == f"{BEGIN}\nthe table\n{END}\n"
    assert capsys.readouterr().out == "the table\nthe table\n"
