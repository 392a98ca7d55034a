import gzip
import struct
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy
from PIL import Image

from pipetransformer.data.images import sources
from pipetransformer.data.images.sources import (
    IDX_FILES,
    ImageSource,
    ImageSplits,
    find_files,
    from_arrays,
    from_hub,
    packaged_folder,
    read_idx,
)
from pipetransformer.errors import UserError

FIRST = np.array([0])
RED, BLUE = (255, 0, 0), (0, 0, 255)


def test_the_hub_gives_grey_and_colour_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    features = datasets.Features({"img": datasets.Image(), "kind": datasets.ClassLabel(names=["cat", "dog"])})
    images = [Image.new("RGB", (5, 4), RED), Image.new("L", (5, 4), 9), Image.new("RGBA", (5, 4), (*BLUE, 255))]
    rows = datasets.Dataset.from_dict({"img": images, "kind": [0, 1, 0]}, features=features)
    monkeypatch.setattr(sources, "load_hub", lambda name, split, local: rows)
    found = from_hub("owner/data", "train", "test", ("img", "kind"), "a folder")
    assert found.classes == ("cat", "dog")
    assert found.train.labels.tolist() == [0, 1, 0]
    assert [picture.shape for picture in found.train.decode(np.arange(3))] == [(4, 5, 3), (4, 5, 1), (4, 5, 3)]
    assert found.evaluation_name == "test"


def from_rows(monkeypatch: pytest.MonkeyPatch, pictures: list[Any], columns: tuple[str, str]) -> ImageSplits:
    features = datasets.Features({"img": datasets.Image(), "kind": datasets.ClassLabel(names=["cat", "dog"])})
    rows = datasets.Dataset.from_dict({"img": pictures, "kind": [0] * len(pictures)}, features=features)
    monkeypatch.setattr(sources, "load_hub", lambda name, split, local: rows)
    return from_hub("owner/data", "train", "test", columns, "a folder")


def test_a_damaged_picture_of_the_hub_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = from_rows(monkeypatch, [Image.new("L", (4, 4)), {"bytes": b"hello", "path": None}], ("img", "kind"))
    with pytest.raises(ValueError, match="picture 1 in split 'train' of owner/data cannot be read as a picture"):
        found.train.decode(np.array([0, 1]))


@pytest.mark.parametrize("columns", [("image", "kind"), ("kind", "kind"), ("img", "img"), ("img", "label")])
def test_columns_that_the_hub_does_not_have_are_named(
    monkeypatch: pytest.MonkeyPatch, columns: tuple[str, str]
) -> None:
    with pytest.raises(ValueError, match=r"has the columns img, kind; dataset\.image_column="):
        from_rows(monkeypatch, [Image.new("L", (4, 4))], columns)


def test_taking_pictures_keeps_their_labels() -> None:
    array = np.arange(5 * 4, dtype=np.uint8).reshape(5, 2, 2)
    taken = from_arrays(array, np.arange(5)).take(np.array([3, 1])).take(np.array([1]))
    assert (taken.labels.tolist(), taken.decode(FIRST)[..., 0].tolist()) == ([1], [array[1].tolist()])


def test_in_memory_pictures_are_decoded_once() -> None:
    decoded = []

    def decode(indices: np.ndarray) -> np.ndarray:
        decoded.extend(indices.tolist())
        return np.stack([np.full((1, 1, 1), index, dtype=np.uint8) for index in indices])

    held = ImageSource(decode, np.zeros(3, dtype=np.int64), lambda indices: 1).in_memory()
    assert np.concatenate([*held.decode(np.array([2, 1])), *held.decode(FIRST)]).flatten().tolist() == [2, 1, 0]
    assert decoded == [0, 1, 2]


def idx_bytes(array: np.ndarray) -> bytes:
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("idx")


@given(st_numpy.arrays(np.uint8, st_numpy.array_shapes(max_dims=3, max_side=5)), st.booleans())
def test_what_was_written_is_read(folder: Path, array: np.ndarray, zipped: bool) -> None:
    file = folder / ("some.gz" if zipped else "some")
    file.write_bytes(gzip.compress(idx_bytes(array), mtime=0) if zipped else idx_bytes(array))
    np.testing.assert_array_equal(read_idx(file), array)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("text", b"hello", "not an IDX file of unsigned bytes; it starts with 68656c6c"),
        ("empty", b"", "not an IDX file"),
        ("short", idx_bytes(np.zeros((3, 4), np.uint8))[:-1], r"23 bytes, which does not fit its shape \(3, 4\)"),
        ("header", idx_bytes(np.zeros((3, 4), np.uint8))[:6], r"does not fit its shape \(\)"),
        ("plain.gz", b"hello", "cannot be unpacked"),
        ("cut.gz", gzip.compress(idx_bytes(np.zeros(9, np.uint8)), mtime=0)[:-12], "cannot be unpacked"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_idx(tmp_path / name)


def test_the_four_files_are_found_in_order_zipped_or_not(tmp_path: Path) -> None:
    names = [IDX_FILES[0], f"{IDX_FILES[1]}.gz", IDX_FILES[2], f"{IDX_FILES[3]}.gz"]
    for name in names:
        (tmp_path / name).touch()
    assert [file.name for file in find_files(tmp_path)] == names


def test_missing_files_are_named(tmp_path: Path) -> None:
    (tmp_path / IDX_FILES[0]).touch()
    with pytest.raises(ValueError, match=f"dataset.path={tmp_path} lacks {', '.join(IDX_FILES[1:])}"):
        find_files(tmp_path)


def test_the_package_manager_knows_where_the_packaged_files_are(tmp_path: Path) -> None:
    listing = tmp_path / "dataset-fashion-mnist.list"
    assert packaged_folder(listing) is None
    listing.write_text(f"/.\n/usr\n/usr/share/somewhere\n/usr/share/somewhere/{IDX_FILES[0]}.gz\n")
    assert packaged_folder(listing) == Path("/usr/share/somewhere")


@pytest.mark.parametrize("place", ["outside.png", "https://somewhere/x.png", "zip://x.png::https://somewhere/x.zip"])
def test_a_row_of_the_hub_names_no_file_outside_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    import datasets

    Image.new("RGB", (4, 4), RED).save(tmp_path / "outside.png")
    named = place if "://" in place else str(tmp_path / place)
    features = datasets.Features(
        {"image": datasets.Value("string"), "label": datasets.ClassLabel(names=["cat", "dog"])}
    )
    rows = datasets.Dataset.from_dict({"image": [named] * 2, "label": [0, 1]}, features=features)
    rows = rows.cast_column("image", datasets.Image())
    monkeypatch.setattr("pipetransformer.data.images.sources.load_hub", lambda *_: rows)
    source = from_hub("somebody/pictures", "train", "test", ("image", "label"), "").train
    with pytest.raises(UserError, match="outside of the data's own files"):
        source.decode(FIRST)
    with pytest.raises(UserError, match="outside of the data's own files"):
        source.channels(FIRST)
    monkeypatch.setattr("pipetransformer.data.images.sources.download_folders", lambda _: [tmp_path])
    if "://" not in place:
        assert from_hub("somebody/pictures", "train", "test", ("image", "label"), "").train.decode(FIRST)
