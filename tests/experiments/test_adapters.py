"""The tables that experiments/adapters trains on are those that its page describes."""

import csv
from pathlib import Path

from experiments.adapters.prepare import NUM_TRAIN, write_tables


def rows(file: Path) -> list[list[str]]:
    with file.open(newline="") as lines:
        return list(csv.reader(lines))


def test_the_tables_have_the_first_sentences_and_all_to_evaluate_on(tmp_path: Path) -> None:
    sentences = [f'a "bird" , number {number} ' for number in range(NUM_TRAIN + 3)]
    (tmp_path / "train.tsv").write_text("\n".join(["sentence\tlabel", *(f"{text}\t1" for text in sentences)]))
    (tmp_path / "dev.tsv").write_text("sentence\tlabel\nno bird\t0\n")
    write_tables(tmp_path, tmp_path)
    assert rows(tmp_path / "train.csv") == [["review", "mood"], *([text, "good"] for text in sentences[:NUM_TRAIN])]
    assert rows(tmp_path / "dev.csv") == [["review", "mood"], ["no bird", "bad"]]
    (tmp_path / "test.tsv").write_text("sentence\tlabel\na bird\t1\n")
    write_tables(tmp_path, tmp_path)
    assert rows(tmp_path / "dev.csv")[1:] == [["a bird", "good"]]
