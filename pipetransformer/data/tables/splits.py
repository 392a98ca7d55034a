"""The splits of a local table, a folder of tables, a folder of ``save_to_disk``, or a data set of the hub."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from datasets import Dataset, DatasetDict, load_dataset, load_from_disk

from pipetransformer.data.hub import unreachable
from pipetransformer.data.tables.base import shown
from pipetransformer.data.tables.files import FORMATS, Formats
from pipetransformer.data.tables.rows import Rows, read_files
from pipetransformer.data.tables.spec import LOCAL_TABLES
from pipetransformer.errors import UserError

SPLIT = re.compile(r"(train|validation|valid|val|dev|test)(?=[-_.]|$)")
SHARD = re.compile(r"-\d{5}-of-(\d{5})$")


def _local_tables(formats: Formats) -> str:
    endings = ", ".join(formats)
    return f"a table ({endings}), a folder of them named train and validation or test, or one of save_to_disk"


Splits = Mapping[str, Callable[[], Rows]]
"""The splits that there are; the rows of each are read when its function is called."""


def local_splits(path: Path, delimiter: str | None = None, formats: Formats = FORMATS) -> Splits:
    """Finds the splits of a file, a folder of files, or a folder of ``save_to_disk``. A single file is ``train``.

    In a folder, the name of a file is that of its split (``train.csv``, ``dev_2024.csv``), and shards of one split are
    named as the hub does (``train-00000-of-00002.parquet``).

    Args:
        path: The file or folder.
        delimiter: Character between the cells of a delimited file; ``None``: by the file's ending.
        formats: The files that are tables.

    Raises:
        UserError: There is no table, or a split has several.
    """
    if not path.is_dir():
        return {"train": partial(read_files, (path,), delimiter, formats)}
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        return _saved_splits(path)
    files = sorted(each for each in path.iterdir() if each.suffix.lower() in formats and each.name[0] != ".")
    if not files:
        raise UserError(f"dataset.path={path} has no tables; give {_local_tables(formats)}")
    splits: dict[str, list[Path]] = {}
    for file in files:
        splits.setdefault(_split_of(file), []).append(file)
    for name, members in splits.items():
        _check_shards(path, name, members)
    if len(splits) == 1:
        splits = {"train": next(iter(splits.values()))}
    return {name: partial(read_files, tuple(members), delimiter, formats) for name, members in splits.items()}


def hub_splits(name: str, config: str | None, revision: str | None) -> Splits:
    """Loads the splits of a data set of the hub.

    Args:
        name: ``owner/name``.
        config: Its configuration.
        revision: Branch, tag or commit.

    Raises:
        UserError: The hub or the configuration cannot be reached.
    """
    try:
        splits = load_dataset(name, config, revision=revision)
    except Exception as error:  # network, cache, access rights, unknown configuration: the remedy is the same for all
        raise UserError(unreachable(name, error, LOCAL_TABLES)) from error
    assert isinstance(splits, DatasetDict)
    return _loaded(splits, name)


def _loaded(splits: DatasetDict, name: str) -> Splits:
    return {str(split): partial(_rows, rows, f"split {str(split)!r} of {name}") for split, rows in splits.items()}


def _rows(data: Dataset, name: str) -> Rows:
    return Rows(data, name, lambda row: f"row {row} of {name}")


def _saved_splits(folder: Path) -> Splits:
    """Reads a folder of ``save_to_disk``, whose files lie within it."""
    try:
        for state in (*folder.glob("state.json"), *folder.glob("*/state.json")):
            for file in json.loads(state.read_text(encoding="utf-8"))["_data_files"]:
                if Path(file["filename"]).name != file["filename"]:
                    raise UserError(f"{state} names a file out of its folder ({file['filename']}); save it again")
        loaded = load_from_disk(str(folder))
    except UserError:
        raise
    except Exception as error:  # of JSON, Arrow and the library: the remedy is the same for all
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"dataset.path={folder} cannot be read ({reason}); write it again by save_to_disk") from error
    return _loaded(DatasetDict({"train": loaded}) if isinstance(loaded, Dataset) else loaded, str(folder))


def _split_of(file: Path) -> str:
    """Returns the split that a file of a folder is named after, else its name."""
    known = SPLIT.match(file.stem)
    return known[1] if known else SHARD.sub("", file.stem)


def _check_shards(folder: Path, split: str, files: list[Path]) -> None:
    """Refuses several files of one split, unless they are all its shards."""
    counts = {shard[1] for file in files if (shard := SHARD.search(file.stem))}
    kinds = {(SHARD.sub("", file.stem), file.suffix, bool(SHARD.search(file.stem))) for file in files}
    if len(kinds) > 1 or (len(files) > 1 and not counts):
        names = shown(file.name for file in files)
        raise UserError(f"dataset.path={folder} has {len(files)} files for {split}: {names}; keep one, or name it")
    if counts and {*map(int, counts)} != {len(files)}:
        raise UserError(
            f"dataset.path={folder} has {len(files)} of {int(max(counts))} shards of {split}; add the others"
        )
