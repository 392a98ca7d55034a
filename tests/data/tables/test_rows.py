"""Tables in every format give the same rows, each with its place, converted once."""

import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Barrier
from typing import Any
from unittest import mock

import datasets
import numpy as np
import pandas
import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipetransformer.data.tables import base
from pipetransformer.data.tables import rows as table_rows
from pipetransformer.data.tables.base import ROWS_PER_BATCH
from pipetransformer.data.tables.rows import Rows, read_files
from pipetransformer.data.tables.splits import local_splits
from pipetransformer.errors import UserError

ROWS = [
    {"review": "plain", "stars": "1"},
    {"review": 'with "quotes", commas\tand a tab', "stars": "2"},
    {"review": "Grüße, 東京 🚀", "stars": "3"},
    {"review": "two\nlines", "stars": "4"},
    {"review": "None", "stars": "NA"},
    {"review": "  spaces  ", "stars": "007"},
]


def write_csv(file: Path, rows: list[dict[str, Any]]) -> None:
    pandas.DataFrame(rows).to_csv(file, index=False)


def write_lines(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_list(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text(json.dumps(rows, indent=1))


def write_parquet(file: Path, rows: list[dict[str, Any]]) -> None:
    pandas.DataFrame(rows).to_parquet(file)


def write_stream(file: Path, rows: list[dict[str, Any]]) -> None:
    table = pa.Table.from_pylist(rows)
    with pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)


def write_random_access(file: Path, rows: list[dict[str, Any]]) -> None:
    table = pa.Table.from_pylist(rows)
    with pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)


FORMATS: dict[str, tuple[str, Callable[[Path, list[dict[str, Any]]], None]]] = {
    "csv": ("a.csv", write_csv),
    "json lines": ("a.jsonl", write_lines),
    "json lines named json": ("a.json", write_lines),
    "json list": ("a.json", write_list),
    "parquet": ("a.parquet", write_parquet),
    "arrow stream": ("a.arrow", write_stream),
    "arrow file": ("a.arrow", write_random_access),
}


def cells(rows: Rows) -> list[dict[str, Any]]:
    return rows.data.to_list()


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_same_rows(name: str, tmp_path: Path) -> None:
    file, write = FORMATS[name]
    write(tmp_path / file, ROWS)
    assert cells(read_files((tmp_path / file,))) == ROWS


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_a_tab_separated_file_has_no_quotes_and_a_byte_order_mark_is_no_name(
    tmp_path: Path, ending: str, mark: str
) -> None:
    file = tmp_path / "a.tsv"
    file.write_bytes((mark + ending.join(["text\tlabel", '"It is," he said\t1', "", "a, b\t0"])).encode())
    assert cells(read_files((file,))) == [{"text": '"It is," he said', "label": "1"}, {"text": "a, b", "label": "0"}]


@pytest.mark.parametrize("delimiter", [";", "\t", "|"])
def test_another_delimiter_brings_quotes(tmp_path: Path, delimiter: str) -> None:
    file = tmp_path / "a.tsv"
    pandas.DataFrame(ROWS).to_csv(file, index=False, sep=delimiter)
    assert cells(read_files((file,), delimiter)) == ROWS


TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)


@given(rows=st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=6))
def test_whatever_pandas_writes_is_read_back(tmp_path_factory: pytest.TempPathFactory, rows: list[Any]) -> None:
    written = [{"a": one.replace("\r", ""), "b": two.replace("\r", "")} for one, two in rows]
    file = tmp_path_factory.mktemp("csv") / "a.csv"
    write_csv(file, written)
    assert cells(read_files((file,))) == written


def test_types_of_json_are_those_of_all_rows(tmp_path: Path) -> None:
    late = [{"a": 1, "tags": [], "n": None}] * (ROWS_PER_BATCH + 5)
    last = {"a": 2.5, "tags": ["x"], "n": {"deep": [1]}, "new": True}
    write_lines(tmp_path / "a.jsonl", [*late, last])
    rows = read_files((tmp_path / "a.jsonl",))
    assert rows.data[-1] == last
    assert rows.data[0] == {"a": 1.0, "tags": [], "n": None, "new": None}


