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

from pipetransformer.data import image_sources
from pipetransformer.data.image_sources import (
    IDX_FILES,
    ImageSource,
    ImageSplits,
    find_files,
    from_arrays,
    from_folder,
    from_hub,
    packaged_folder,
    read_idx,
)
from pipetransformer.errors import UserError


def write_folder(root: Path, **splits: dict[str, list[tuple[int, int, int]]]) -> Path:
    """One 4x4 picture of each colour, by split and class."""
    for split, classes in splits.items():
        for name, colours in classes.items():
            (root / split / name).mkdir(parents=True)
            for number, colour in enumerate(colours):
                Image.new("RGB", (4, 4), colour).save(root / split / name / f"{number}.png")
    return root


FIRST = np.array([0])
RED, GREEN, BLUE = (255, 0, 0), (0, 255, 0), (0, 0, 255)


def test_a_folder_gives_classes_in_alphabetical_order(tmp_path: Path) -> None:
    write_folder(tmp_path, train={"dog": [GREEN], "cat": [RED, BLUE]}, val={"dog": [BLUE]})
    found = from_folder(tmp_path)
    assert found.classes == ("cat", "dog")
    assert found.train.labels.tolist() == [0, 0, 1]
    assert [tuple(picture[0, 0]) for picture in found.train.decode(np.arange(3))] == [RED, BLUE, GREEN]
    assert (found.evaluation_name, found.evaluation.labels.tolist()) == ("val", [1])


@pytest.mark.parametrize("name", ["test", "val", "validation"])
def test_the_evaluation_folder_may_have_any_usual_name(tmp_path: Path, name: str) -> None:
    write_folder(tmp_path, train={"cat": [RED]}, **{name: {"cat": [RED]}})
    assert from_folder(tmp_path).evaluation_name == name


def test_other_files_are_left_out(tmp_path: Path) -> None:
    write_folder(tmp_path, train={"cat": [RED]}, test={"cat": [RED]})
    (tmp_path / "train" / "cat" / "notes.txt").write_text("hello")
    assert len(from_folder(tmp_path).train) == 1


def test_grey_files_are_read_as_colour(tmp_path: Path) -> None:
    write_folder(tmp_path, train={"cat": [RED]}, test={"cat": []})
    Image.new("L", (4, 4), 7).save(tmp_path / "test" / "cat" / "grey.png")
    assert from_folder(tmp_path).evaluation.decode(FIRST)[0].tolist() == np.full((4, 4, 3), 7).tolist()


@pytest.mark.parametrize("name", ["a[b]", "c*", "what?", "[x", "é ü"])
def test_a_class_may_have_any_name(tmp_path: Path, name: str) -> None:
    write_folder(tmp_path, train={name: [RED, GREEN], "cat": [BLUE]}, test={name: [RED]})
    found = from_folder(tmp_path)
    assert sorted(found.classes) == sorted(["cat", name])
    assert np.bincount(found.train.labels)[found.classes.index(name)] == 2
    assert len(found.evaluation) == 1


def test_pictures_in_folders_below_a_class_belong_to_it(tmp_path: Path) -> None:
    write_folder(tmp_path, train={"cat": [RED], "cat/young": [GREEN], "cat/young/grey": [BLUE], "dog": [RED]}, test={})
    (tmp_path / "test").mkdir()
    found = from_folder(tmp_path)
    assert (found.classes, found.train.labels.tolist()) == (("cat", "dog"), [0, 0, 0, 1])
    assert [tuple(picture[0, 0]) for picture in found.train.decode(np.arange(3))] == [RED, GREEN, BLUE]


@pytest.mark.parametrize("suffix", ["tif", "TIFF", "jpg", "JPEG", "pgm", "gif", "webp", "bmp"])
def test_every_usual_format_is_read(tmp_path: Path, suffix: str) -> None:
    write_folder(tmp_path, train={"cat": []}, test={"cat": []})
    Image.new("L", (4, 4), 200).save(tmp_path / "train" / "cat" / f"grey.{suffix}")
    source = from_folder(tmp_path).train
    assert source.errors() == []
    assert source.decode(FIRST)[0].shape == (4, 4, 3)
    assert abs(int(source.decode(FIRST)[0][0, 0, 0]) - 200) <= 2


