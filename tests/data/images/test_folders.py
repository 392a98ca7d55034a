from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pipetransformer.data.base import ImageFormat
from pipetransformer.data.images.datasets import HubImages
from pipetransformer.data.images.folders import from_folder, unlabelled_files
from pipetransformer.data.images.table import TableImages
from pipetransformer.errors import UserError
from pipetransformer.models.base import Head


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


def test_a_list_of_pictures_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    write_folder(tmp_path, few={"cat": [RED, BLUE]})
    (tmp_path / "list.txt").write_text("few/cat/0.png\nfew/cat/1.png\n", encoding="utf-8-sig")
    assert unlabelled_files(tmp_path / "list.txt")[0] == ["few/cat/0.png", "few/cat/1.png"]


def test_a_table_of_pictures_to_predict_is_no_list_of_files(tmp_path: Path) -> None:
    (tmp_path / "some.csv").write_text("file,label\na.png,1\n")
    with pytest.raises(UserError, match=r"some\.csv is a table, and the data of the run has none; give a folder"):
        unlabelled_files(tmp_path / "some.csv")


def test_pictures_to_predict_that_are_damaged_are_counted(tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        (tmp_path / name).write_bytes(b"hello")
    with pytest.raises(UserError, match=r"a\.png cannot be read as a picture .*; 1 more cannot be read"):
        HubImages(path="away").unlabelled(tmp_path, ImageFormat(size=4), Head("image", 2, ("cat", "dog")))


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


@pytest.mark.parametrize(
    ("there", "asked", "found"),
    [
        (("test", "val"), None, "test"),
        (("test", "val"), "val", "val"),
        (("test", "val"), "validation", "val"),
        (("val", "validation"), "validation", "validation"),
        (("test", "holdout"), "holdout", "holdout"),
    ],
)
def test_the_evaluation_folder_is_the_one_that_is_asked_for(
    tmp_path: Path, there: tuple[str, ...], asked: str | None, found: str
) -> None:
    write_folder(tmp_path, train={"cat": [RED]}, **{name: {"cat": [RED]} for name in there})
    assert from_folder(tmp_path, asked).evaluation_name == found


def test_an_evaluation_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    write_folder(tmp_path, train={"cat": [RED]})
    with pytest.raises(
        ValueError, match=r"eval_split=val: there is no folder .*/val; give a folder with train/<class>"
    ):
        from_folder(tmp_path, "val")
    write_folder(tmp_path, test={"cat": [RED]})
    with pytest.raises(ValueError, match=r"eval_split=val: there is no folder .*/val; there is test"):
        from_folder(tmp_path, "val")


def test_other_files_are_left_out(tmp_path: Path) -> None:
    write_folder(tmp_path, train={"cat": [RED]}, test={"cat": [RED]})
    for name in ("notes.txt", "0.HEIC", "1.heic", "README", "Thumbs.db"):
        (tmp_path / "train" / "cat" / name).write_text("hello")
    found = from_folder(tmp_path)
    assert len(found.train) == 1
    (told,) = found.warnings
    train = tmp_path / "train"
    counts = "2 of .heic, 1 of no ending, 1 of .txt"
    assert told.startswith(
        f"{train} has 4 files among its pictures that are left out ({counts}), the first is {train}/cat/0.HEIC; "
        "if they are pictures, convert or rename them to one of .png"
    )


@pytest.mark.parametrize("kind", [TableImages, HubImages])
def test_files_that_are_left_out_of_either_split_are_told(tmp_path: Path, kind: type[TableImages | HubImages]) -> None:
    write_folder(tmp_path, train={"cat": [RED], "dog": [BLUE]}, test={"cat": [RED]})
    for split in ("train", "test"):
        (tmp_path / split / "cat" / "0.heic").write_text("hello")
    told = kind(path=str(tmp_path)).load(ImageFormat(size=4)).warnings
    assert [text.partition(" has 1 files")[0] for text in told] == [str(tmp_path / "train"), str(tmp_path / "test")]


def test_a_link_to_a_folder_that_it_lies_in_is_not_followed(tmp_path: Path) -> None:
    write_folder(tmp_path, train={"cat": [RED], "cat/young": [GREEN], "dog": [RED]}, test={"cat": [RED]})
    write_folder(tmp_path / "away", others={"old": [BLUE]})
    (tmp_path / "train" / "cat" / "more").symlink_to(tmp_path / "away" / "others")
    (tmp_path / "train" / "cat" / "young" / "up").symlink_to("..")
    (tmp_path / "train" / "all").symlink_to(tmp_path)
    (tmp_path / "away" / "others" / "back").symlink_to(tmp_path / "train" / "cat")
    found = from_folder(tmp_path)
    assert (found.classes, found.train.labels.tolist()) == (("cat", "dog"), [0, 0, 0, 1])
    assert len(unlabelled_files(tmp_path / "train")[0]) == 4


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


@pytest.mark.parametrize("suffix", ["tif", "TIFF", "jpg", "JPEG", "jfif", "jpe", "pgm", "gif", "webp", "bmp"])
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