def test_a_whole_number_that_no_fraction_holds_is_refused_in_whatever_part_of_a_file_it_comes(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", [{"a": 0.5}] * ROWS_PER_BATCH + [{"a": 2**60}])
    with pytest.raises(UserError, match=r"a\.jsonl: a has no type for all its values \(.*1152921504606846976"):
        read_files((tmp_path / "a.jsonl",))


def test_features_of_the_library_survive(tmp_path: Path) -> None:
    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["bad", "good"])}
    )
    made = datasets.Dataset.from_dict({"text": ["a", "b"], "label": [1, 0]}, features=features)
    made.to_parquet(tmp_path / "a.parquet")
    made.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": made, "test": made}).save_to_disk(tmp_path / "several")
    assert read_files((tmp_path / "a.parquet",)).features == features
    assert local_splits(tmp_path / "one")["train"]().features == features
    assert [*local_splits(tmp_path / "several")] == ["train", "test"]


TEXTS = {  # as polars writes them, with the type that they are read as
    "views": (pa.array(["bad", "good", None], pa.string_view()), "large_string"),
    "large": (pa.array(["bad", "good", None], pa.large_string()), "large_string"),
    "category": (pa.array(["bad", "good", None]).dictionary_encode(), "string"),
    "category of views": (
        pa.DictionaryArray.from_arrays(
            pa.array([1, 0, None], pa.uint32()), pa.array(["good", "bad"], pa.string_view())
        ),
        "large_string",
    ),
    "bytes": (pa.array([b"bad", b"good", None], pa.binary_view()), "large_binary"),
}


@pytest.mark.parametrize("kind", TEXTS)
@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_texts_of_polars_are_read_as_those_of_others(tmp_path: Path, kind: str, ending: str) -> None:
    if (kind, ending) == ("category of views", "parquet"):
        pytest.skip("Arrow writes no such parquet")
    (texts, read_as), file = TEXTS[kind], tmp_path / f"a.{ending}"
    lists = pa.ListArray.from_arrays([0, 2, 2, 3], texts) if kind != "category of views" else texts
    table = pa.table({"one": texts, "lists": lists, "deep": pa.StructArray.from_arrays([texts], ["in"])}).drop_columns(
        ["deep"] if "category" in kind else []
    )
    with (
        pa.ipc.new_file(file, table.schema) if ending == "arrow" else pa.parquet.ParquetWriter(file, table.schema) as to
    ):
        to.write_table(table)
    rows = read_files((file,))
    assert cells(rows) == table.to_pylist()
    assert "view" not in str(rows.features.arrow_schema)
    assert str(rows.features.arrow_schema.field("one").type) == read_as


def test_a_category_of_pandas_is_read_as_its_values(tmp_path: Path) -> None:
    frame = pandas.DataFrame({"label": pandas.Categorical(["bad", "good", "bad"])})
    frame.to_parquet(tmp_path / "a.parquet")
    assert cells(read_files((tmp_path / "a.parquet",))) == [{"label": each} for each in ("bad", "good", "bad")]


@pytest.mark.parametrize(
    ("file", "write", "places"),
    [
        ("a.csv", write_csv, ["line 2", "line 5", "line 7"]),
        ("a.jsonl", write_lines, ["line 1", "line 4", "line 5"]),
        ("a.json", write_list, ["row 0", "row 3", "row 4"]),
        ("a.parquet", write_parquet, ["row 0", "row 3", "row 4"]),
    ],
)
def test_a_row_knows_its_line(tmp_path: Path, file: str, write: Callable[..., None], places: list[str]) -> None:
    write(tmp_path / file, ROWS)
    rows = read_files((tmp_path / file,))
    assert [rows.at(row) for row in (0, 3, 4)] == [f"{tmp_path / file} {place}" for place in places]
    some = rows.take(np.array([4, 0])).take(np.array([1]))
    assert (some.at(0), cells(some)) == (f"{tmp_path / file} {places[0]}", ROWS[:1])


def test_batches_are_tables_of_the_columns_that_were_asked_for(tmp_path: Path) -> None:
    many = [{"a": str(number), "b": "x"} for number in range(ROWS_PER_BATCH + 2)]
    write_csv(tmp_path / "a.csv", many)
    rows = read_files((tmp_path / "a.csv",)).take(np.arange(1, ROWS_PER_BATCH + 2))
    batches = [(first, table.to_pydict()) for first, table in rows.batches(["a"])]
    assert [first for first, _ in batches] == [0, ROWS_PER_BATCH]
    assert [cell for _, table in batches for cell in table["a"]] == [row["a"] for row in many[1:]]
    assert [*batches[0][1]] == ["a"]
    assert rows.column("a").to_pylist() == [row["a"] for row in many[1:]]


