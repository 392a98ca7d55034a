"""Wrong tables and folders of pictures: each is answered in one line with file, row and column, before the start."""

import io
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
from PIL import Image

from pipetransformer.data.images.table import TableImages
from pipetransformer.errors import UserError

NOISE = np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)


def encoded(form: str, pixels: np.ndarray = NOISE) -> bytes:
    content = io.BytesIO()
    Image.fromarray(pixels).save(content, form)
    return content.getvalue()


PNG, JPEG = encoded("PNG"), encoded("JPEG")
Content = str | bytes | Callable[[Path], Any]
GOOD = "file,kind\na.png,cat\nb.png,dog\nc.png,cat\nd.png,dog\n"
PICTURES: dict[str, Content] = {f"{name}.png": PNG for name in "abcd"}


@dataclass(frozen=True)
class Wrong:
    """Files by name, options, and words of the answer; the path is the table, or the folder."""

    files: dict[str, Content]
    words: list[str]
    options: dict[str, Any] = field(default_factory=dict)
    path: str = "t.csv"


def row(cell: str, words: list[str], files: dict[str, Content] | None = None, **options: Any) -> Wrong:
    """A table whose third row, in line 4, has another picture."""
    return Wrong(PICTURES | {"t.csv": GOOD.replace("c.png", cell)} | (files or {}), words, options)


def picture(content: Content, words: list[str], name: str = "c.png") -> Wrong:
    """A table whose third picture has another content."""
    return row(name, ["t.csv line 4", name, "cannot be read as a picture", *words], {name: content})


def labelled(*labels: Any, words: list[str], **options: Any) -> Wrong:
    rows = [{"file": f"{name}.png", "kind": label} for name, label in zip("abcd", labels, strict=True)]
    return Wrong(PICTURES | {"t.jsonl": "".join(json.dumps(each) + "\n" for each in rows)}, words, options, "t.jsonl")


