"""Tables and folders of pictures with labels: where the pictures lie, the task that is chosen, splits and weights."""

import io
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas
import pytest
import torch
from PIL import Image
from support.command import TIMEOUT_S

from pipetransformer.data.base import Data, ImageFormat, Split
from pipetransformer.data.images import picture_column
from pipetransformer.data.images.datasets import HubImages
from pipetransformer.data.images.table import TableImages
from pipetransformer.data.tables import spec as table_spec
from pipetransformer.data.tables import splits as table_splits
from pipetransformer.errors import UserError
from pipetransformer.models.base import Head

NUM, SIDE = 12, 6
PIXELS = np.random.default_rng(0).integers(0, 256, (NUM, SIDE, SIDE, 3), dtype=np.uint8)
KINDS = ["cat", "dog", "bird"]
LABELS = [KINDS[number % 3] for number in range(NUM)]
WANTED = ImageFormat(size=SIDE, mean=(0.0,), std=(1.0,))


def write_pictures(folder: Path) -> list[str]:
    """Paths, from the parent of the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, pixels in enumerate(PIXELS):
        Image.fromarray(pixels).save(folder / f"{number}.png")
    return [f"{folder.name}/{number}.png" for number in range(NUM)]


def png(pixels: np.ndarray) -> bytes:
    content = io.BytesIO()
    Image.fromarray(pixels).save(content, "PNG")
    return content.getvalue()


def write_lines(file: Path, **columns: Sequence[Any]) -> Path:
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def load(wanted: ImageFormat = WANTED, /, **options: Any) -> Data:
    spec = TableImages(**options)
    spec.check()
    data = spec.load(wanted)
    if spec.path is not None:
        assert spec.preflight() == len(data.train)
    return data


def pictures(split: Split) -> np.ndarray:
    """Shape (N, H, W, C) of uint8."""
    return (split.inputs(range(len(split)), None) * 255).round().byte().permute(0, 2, 3, 1).numpy()


def numbers(split: Split) -> list[int]:
    """Which of :data:`PIXELS` each picture is."""
    return [next(i for i in range(NUM) if np.array_equal(PIXELS[i], each)) for each in pictures(split)]


def as_csv(folder: Path) -> Path:
    paths = write_pictures(folder / "pictures")
    pandas.DataFrame({"image": paths, "label": LABELS}).to_csv(folder / "table.csv", index=False)
    return folder / "table.csv"


def as_lines(folder: Path) -> Path:
    return write_lines(folder / "table.jsonl", image=write_pictures(folder / "pictures"), label=LABELS)


def as_bytes(folder: Path) -> Path:
    frame = pandas.DataFrame({"image": [png(pixels) for pixels in PIXELS], "label": LABELS})
    frame.to_parquet(folder / "table.parquet")
    return folder / "table.parquet"


def as_features(folder: Path) -> datasets.Dataset:
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=KINDS)})
    cells = [{"bytes": png(pixels), "path": None} for pixels in PIXELS]
    labels = [KINDS.index(label) for label in LABELS]
    return datasets.Dataset.from_dict({"image": cells, "label": labels}, features=features)


def as_parquet(folder: Path) -> Path:
    as_features(folder).to_parquet(folder / "table.parquet")
    return folder / "table.parquet"


def as_saved(folder: Path) -> Path:
    as_features(folder).save_to_disk(folder / "saved")
    return folder / "saved"


def as_classes(folder: Path) -> Path:
    for number, (pixels, label) in enumerate(zip(PIXELS, LABELS, strict=True)):
        (folder / "classes" / label).mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(folder / "classes" / label / f"{number}.png")
    return folder / "classes"


WAYS = [as_csv, as_lines, as_bytes, as_parquet, as_saved, as_classes]


@pytest.mark.parametrize("write", WAYS)
def test_pictures_and_labels_are_found_wherever_they_lie(write: Callable[[Path], Path], tmp_path: Path) -> None:
    data = load(path=str(write(tmp_path)), eval_fraction=0.25)
    splits = data.train, *data.evaluation
    assert [split.name for split in splits] == ["train", "held_out"]
    assert [len(split) for split in splits] == [9, 3]
    assert sorted(number for split in splits for number in numbers(split)) == [*range(NUM)]
    names = data.task.head.labels
    assert sorted(names) == sorted(KINDS)
    for split in splits:
        named = [names[target] for target in split.targets(range(len(split))).tolist()]
        assert named == [LABELS[number] for number in numbers(split)]
    assert (data.task.head.kind, data.input_shape, data.random_transform) == ("image", (3, SIDE, SIDE), False)


@pytest.mark.parametrize("write", WAYS)
def test_the_draw_of_held_out_pictures_is_fixed(write: Callable[[Path], Path], tmp_path: Path) -> None:
    path = str(write(tmp_path))
    one, two = (load(path=path, eval_fraction=0.25) for _ in range(2))
    assert numbers(one.train) == numbers(two.train)
    assert one.train.identity() == two.train.identity() != one.evaluation[0].identity()


@pytest.mark.parametrize(
    ("labels", "task", "names", "targets"),
    [
        (["b", "a", "b"], "classification", ("a", "b"), [1, 0, 1]),
        ([3, 1, 3], "classification", ("1", "3"), [1, 0, 1]),
        ([0.5, 2.0, -1e3], "regression", (), [0.5, 2.0, -1000.0]),
        ([0.0, 1.0, 1.0], "regression", (), [0.0, 1.0, 1.0]),
        ([["x"], [], ["y", "x"]], "multi_label_classification", ("x", "y"), [[1, 0], [0, 0], [1, 1]]),
    ],
)
def test_labels_of_any_kind_choose_the_task(
    labels: list[Any], task: str, names: tuple[str, ...], targets: list[Any], tmp_path: Path
) -> None:
    table = write_lines(tmp_path / "all.jsonl", image=write_pictures(tmp_path / "p")[:3], label=labels)
    data = load(path=str(table), eval_path=str(table))
    assert (data.task.name, data.task.head.labels) == (task, names)
    assert data.task.head.num_outputs == (len(names) or 1)
    assert data.train.targets([0, 1, 2]).tolist() == targets
    assert data.note.startswith("label is ")
    assert len(data.warnings) == (task == "regression" and all(target.is_integer() for target in targets))
    perfect = np.array(targets)
    assert max(data.train.score(perfect).values()) == pytest.approx(1)


@pytest.mark.parametrize(("write", "has_files"), [(as_csv, True), (as_lines, True), (as_bytes, False)])
def test_a_table_that_can_be_trained_on_can_be_predicted(
    write: Callable[[Path], Path], has_files: bool, tmp_path: Path
) -> None:
    table = write(tmp_path)
    head = Head("image", 3, tuple(sorted(KINDS)))
    found = TableImages(path="away").unlabelled(table, WANTED, head)
    assert numbers(found.split) == [*range(NUM)]
    rows = [*found.split.rows(np.eye(3)[[0] * NUM])]
    assert [row["row"] for row in rows] == [*range(NUM)]
    assert [Path(row["file"]).name for row in rows if "file" in row] == [f"{n}.png" for n in range(NUM)] * has_files
    with pytest.raises(UserError, match=r"dataset\.image=photo: .* has no such column"):
        TableImages(path="away", image="photo").unlabelled(table, WANTED, head)


def test_splits_are_taken_by_the_names_of_files_or_of_folders(tmp_path: Path) -> None:
    paths = write_pictures(tmp_path / "tables" / "pictures")
    for name, rows in (("train", slice(0, 6)), ("validation", slice(6, 9)), ("test", slice(9, 12))):
        write_lines(tmp_path / "tables" / f"{name}.jsonl", image=paths[rows], label=LABELS[rows])
        for number in range(NUM)[rows]:
            (tmp_path / "folders" / name / LABELS[number]).mkdir(parents=True, exist_ok=True)
            Image.fromarray(PIXELS[number]).save(tmp_path / "folders" / name / LABELS[number] / f"{number}.png")
    for folder in ("tables", "folders"):
        for options, name, rows in (({}, "validation", range(6, 9)), ({"eval_split": "test"}, "test", range(9, 12))):
            data = load(path=str(tmp_path / folder), **options)
            assert (data.evaluation[0].name, sorted(numbers(data.evaluation[0]))) == (name, [*rows])
            assert sorted(numbers(data.train)) == [*range(6)]
        swapped = load(path=str(tmp_path / folder), train_split="test", eval_split="train")
        assert sorted(numbers(swapped.train)) == [9, 10, 11]


@pytest.mark.parametrize("below", [".", "unknown", "test"])
def test_test_pictures_without_classes_are_not_evaluated_on(below: str, tmp_path: Path) -> None:
    as_classes(tmp_path).rename(tmp_path / "train")
    write_pictures(tmp_path / "test" / below)
    data = load(path=str(tmp_path), eval_fraction=0.25)
    assert (len(data.train), data.evaluation[0].name, len(data.evaluation[0])) == (9, "held_out", 3)
    (told,) = data.warnings
    assert told.startswith(
        f"the split test is not evaluated on, because {tmp_path / 'test'} has pictures and no folders"
    )
    assert told.endswith("a part of train (dataset.eval_fraction=0.25) is instead")
    with pytest.raises(
        UserError, match=r"test has pictures and no folders of the classes .* another folder by dataset"
    ):
        load(path=str(tmp_path), eval_split="test")
    shutil.copytree(tmp_path / "train", tmp_path / "val")
    data = load(path=str(tmp_path))
    assert (data.evaluation[0].name, data.warnings) == ("val", ())
    data = HubImages(path=str(tmp_path)).load(WANTED)
    assert (data.evaluation[0].name, len(data.warnings)) == ("val", 1)
    shutil.rmtree(tmp_path / "val")
    assert len(HubImages(path=str(tmp_path), validation_fraction=0.25).load(WANTED).train) == 9
    with pytest.raises(UserError, match=r"the test split has no pictures .* by dataset\.validation_fraction="):
        HubImages(path=str(tmp_path)).preflight()


def test_tables_of_test_pictures_without_labels_are_not_evaluated_on(tmp_path: Path) -> None:
    paths = write_pictures(tmp_path / "pictures")
    write_lines(tmp_path / "train.jsonl", image=paths, label=LABELS)
    write_lines(tmp_path / "test.jsonl", image=paths[:3])
    data = load(path=str(tmp_path), eval_fraction=0.25)
    assert (len(data.train), data.evaluation[0].name, len(data.warnings)) == (9, "held_out", 1)


def test_the_folder_to_train_on_is_not_evaluated_on(tmp_path: Path) -> None:
    as_classes(tmp_path).rename(tmp_path / "validation")
    data = load(path=str(tmp_path), train_split="validation", eval_fraction=0.25)
    assert (len(data.train), data.evaluation[0].name, len(data.evaluation[0])) == (9, "held_out", 3)
    assert not {*numbers(data.train)} & {*numbers(data.evaluation[0])}
    with pytest.raises(UserError, match=r"dataset\.eval_split=val: there is no folder"):
        load(path=str(tmp_path), train_split="validation", eval_split="val")
    with pytest.raises(UserError, match=r"dataset\.eval_split=train would evaluate on the training data; name another"):
        HubImages(hub_name="owner/data", eval_split="train").check()


@pytest.mark.parametrize("write", WAYS)
def test_limits_draw_the_same_pictures_and_keep_all_classes(write: Callable[[Path], Path], tmp_path: Path) -> None:
    data = load(path=str(write(tmp_path)), max_train_samples=2, max_eval_samples=1, eval_fraction=0.5)
    assert (len(data.train), len(data.evaluation[0]), len(data.task.head.labels)) == (2, 1, 3)


def test_a_hub_data_set_is_read_by_name_configuration_and_revision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[object, ...]] = []
    rows = as_features(tmp_path)

    def load_dataset(*names: object, revision: str | None) -> datasets.DatasetDict:
        asked.append((*names, revision))
        return datasets.DatasetDict({"train": rows, "test": rows.select(range(3))})

    monkeypatch.setattr(table_splits, "load_dataset", load_dataset)
    monkeypatch.setattr(table_spec, "find_on_hub", lambda *_: None)
    spec = TableImages(hub="owner/birds", config="small", revision="v2")
    spec.check()
    assert spec.preflight() is None
    data = spec.load(WANTED)
    assert asked == [("owner/birds", "small", "v2")]
    assert (numbers(data.train), data.evaluation[0].name, spec.name) == ([*range(NUM)], "test", "birds")
    assert data.train.identity() == spec.load(WANTED).train.identity() != data.evaluation[0].identity()


def test_a_row_of_the_hub_names_no_file_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path, *_) = write_pictures(tmp_path / "pictures")
    cells = [{"bytes": None, "path": str(tmp_path / path)}] * 4
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=KINDS)})
    rows = datasets.Dataset.from_dict({"image": cells, "label": [0, 1, 2, 0]}, features=features)
    monkeypatch.setattr(table_splits, "load_dataset", lambda *_, **__: datasets.DatasetDict({"train": rows}))
    with pytest.raises(UserError, match="leads out of"):
        TableImages(hub="owner/birds").load(WANTED)
    assert TableImages(hub="owner/birds", root=str(tmp_path)).load(WANTED).train.inputs([0], None).shape[1:] == (
        3,
        6,
        6,
    )


def test_paths_begin_in_the_root_that_is_given(tmp_path: Path) -> None:
    write_pictures(tmp_path / "elsewhere" / "pictures")
    (tmp_path / "tables").mkdir()
    paths = [f"pictures/{number}.png" for number in range(NUM)]
    paths[3] = str(tmp_path / "elsewhere" / paths[3])
    table = write_lines(tmp_path / "tables" / "table.jsonl", image=paths, label=LABELS)
    data = load(path=str(table), eval_path=str(table), root=str(tmp_path / "elsewhere"))
    assert numbers(data.train) == [*range(NUM)]


def test_grey_pictures_are_read_as_colour(tmp_path: Path) -> None:
    for number in range(4):
        Image.fromarray(PIXELS[number, ..., 0]).save(tmp_path / f"{number}.png")
    paths = [f"{number}.png" for number in range(4)]
    table = write_lines(tmp_path / "table.jsonl", image=paths, label=LABELS[:4])
    data = load(path=str(table), eval_path=str(table))
    assert data.input_shape == (3, SIDE, SIDE)
    assert pictures(data.train)[2].tolist() == PIXELS[2][..., :1].repeat(3, 2).tolist()
    assert load(ImageFormat(num_channels=1), path=str(table)).input_shape == (1, SIDE, SIDE)


def test_nothing_is_decoded_before_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []
    original = picture_column.read_picture
    monkeypatch.setattr(
        picture_column, "read_picture", lambda stored, name: read.append(stored) or original(stored, name)
    )
    data = TableImages(path=str(as_csv(tmp_path))).load(WANTED)
    read.clear()
    data.train.inputs([4, 2], None)
    assert len(read) == 2


@pytest.mark.parametrize("weights", ["balanced", [1.0, 2.0, 4.0], {"cat": 2.0, "dog": 4.0, "bird": 1.0}])
def test_weights_and_smoothing_are_those_of_torch(weights: Any, tmp_path: Path) -> None:
    labels = [KINDS[0]] * 7 + KINDS[1:] + [KINDS[0]] * 3
    table = write_lines(tmp_path / "t.jsonl", image=write_pictures(tmp_path / "p"), label=labels)
    data = load(path=str(table), eval_path=str(table), class_weights=weights, label_smoothing=0.1)
    by_class = [1.0, 2.0, 4.0] if weights != "balanced" else [12 / 3, 12 / (3 * 10), 12 / 3]  # bird, cat, dog
    targets = data.train.targets(range(NUM))
    output = torch.from_numpy(np.random.default_rng(0).normal(size=(NUM, 3)))
    expected = torch.nn.functional.cross_entropy(
        output, targets, torch.tensor(by_class, dtype=torch.float64), label_smoothing=0.1
    )
    assert data.train.loss_weights is not None
    found = data.task.loss(output, targets.double()).sum() / data.train.loss_weights.sum()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("file", ["metadata.csv", "classes.json", "state.json"])
def test_files_beside_folders_of_classes_do_not_make_them_tables(file: str, tmp_path: Path) -> None:
    classes = as_classes(tmp_path)
    for split in ("train", "val"):
        shutil.copytree(classes, tmp_path / "data" / split)
    (tmp_path / "data" / file).write_text("[]")
    data = load(path=str(tmp_path / "data"))
    assert (data.evaluation[0].name, len(data.train), len(data.evaluation[0])) == ("val", NUM, NUM)


def test_a_table_that_is_named_as_the_split_is_read_beside_the_folders_of_its_pictures(tmp_path: Path) -> None:
    paths = [f"train/{label}/{number}.png" for number, label in enumerate(LABELS)]
    as_classes(tmp_path).rename(tmp_path / "train")
    for name in ("train", "val"):
        write_lines(tmp_path / f"{name}.jsonl", image=paths, label=["one", "two"] * (NUM // 2))
    assert load(path=str(tmp_path)).task.head.labels == ("one", "two")


def test_classes_of_folders_may_be_named_in_order_and_some_may_have_no_folder(tmp_path: Path) -> None:
    folder = as_classes(tmp_path)
    shutil.rmtree(folder / "bird")
    data = load(path=str(folder), labels=["dog", "bird", "cat"], eval_fraction=0.5)
    assert data.task.head.labels == ("dog", "bird", "cat")
    targets = data.train.targets(range(len(data.train))).tolist()
    assert targets == [{"dog": 0, "cat": 2}[LABELS[number]] for number in numbers(data.train)]
    with pytest.raises(UserError, match=r"has 1 classes that dataset\.labels= lacks: dog"):
        load(path=str(folder), labels=["bird", "cat"])


@pytest.mark.parametrize(
    ("transforms", "names"),
    [
        (["RGB", "RandomHorizontalFlip"], ""),
        (
            [{"name": "Resize", "size": 8}, {"name": "CenterCrop", "size": 6}, "RandomHorizontalFlip"],
            "Resize, CenterCrop",
        ),
    ],
)
def test_transforms_that_a_saved_model_lacks_are_told(transforms: list[Any], names: str, tmp_path: Path) -> None:
    warnings = load(path=str(as_csv(tmp_path)), transforms=transforms).warnings
    assert len(warnings) == bool(names)
    assert all(f"has {names}, also for evaluation" in warning for warning in warnings)


def test_class_folders_take_weights_and_smoothing_too(tmp_path: Path) -> None:
    data = load(path=str(as_classes(tmp_path)), class_weights="balanced", label_smoothing=0.1, eval_fraction=0.25)
    np.testing.assert_allclose(data.train.loss_weights, np.ones(9))
    assert data.note == ""
    shutil.rmtree(tmp_path / "classes" / "bird")
    told = load(path=str(tmp_path / "classes"), eval_fraction=0.25, metrics=["f1"]).note
    assert told == "f1 is that of the class dog, the second (dataset.labels= names them in order)"
    output = torch.zeros(1, 3)
    assert data.task.loss(output, torch.tensor([0.0])).item() == pytest.approx(np.log(3))


def test_several_labels_are_mixed_with_those_of_the_partner(tmp_path: Path) -> None:
    labels = [[name] for name in LABELS]
    table = write_lines(tmp_path / "t.jsonl", image=write_pictures(tmp_path / "p"), label=labels)
    data = load(path=str(table), mixup=0.8)
    assert data.train.mixing is not None
    assert data.train.mixing.num_outputs == 3
    targets = torch.tensor([[0.25, 0.75, 0.0]], dtype=torch.float64)
    logits = torch.zeros(1, 3, dtype=torch.float64)
    assert data.task.loss(logits, targets).item() == pytest.approx(np.log(2))


def test_pictures_to_predict_are_transformed_as_those_of_evaluation(tmp_path: Path) -> None:
    table = as_csv(tmp_path)
    spec = TableImages(path=str(table), eval_path=str(table), transforms=["RandomVerticalFlip", "Grayscale"])
    data = spec.load(WANTED)
    samples = spec.unlabelled(tmp_path / "pictures", WANTED, data.task.head)
    files = [row["file"] for row in samples.split.rows(np.eye(3)[[0] * NUM])]
    order = [int(Path(file).stem) for file in files]
    assert samples.input_shape == (3, SIDE, SIDE)
    assert torch.equal(samples.split.inputs(range(NUM), None), data.evaluation[0].inputs(order, None))


@pytest.mark.parametrize(
    ("labels", "predicted", "expected"),
    [
        ([["a"], ["b"], ["a", "b"]], [0.9, 0.6], ["a", "b"]),
        ([["a"], ["b"], ["a", "b"]], [0.2, 0.1], []),
        (["a", "b", "a"], [0.2, 0.8], "b"),
        ([0.5, 1.5, 2.5], 1.25, 1.25),
    ],
)
def test_predictions_are_of_the_kind_of_the_labels(
    labels: list[Any], predicted: Any, expected: Any, tmp_path: Path
) -> None:
    paths = write_pictures(tmp_path / "p")[:3]
    table = str(write_lines(tmp_path / "t.jsonl", image=paths, label=labels))
    spec = TableImages(path=table, eval_path=table)
    head = spec.load(WANTED).task.head
    split = spec.unlabelled(tmp_path / paths[0], WANTED, head).split
    assert next(split.rows(np.array([predicted])))["prediction"] == expected
    logits = torch.tensor([[0.0] * head.num_outputs])
    found = split.predict(logits, [0], None).tolist()
    assert found == ([0.0] if not head.labels else [[0.5, 0.5]])


def test_the_launcher_looks_at_tables_of_pictures_without_torch(tmp_path: Path) -> None:
    code = f"""
import sys
from pipetransformer.data.images.table import TableImages
for path in ({str(as_csv(tmp_path))!r}, {str(as_classes(tmp_path))!r}):
    spec = TableImages(path=path, transforms=["RandAugment"], mixup=0.8, eval_fraction=0.25)
    spec.check()
    print("datasets" in sys.modules, spec.preflight())
print([name for name in ("torch", "torchvision", "timm") if name in sys.modules])
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    assert result.stdout.split("\n")[:-1] == ["False 9", "True 9", "[]"]