def test_a_file_is_converted_once_and_again_when_it_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    converted, convert = [], table_rows._convert
    monkeypatch.setattr(table_rows, "_convert", lambda *args: (converted.append(args), convert(*args)))
    file = tmp_path / "a.csv"
    write_csv(file, ROWS)
    first = read_files((file,))
    assert cells(read_files((file,))) == cells(first)
    assert len(converted) == 1
    facts = file.stat()
    file.write_text(file.read_text().replace("plain", "other"))
    os.utime(file, ns=(facts.st_atime_ns, facts.st_mtime_ns + 1))
    assert cells(read_files((file,)))[0]["review"] == "other"
    assert cells(first) == ROWS, "who reads the file before goes on with what it had"
    assert len(converted) == 2


def test_those_that_start_together_convert_a_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    converted, convert, start = [], table_rows._convert, Barrier(4)

    def counted(*args: Any) -> None:
        converted.append(args)
        convert(*args)

    def read(_: int) -> int:
        start.wait(timeout=60)
        return len(read_files((tmp_path / "a.csv",)))

    monkeypatch.setattr(table_rows, "_convert", counted)
    many = ROWS * 2000  # which takes longer than a thread waits for its turn
    write_csv(tmp_path / "a.csv", many)
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(read, range(4))) == [len(many)] * 4
    assert len(converted) == 1


def test_what_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "a.csv").write_text("a,b\n1,2\n3\n")
    with pytest.raises(UserError, match=r"a\.csv line 3 has 1 cells and the header has 2 \(a, b\)"):
        read_files((tmp_path / "a.csv",))
    assert {file.suffix for file in (tmp_path / "cache").rglob("*.*")} <= {".lock"}


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").write_text("a file in its place")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    write_csv(tmp_path / "a.csv", ROWS)
    with pytest.raises(UserError, match="set HF_DATASETS_CACHE to a folder with room"):
        read_files((tmp_path / "a.csv",))


def test_a_folder_has_a_split_for_each_name(tmp_path: Path) -> None:
    for name in ("train.csv", "dev_2024.csv", "test.jsonl", "gold.csv", "notes.txt", ".train.csv"):
        (write_lines if name.endswith("jsonl") else write_csv)(tmp_path / name, ROWS)
    splits = local_splits(tmp_path)
    assert sorted(splits) == ["dev", "gold", "test", "train"]
    assert all(cells(read()) == ROWS for read in splits.values())


def test_shards_are_one_split_in_their_order(tmp_path: Path) -> None:
    write_parquet(tmp_path / "train-00000-of-00002.parquet", ROWS[:2])
    write_parquet(tmp_path / "train-00001-of-00002.parquet", ROWS[2:])
    rows = local_splits(tmp_path)["train"]()
    assert cells(rows) == ROWS
    assert [rows.at(row).rpartition("/")[2] for row in (1, 2)] == [
        "train-00000-of-00002.parquet row 1",
        "train-00001-of-00002.parquet row 0",
    ]


def test_the_only_file_of_a_folder_is_its_training_split(tmp_path: Path) -> None:
    write_csv(tmp_path / "reviews.csv", ROWS)
    assert [*local_splits(tmp_path)] == ["train"]


@given(st.lists(st.text(st.sampled_from("aé\r "), max_size=9)), st.integers(1, 30))
def test_lines_are_those_of_the_file_however_it_is_divided_into_blocks(lines: list[str], block: int) -> None:
    content = "\n".join(lines)
    with TemporaryDirectory() as folder, mock.patch.object(base, "BLOCK_BYTES", block):
        file = Path(folder) / "a.txt"
        file.write_bytes(content.encode())
        assert [line.count("\n") for line in base.text_lines(file)] == [1] * content.count("\n") + [0] * (
            content[-1:] not in ("", "\n")
        )
        assert "".join(base.text_lines(file)) == content


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="only Linux lists the open files of a process")
def test_a_file_is_not_open_between_two_of_its_lines(tmp_path: Path) -> None:
    """An error in the middle keeps the reader in its trace, and a file that is open there is told as a leak."""
    file = tmp_path / "a.txt"
    file.write_text("a\nb\n")
    lines = base.text_lines(file)
    assert next(lines) == "a\n"
    for each in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the one by which they are listed
            assert each.readlink() != file
    assert [*lines] == ["b\n"]