def embedded(cells: list[Any], words: list[str]) -> Wrong:
    frame = pandas.DataFrame({"file": cells, "kind": ["cat", "dog"] * (len(cells) // 2)})
    return Wrong({"t.parquet": lambda file: frame.to_parquet(file)}, words, path="t.parquet")


def link(file: Path) -> None:
    secret = file.parents[1] / "secret.png"
    secret.write_bytes(PNG)
    file.symlink_to(secret)


def tiny(size: tuple[int, int]) -> bytes:
    return encoded("PNG", np.zeros((*size, 3), dtype=np.uint8))


FOLDERS: dict[str, Content] = {"cat/0.png": PNG, "cat/1.png": PNG, "dog/0.png": PNG, "dog/1.png": PNG}
HALF = {"eval_fraction": 0.5}
WRONG: dict[str, Wrong] = {
    # paths
    "missing picture": row("x.png", ["t.csv line 4: file is 'x.png', and ", "/x.png does not exist", "dataset.root="]),
    "folder": row("sub", ["t.csv line 4: file is 'sub'", "/sub is a folder"], {"sub/x.png": PNG}),
    "no path": row("", ["t.csv line 4 has no file; write a path there or remove the row"]),
    "path of spaces": row("  ", ["t.csv line 4 has no file"]),
    "path with ..": row("../c.png", ["t.csv line 4: file is '../c.png', which leads out of", "dataset.root="]),
    "path with .. in the middle": row("sub/../../c.png", ["line 4", "leads out of"]),
    "absolute path": row("/etc/hostname", ["t.csv line 4: file is '/etc/hostname', which leads out of"]),
    "link out of the folder": row(
        "link.png", ["t.csv line 4: file is", "link.png', which leads out of"], {"link.png": link}
    ),
    "address": row("https://somewhere/c.png", ["t.csv line 4", "an address and no file; fetch the pictures first"]),
    "path out of the root": row(
        "../c.png", ["line 4: file is '../c.png'", "leads out of", "/sub;"],
        {f"sub/{name}.png": PNG for name in "abd"}, root="sub",
    ),
    "paths that begin elsewhere": row(
        "c.png", ["line 2: file is 'a.png'", "/sub/a.png does not exist"], {"sub/x": b""}, root="sub"
    ),
    "root that is no folder": row("c.png", ["dataset.root=", "nowhere is no folder"], root="nowhere"),
    # pictures
    "no bytes": picture(b"", ["it has 0 bytes"]),
    "text": picture("hello\n", [], "c.jpg"),
    "page of a server": picture("<!DOCTYPE html><html>404</html>", []),
    "cut JPEG": picture(JPEG[: len(JPEG) // 2], ["truncated"], "c.jpg"),
    "cut PNG": picture(PNG[: len(PNG) // 2], []),
    "cut JPEG named as PNG": picture(JPEG[: len(JPEG) // 2], ["truncated"]),
    "damaged PNG": picture(PNG[:60] + bytes([PNG[60] ^ 255]) + PNG[61:], []),
    "header alone": picture(PNG[:33], []),
    "one pixel": picture(tiny((1, 1)), ["it has 1x1 pixels and shows nothing"]),
    "one pixel wide": picture(tiny((9, 1)), ["it has 1x9 pixels"]),
    "floating point": picture(lambda file: Image.new("F", (4, 4)).save(file), ["without a known range"], "c.tif"),
    "several": Wrong(
        PICTURES | {"t.csv": GOOD, "a.png": b"", "c.png": b"", "d.png": b""}, ["line 2", "; 2 more cannot be read"]
    ),
    # pictures in the table
    "null picture": embedded([PNG, None, PNG, PNG], ["t.parquet row 1 has no file"]),
    "text in place of a picture": embedded([PNG, PNG, b"hello", PNG], ["t.parquet row 2: file cannot be read"]),
    "cut picture in the table": embedded([PNG, PNG, PNG, PNG[:-40]], ["t.parquet row 3: file cannot be read"]),
    "number as picture": embedded([1, 2, 3, 4], ["dataset.image=file: ", "of type int64 there; name a column of"]),
    # columns and labels
    "no such column": row("c.png", ["dataset.image=fil: ", "it has file, kind; did you mean file?"], image="fil"),
    "no such label": row("c.png", ["dataset.label=kin: ", "did you mean kind?"], label="kin"),
    "one column for both": row("c.png", ["dataset.label=file is the column of dataset.image= too"], label="file"),
    "twice the same column": Wrong(PICTURES | {"t.csv": "file,kind,kind\na.png,cat,cat\n"}, ["two columns 'kind'"]),
    "null label": labelled("cat", None, "dog", "cat", words=["t.jsonl line 2 has no kind"]),
    "one class": labelled("cat", "cat", "cat", "cat", words=["dataset.label=kind: ", "only the class cat"]),
    "label that is not named": labelled(
        "cat", "dog", "bird", "cat", words=["t.jsonl line 3: kind is 'bird'"], labels=["cat", "dog"]
    ),
    "mixup of values": labelled(0.5, 1.5, 2.5, 3.5, words=["mix classes, and the labels are values"], mixup=0.8),
    "weights of mixed classes": row(
        "c.png", ["dataset.class_weights= does not go"], cutmix=1.0, class_weights="balanced"
    ),
    "weights of values": labelled(0.5, 1.5, 2.5, 3.5, words=["dataset.class_weights"], class_weights="balanced"),
    "metric of values": labelled(0.5, 1.5, 2.5, 3.5, words=["accuracy is no metric of"], metrics=["accuracy"]),
    # folders of classes
    "empty folder": Wrong({}, ["has neither tables nor folders of classes; give a table (.csv"], path="."),
    "pictures without classes": Wrong(PICTURES, ["has neither tables nor folders of classes"], path="."),
    "one class of a folder": Wrong({"cat/0.png": PNG}, ["has one class, cat, and"], path="."),
    "class without pictures": Wrong(
        FOLDERS | {"bird/0.heic": b""}, ["bird has 1 files and no pictures, the first is 0.heic"], HALF, "."
    ),
    "too few pictures to hold out": Wrong(FOLDERS, ["dataset.eval_fraction=0.1 cannot be split off 4"], path="."),
    "damaged picture of a class": Wrong(
        FOLDERS | {"dog/1.png": b""}, ["dog/1.png cannot be read as a picture (it has 0 bytes)"], HALF, "."
    ),
    "no training folder": Wrong(
        {"test/cat/0.png": PNG, "test/dog/0.png": PNG}, ["has test/ and no train/; give dataset.train_split="], path="."
    ),
    "no such split": Wrong(FOLDERS, ["dataset.eval_split=later: there is no folder"], {"eval_split": "later"}, "."),
    "class that training lacks": Wrong(
        {"train/cat/0.png": PNG, "train/dog/0.png": PNG, "test/bird/0.png": PNG}, ["1 classes that train/ lacks: bird"],
        path=".",
    ),
    "column of class folders": Wrong(FOLDERS, ["dataset.label=kind has no effect, as"], HALF | {"label": "kind"}, "."),
    "values of class folders": Wrong(
        FOLDERS, ["dataset.task=regression needs a table with labels"], HALF | {"task": "regression"}, "."
    ),
    "a picture as path": Wrong({"cat.png": PNG}, ["cat.png is no table: its name ends in .png"], path="cat.png"),
}  # fmt: skip


def write(folder: Path, files: dict[str, Content]) -> None:
    folder.mkdir()
    for name, content in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if callable(content):
            content(file)
        else:
            file.write_bytes(content.encode() if isinstance(content, str) else content)


def look_at(spec: TableImages) -> None:
    """Does what a launcher does before it starts processes."""
    spec.check()
    spec.preflight()


@pytest.mark.parametrize("name", WRONG)
def test_wrong_pictures_are_answered_in_one_line(name: str, tmp_path: Path) -> None:
    wrong, folder = WRONG[name], tmp_path / "data"
    write(folder, wrong.files)
    columns = {} if wrong.path == "." else {"image": "file", "label": "kind"}
    options = columns | wrong.options
    if "root" in options:
        options["root"] = str(folder / options["root"])
    spec = TableImages(path=str(folder / wrong.path), **options)
    with pytest.raises(UserError) as refused:
        look_at(spec)
    message = str(refused.value)
    assert "\n" not in message
    assert len(message) < 400 + 3 * len(str(tmp_path)), message
    assert all(word in message for word in wrong.words), message


def test_the_tables_of_this_file_are_right_but_for_what_is_wrong(tmp_path: Path) -> None:
    write(tmp_path / "data", PICTURES | FOLDERS | {"t.csv": GOOD})
    assert TableImages(path=str(tmp_path / "data" / "t.csv"), image="file", label="kind").preflight() == 4 - 1
    write(tmp_path / "folders", FOLDERS)
    assert TableImages(path=str(tmp_path / "folders"), eval_fraction=0.5).preflight() == 2
