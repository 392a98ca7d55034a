"""Writes the tables of this experiment: ``python -m experiments.adapters.prepare <SST-2> <folder to write>``.

``<SST-2>`` has ``train.tsv`` and GLUE's 872 validation rows as ``test.tsv``, or as ``dev.tsv`` where there is no other.
"""

import csv
from argparse import ArgumentParser
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

NUM_TRAIN = 1024
MOODS = {"0": "bad", "1": "good"}


def write_tables(reviews: Path, folder: Path) -> None:
    """Writes train.csv with the first sentences and dev.csv with those to evaluate on, in the files' order."""
    validation = reviews / "test.tsv"
    _write(islice(_rows(reviews / "train.tsv"), NUM_TRAIN), folder / "train.csv")
    _write(_rows(validation if validation.is_file() else reviews / "dev.tsv"), folder / "dev.csv")


def _rows(file: Path) -> Iterable[tuple[str, str]]:
    with file.open(encoding="utf-8", newline="") as lines:
        for row in csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE):
            yield row["sentence"], MOODS[row["label"]]


def _write(rows: Iterable[tuple[str, str]], file: Path) -> None:
    with file.open("w", encoding="utf-8", newline="") as lines:
        csv.writer(lines).writerows([("review", "mood"), *rows])


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("reviews", type=Path, help="folder of SST-2")
    parser.add_argument("folder", type=Path, help="receives the tables")
    reviews, folder = vars(parser.parse_args()).values()
    folder.mkdir(parents=True, exist_ok=True)
    write_tables(reviews, folder)
