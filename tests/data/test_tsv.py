from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipetransformer.data.tsv import read_tsv

CELLS = st.text(st.characters(codec="utf-8", exclude_characters="\t\n\r\x00"), min_size=1)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tsv") / "table.tsv"


@given(st.lists(st.tuples(CELLS, CELLS)))
def test_cells_come_back_as_they_were_written(file: Path, rows: list[tuple[str, str]]) -> None:
    lines = ["sentence\tlabel", *("\t".join(row) for row in rows)]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8", newline="")
    assert read_tsv(file) == {"sentence": [row[0] for row in rows], "label": [row[1] for row in rows]}


def test_quotes_are_ordinary_characters(file: Path) -> None:
    file.write_text('sentence\tlabel\n"an open quote\t1\n"closed" twice"\t0\n')
    assert read_tsv(file)["sentence"] == ['"an open quote', '"closed" twice"']


def test_a_row_of_another_length_is_named(file: Path) -> None:
    file.write_text("sentence\tlabel\nfine\t1\ntoo\tmany\t0\n")
    with pytest.raises(ValueError, match=r"table\.tsv line 3 has 3 columns, the header has 2"):
        read_tsv(file)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\t1\n"])
def test_a_file_that_is_no_table_is_refused(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    with pytest.raises(ValueError, match="not a tab-separated table"):
        read_tsv(file)
