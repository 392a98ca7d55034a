from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipetransformer.data.tables.published import Table, class_labels, number_labels, read_tsv, text_columns

CELLS = st.text(st.characters(codec="utf-8", exclude_characters="\t\n\r\x00"), min_size=1)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tsv") / "table.tsv"


@given(st.lists(st.tuples(CELLS, CELLS)))
def test_cells_come_back_as_they_were_written(file: Path, rows: list[tuple[str, str]]) -> None:
    lines = ["sentence\tlabel", *("\t".join(row) for row in rows)]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8", newline="")
    table = read_tsv(file)
    assert table.columns == {"sentence": [row[0] for row in rows], "label": [row[1] for row in rows]}
    assert len(table) == len(rows)


def test_quotes_are_ordinary_characters(file: Path) -> None:
    file.write_text('sentence\tlabel\n"an open quote\t1\n"closed" twice"\t0\n')
    assert read_tsv(file).columns["sentence"] == ['"an open quote', '"closed" twice"']


def test_a_row_of_another_length_is_named(file: Path) -> None:
    file.write_text("sentence\tlabel\nfine\t1\ntoo\tmany\t0\n")
    with pytest.raises(ValueError, match=r"table\.tsv line 3 has 3 columns, the header has 2"):
        read_tsv(file)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\t1\n"])
def test_a_file_that_is_no_table_is_refused(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    with pytest.raises(ValueError, match="not a tab-separated table"):
        read_tsv(file)


@pytest.mark.parametrize("end", ["", "\n", "\n\n", "\n  \n", "\r\n\r\n"])
def test_blank_lines_at_the_end_are_no_rows(file: Path, end: str) -> None:
    file.write_text("sentence\tlabel\nfine\t1" + end, newline="")
    assert read_tsv(file).columns == {"sentence": ["fine"], "label": ["1"]}


def test_a_blank_line_between_rows_is_named(file: Path) -> None:
    file.write_text("sentence\tlabel\n\nfine\t1\n")
    with pytest.raises(ValueError, match=r"table\.tsv line 2 has 1 columns"):
        read_tsv(file)


def test_a_cell_may_be_of_any_length(file: Path) -> None:
    text = "long " * 40_000  # csv's limit is 131,072 characters
    file.write_text(f"sentence\tlabel\n{text}\t1\n")
    assert read_tsv(file).columns["sentence"] == [text]


HUB_ROWS = Table("split 'train' of owner/data", {"text": ["a", None], "label": [1, 7]})


def test_a_wrong_label_is_named_with_its_line_or_row(file: Path) -> None:
    file.write_text("sentence\tlabel\nfine\t1\nwrong\tgood\nworse\t2\n")
    message = r"table\.tsv line 3 has the label 'good', and 2 labels of 3 are wrong; give 0 to 1 or no, yes"
    with pytest.raises(ValueError, match=message):
        class_labels(read_tsv(file), ("no", "yes"))
    with pytest.raises(ValueError, match="row 1 of split 'train' of owner/data has the label '7'"):
        class_labels(HUB_ROWS, ("no", "yes"))
    with pytest.raises(ValueError, match="row 1 of split 'train' of owner/data has the label '7'"):
        number_labels(HUB_ROWS, 5)


def test_a_row_without_text_is_named() -> None:
    with pytest.raises(ValueError, match="row 1 of split 'train' of owner/data has no text"):
        text_columns(HUB_ROWS, [("text",)])


def test_values_keep_all_digits(file: Path) -> None:
    file.write_text("sentence\tlabel\nfine\t3.8\n")
    values = number_labels(read_tsv(file), 5)
    assert (values.dtype, values.tolist()) == ("float64", [3.8])