def test_hidden_files_and_hidden_or_empty_folders_are_left_out(tmp_path: Path) -> None:
    write_folder(
        tmp_path, train={"cat": [RED], ".checkpoints": [GREEN], "empty/below": []}, test={"cat": [], "bird": []}
    )
    Image.new("RGB", (4, 4), GREEN).save(tmp_path / "train" / "cat" / "._0.png")
    found = from_folder(tmp_path)
    assert (found.classes, found.train.labels.tolist()) == (("cat",), [0])


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_class_whose_files_are_no_pictures_is_named(tmp_path: Path, split: str) -> None:
    write_folder(tmp_path, train={"cat": [RED], "dog": [RED]}, test={"cat": [RED]})
    (tmp_path / split / "dog").mkdir(exist_ok=True)
    (tmp_path / split / "dog" / "0.png").unlink(missing_ok=True)
    (tmp_path / split / "dog" / "0.heic").write_bytes(b"")
    with pytest.raises(ValueError, match=rf"{split}/dog has 1 files and no pictures, the first is 0\.heic"):
        from_folder(tmp_path)


def test_a_folder_without_evaluation_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path, train={"cat": [RED]})
    with pytest.raises(ValueError, match=r"not an image folder; give a folder with train/<class>"):
        from_folder(tmp_path)


def test_a_folder_without_training_classes_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path, test={"cat": [RED]})
    with pytest.raises(ValueError, match="not an image folder"):
        from_folder(tmp_path)


def test_a_class_that_training_lacks_is_named(tmp_path: Path) -> None:
    write_folder(tmp_path, train={"cat": [RED]}, test={"cat": [RED], "bird": [RED]})
    with pytest.raises(ValueError, match="1 classes that train/ lacks: bird"):
        from_folder(tmp_path)


def test_a_file_that_is_no_picture_is_named(tmp_path: Path) -> None:
    write_folder(tmp_path, train={"cat": []}, test={"cat": []})
    (tmp_path / "train" / "cat" / "broken.png").write_bytes(b"hello")
    with pytest.raises(ValueError, match=r"broken\.png cannot be read"):
        from_folder(tmp_path).train.decode(FIRST)


def test_the_hub_gives_grey_and_colour_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    features = datasets.Features({"img": datasets.Image(), "kind": datasets.ClassLabel(names=["cat", "dog"])})
    images = [Image.new("RGB", (5, 4), RED), Image.new("L", (5, 4), 9), Image.new("RGBA", (5, 4), (*BLUE, 255))]
    rows = datasets.Dataset.from_dict({"img": images, "kind": [0, 1, 0]}, features=features)
    monkeypatch.setattr(image_sources, "load_hub", lambda name, split, local: rows)
    found = from_hub("owner/data", "train", "test", ("img", "kind"), "a folder")
    assert found.classes == ("cat", "dog")
    assert found.train.labels.tolist() == [0, 1, 0]
    assert [picture.shape for picture in found.train.decode(np.arange(3))] == [(4, 5, 3), (4, 5, 1), (4, 5, 3)]
    assert found.evaluation_name == "test"


def from_rows(monkeypatch: pytest.MonkeyPatch, pictures: list[Any], columns: tuple[str, str]) -> ImageSplits:
    features = datasets.Features({"img": datasets.Image(), "kind": datasets.ClassLabel(names=["cat", "dog"])})
    rows = datasets.Dataset.from_dict({"img": pictures, "kind": [0] * len(pictures)}, features=features)
    monkeypatch.setattr(image_sources, "load_hub", lambda name, split, local: rows)
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
    monkeypatch.setattr("pipetransformer.data.image_sources.load_hub", lambda *_: rows)
    source = from_hub("somebody/pictures", "train", "test", ("image", "label"), "").train
    with pytest.raises(UserError, match="outside of the data's own files"):
        source.decode(FIRST)
    with pytest.raises(UserError, match="outside of the data's own files"):
        source.channels(FIRST)
    monkeypatch.setattr("pipetransformer.data.image_sources.download_folders", lambda _: [tmp_path])
    if "://" not in place:
        assert from_hub("somebody/pictures", "train", "test", ("image", "label"), "").train.decode(FIRST)
