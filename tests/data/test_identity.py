"""Contract of every kind of split: its identity is that of what the model is given, no more and no less."""

import copy
import gzip
import io
import json
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas
import pytest
from PIL import Image

from pipetransformer.data.base import Data, DatasetSpec, ImageFormat, Split, TextFormat
from pipetransformer.data.images import folders, sources
from pipetransformer.data.images import split as image_split
from pipetransformer.data.images.datasets import HubImages, IdxImages
from pipetransformer.data.images.sources import IDX_FILES, from_arrays, from_list
from pipetransformer.data.images.split import ImageSplit
from pipetransformer.data.images.table import TableImages
from pipetransformer.data.map_style import MapStyleSplit
from pipetransformer.data.tasks import image_classification, text_classification
from pipetransformer.data.text.causal_lm import CausalLM
from pipetransformer.data.text.document_split import DocumentSplit
from pipetransformer.data.text.glue import Glue
from pipetransformer.data.text.split import LabelledTexts, Ragged, Tokens
from pipetransformer.data.text.squad import Squad
from pipetransformer.data.text.squad_split import AnsweredSplit, SquadSplit
from pipetransformer.data.text.table import TextDataset
from pipetransformer.data.text.tagged_split import TaggedSplit
from pipetransformer.data.text.token_classification import TokenClassification
from pipetransformer.data.unlabelled import ScoredSplit

SIDE, NUM_TRAIN = 6, 8
GREY, COLOUR = ImageFormat(mean=(0.5,), std=(0.5,)), ImageFormat(size=4, num_channels=3)
Write = Callable[[Path, int, int], None]


def random_pictures(changed: int) -> np.ndarray:
    """Shape (NUM_TRAIN, SIDE, SIDE); one pixel of the first follows ``changed``."""
    images = np.random.default_rng(0).integers(0, 200, (NUM_TRAIN, SIDE, SIDE), dtype=np.uint8)
    images[0, 2, 3] = changed
    return images


def write_idx(folder: Path, changed: int, label: int) -> None:
    images = random_pictures(changed)
    labels = np.full(NUM_TRAIN, label, dtype=np.uint8)
    for name, array in zip(IDX_FILES, (images, labels, images[:3], labels[:3]), strict=True):
        header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
        (folder / f"{name}.gz").write_bytes(gzip.compress(header + array.tobytes()))


def write_pictures(folder: Path, changed: int, label: int) -> None:
    """Labels are folders here, and with them the names of the files."""
    for name, images in (("train", random_pictures(changed)), ("test", random_pictures(7))):
        for index, image in enumerate(images):
            file = folder / name / ("dog" if index == NUM_TRAIN - 1 else "cat") / f"{index}.bmp"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(file)
            os.utime(file, ns=(0, 10**18 + int(image[2, 3])))  # the clock of a disk is coarser than a test is quick


def write_hub(folder: Path, changed: int, label: int) -> None:
    """What the pictures of ``load_hub`` are made of."""
    np.savez(folder / "hub.npz", images=random_pictures(changed), labels=np.full(NUM_TRAIN, label))


def write_path_table(folder: Path, changed: int, label: int) -> None:
    write_pictures(folder, changed, 0)
    for name in ("train", "test"):
        files = sorted(str(file.relative_to(folder)) for file in (folder / name).rglob("*.bmp"))
        rows = [f"{file},{(label + number) % 2}" for number, file in enumerate(files)]
        (folder / f"{name}.csv").write_text("\n".join(["image,label", *rows]) + "\n")


def write_picture_table(folder: Path, changed: int, label: int) -> None:
    """The pictures are in the table itself."""
    for name, images in (("train", random_pictures(changed)), ("test", random_pictures(7))):
        contents = [io.BytesIO() for _ in images]
        for image, content in zip(images, contents, strict=True):
            Image.fromarray(image).save(content, "PNG")
        labels = (np.arange(len(images)) + label) % 2
        frame = pandas.DataFrame({"image": [content.getvalue() for content in contents], "label": labels})
        frame.to_parquet(folder / f"{name}.parquet")


def write_texts(folder: Path, changed: int, label: int) -> None:
    texts = [f"it is {number} of a cat" for number in range(NUM_TRAIN)]
    texts[0] += str(changed)
    for name in ("train", "dev"):
        rows = [f"{text} {name}\t{label}" for text in texts]
        (folder / f"{name}.tsv").write_text("\n".join(["sentence\tlabel", *rows]) + "\n")


def write_questions(folder: Path, changed: int, label: int) -> None:
    """Another label is the other of two right answers."""
    answers = [{"text": "it", "answer_start": 11 * label}]
    contexts = [f"it is of a it {number} cat {changed if number == 0 else 0}" for number in range(2 * NUM_TRAIN)]
    asked = [{"id": str(number), "question": "a cat", "answers": answers} for number in range(2 * NUM_TRAIN)]
    paragraphs = [{"context": text, "qas": [question]} for text, question in zip(contexts, asked, strict=True)]
    halves = (paragraphs[:NUM_TRAIN], paragraphs[NUM_TRAIN:])
    articles = [{"title": "", "paragraphs": half} for half in halves]
    (folder / "data.json").write_text(json.dumps({"data": articles}))


def write_tags(folder: Path, changed: int, label: int) -> None:
    texts = [["it", "is", str(number), *["of", "a", "cat", "that", "is", "not"]] for number in range(NUM_TRAIN)]
    texts[0][2] += str(changed)
    for name in ("train", "dev"):
        sentences = [
            "".join(f"{word} {tag}\n" for word, tag in zip(text, "abcdabcda"[label:] + "d", strict=False))
            for text in texts
        ]
        (folder / f"{name}.conll").write_text("\n".join([*sentences, f"{name} d\n"]))


def write_prompts(folder: Path, changed: int, label: int) -> None:
    """Another label divides each text at another place."""
    for name in ("train", "dev"):
        texts = [f"it is {number} of a cat that is not {name}" for number in range(NUM_TRAIN)]
        texts[0] = texts[0].replace("0", f"0{changed}")
        rows = [{"prompt": text[: 6 + label], "completion": text[6 + label :]} for text in texts]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_csv(folder: Path, changed: int, label: int) -> None:
    texts = [f"it is {number} of a cat" for number in range(NUM_TRAIN)]
    texts[0] += str(changed)
    for name in ("train", "dev"):
        rows = [f"{text} {name},{(label + number) % 2}" for number, text in enumerate(texts)]
        (folder / f"{name}.csv").write_text("\n".join(["text,label", *rows]) + "\n")
        os.utime(folder / f"{name}.csv", ns=(0, 10**18 + 2 * changed + label))  # as for pictures


@dataclass(frozen=True)
class Kind:
    """One way to get a split: ``write(folder, changed, label)`` makes the data, ``spec`` reads it."""

    write: Write
    spec: Callable[[Path], DatasetSpec]
    wanted: ImageFormat | None  # None: the tokenizer's
    split: type[Split]


KINDS = {
    "idx": Kind(write_idx, lambda folder: IdxImages(path=str(folder)), GREY, ImageSplit),
    "files": Kind(write_pictures, lambda folder: HubImages(path=str(folder)), COLOUR, ImageSplit),
    "files in memory": Kind(
        write_pictures, lambda folder: HubImages(path=str(folder), in_memory=True), COLOUR, ImageSplit
    ),
    "hub": Kind(write_hub, lambda folder: HubImages(hub_name=str(folder)), GREY, ImageSplit),
    "hub in memory": Kind(write_hub, lambda folder: HubImages(hub_name=str(folder), in_memory=True), GREY, ImageSplit),
    "table of paths": Kind(write_path_table, lambda folder: TableImages(path=str(folder)), COLOUR, ImageSplit),
    "table of pictures": Kind(write_picture_table, lambda folder: TableImages(path=str(folder)), COLOUR, ImageSplit),
    "glue": Kind(write_texts, lambda folder: Glue(path=str(folder), task="sst2"), None, LabelledTexts),
    "text": Kind(write_csv, lambda folder: TextDataset(path=str(folder)), None, LabelledTexts),
    "squad": Kind(
        write_questions, lambda folder: Squad(path=str(folder / "data.json"), eval_fraction=0.5), None, SquadSplit
    ),
    "tags": Kind(write_tags, lambda folder: TokenClassification(path=str(folder)), None, TaggedSplit),
    "prompts": Kind(
        write_prompts,
        lambda folder: CausalLM(path=str(folder), prompt="prompt", completion="completion"),
        None,
        DocumentSplit,
    ),
}
PICTURES, TEXTS = (
    [name for name, kind in KINDS.items() if (kind.wanted is None) == reads_text] for reads_text in (False, True)
)


class Source:
    """Data of one kind in a folder, written and loaded as a test asks."""

    def __init__(self, kind: Kind, folder: Path, text: TextFormat) -> None:
        self._kind, self._folder = kind, folder
        self.wanted = kind.wanted or text
        self.write()

    def write(self, changed: int = 1, label: int = 0) -> None:
        self._kind.write(self._folder, changed, label)

    def load(self, wanted: ImageFormat | TextFormat | None = None, **options: object) -> Data:
        return replace(self._kind.spec(self._folder), **options).load(wanted or self.wanted)  # pyright: ignore

    def identity(self, wanted: ImageFormat | TextFormat | None = None, **options: object) -> str:
        train = self.load(wanted, **options).train
        assert type(train) is self._kind.split
        return train.identity()


@pytest.fixture
def source(request: pytest.FixtureRequest, tmp_path: Path, text: TextFormat, monkeypatch: pytest.MonkeyPatch) -> Source:
    monkeypatch.setattr(sources, "load_hub", from_disk)
    return Source(KINDS[request.param], tmp_path, text)


def from_disk(folder: str, split: str, local_format: str) -> datasets.Dataset:
    arrays = np.load(Path(folder) / "hub.npz")
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])})
    images = [Image.fromarray(image) for image in arrays["images"]]
    return datasets.Dataset.from_dict({"image": images, "label": arrays["labels"].tolist()}, features=features)


def over(kinds: Any) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("source", list(kinds), indirect=True)


def test_every_kind_of_split_is_here() -> None:
    def final(kind: type[Split]) -> set[type[Split]]:
        below = kind.__subclasses__()
        return {kind}.union(*map(final, below)) if below else {kind}

    ours = {kind for kind in final(Split) if kind.__module__.startswith("pipetransformer.")}
    ours.remove(MapStyleSplit)  # a script's own, whose samples are tensors already: test_map_style.py
    ours -= {AnsweredSplit, ScoredSplit}  # of samples to predict, which no store keeps
    assert {kind for kind in ours if not kind.__abstractmethods__} == {kind.split for kind in KINDS.values()}


def test_a_split_must_say_its_identity() -> None:
    assert "identity" in Split.__abstractmethods__


@over(KINDS)
def test_two_loads_of_the_same_data_are_the_same(source: Source) -> None:
    assert source.identity() == source.identity()
    assert len(source.identity()) == 32


@over(KINDS)
def test_one_pixel_or_token_makes_it_another(source: Source) -> None:
    before = source.identity()
    source.write(changed=2)
    assert source.identity() != before


@over(KINDS)
def test_another_selection_of_samples_is_another(source: Source) -> None:
    identities = {source.identity(max_train_samples=limit) for limit in (None, NUM_TRAIN - 1, 2, 1)}
    assert len(identities) == 4


@over(
    ["idx", "hub in memory", "table of paths", "table of pictures", "glue", "text", "squad", "tags"]
)  # elsewhere the label is in the files' names or in the fingerprint
def test_labels_have_no_part_in_it(source: Source) -> None:
    before, targets = source.identity(), source.load().train.targets([0, 1])
    source.write(label=1)
    assert source.load().train.targets([0, 1]).tolist() != targets.tolist()
    assert source.identity() == before


@over(PICTURES)
@pytest.mark.parametrize("change", [{"mean": (0.4,)}, {"std": (0.25,)}, {"size": 5}, {"num_channels": 1}])
def test_another_image_format_is_another(source: Source, change: dict[str, Any]) -> None:
    assert isinstance(source.wanted, ImageFormat)
    colour = replace(source.wanted, num_channels=3)
    assert source.identity(colour) != source.identity(replace(colour, **change))


@over(PICTURES)
def test_a_normalisation_written_for_one_or_for_all_channels_is_the_same(source: Source) -> None:
    assert isinstance(source.wanted, ImageFormat)
    one = replace(source.wanted, num_channels=3, mean=(0.25,), std=(0.5,))
    assert source.identity(one) == source.identity(replace(one, mean=(0.25,) * 3, std=(0.5,) * 3))


@over(PICTURES)
@pytest.mark.parametrize("option", [{"augment": True}, {"transforms": ["RandAugment"]}, {"transforms": ["Grayscale"]}])
def test_another_transform_is_another(source: Source, option: dict[str, Any]) -> None:
    plain, transformed = source.load().train, source.load(**option).train
    assert plain.identity() == source.identity() != transformed.identity()


@pytest.mark.parametrize("part", ["TRANSFORM", "AUGMENTATION"])
def test_a_transform_that_works_otherwise_is_another(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    split = ImageSplit(
        "train", from_arrays(random_pictures(1), np.zeros(NUM_TRAIN)), GREY, image_classification(2), augment=True
    )
    before = split.identity()
    monkeypatch.setattr(image_split, part, "another one")
    assert split.identity() != before


@over(PICTURES)
def test_pictures_in_another_order_are_others(source: Source) -> None:
    train = source.load().train
    assert isinstance(train, ImageSplit)
    before = train.source.identity()
    assert train.source.take(np.arange(NUM_TRAIN)).identity() == before
    assert train.source.take(np.arange(NUM_TRAIN)[::-1]).identity() != before


@pytest.mark.parametrize(
    ("source", "options"),
    [("glue", {}), ("text", {}), ("squad", {"stride": 2}), ("tags", {}), ("prompts", {})],
    indirect=["source"],
)
def test_another_maximum_length_is_another_where_it_cuts(source: Source, options: dict[str, int]) -> None:
    assert source.identity(max_length=16, **options) != source.identity(max_length=14, **options)
    assert source.identity(max_length=200) == source.identity(max_length=201), "nothing is that long"


@over(TEXTS)
def test_another_padding_token_is_another(source: Source) -> None:
    assert isinstance(source.wanted, TextFormat)
    tokenizer = copy.deepcopy(source.wanted.tokenizer)
    tokenizer.pad_token = "[MASK]"
    assert source.identity(replace(source.wanted, tokenizer=tokenizer)) != source.identity()


def texts(ids: list[list[int]], type_ids: list[list[int]] | None = None) -> LabelledTexts:
    tokens = Tokens(Ragged.of(ids), None if type_ids is None else Ragged.of(type_ids), 0)
    return LabelledTexts("train", tokens, np.zeros(len(ids)), text_classification(2))


def test_where_a_text_ends_and_the_types_of_its_tokens_count() -> None:
    splits = [
        texts([[1, 2], [3]]),
        texts([[1], [2, 3]]),
        texts([[1, 2], [3]], [[0, 0], [0]]),
        texts([[1, 2], [3]], [[0, 1], [0]]),
    ]
    assert len({split.identity() for split in splits}) == len(splits)


@over(sorted({*KINDS} - {"hub", "hub in memory"}))  # whose splits are the same here
def test_training_and_evaluation_data_are_different(source: Source) -> None:
    data = source.load()
    assert data.train.identity() != data.evaluation[0].identity()


def test_a_file_counts_by_name_size_and_time(tmp_path: Path) -> None:
    write_pictures(tmp_path, 1, 0)
    first, spec = tmp_path / "train" / "cat" / "0.bmp", HubImages(path=str(tmp_path))

    def identity() -> str:
        return spec.load(COLOUR).train.identity()

    seen, facts = [identity()], first.stat()
    os.utime(first, ns=(facts.st_atime_ns, facts.st_mtime_ns + 1))
    seen.append(identity())
    first.write_bytes(first.read_bytes() + b"\0")
    os.utime(first, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    seen.append(identity())
    first.rename(first.with_name("00.bmp"))
    seen.append(identity())
    assert len({*seen}) == len(seen)


def test_files_are_told_apart_without_decoding_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_pictures(tmp_path, 1, 0)
    split = HubImages(path=str(tmp_path)).load(COLOUR).train
    monkeypatch.setattr(folders, "read_file", None)
    assert split.identity()


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    write_pictures(tmp_path, 1, 0)
    split = HubImages(path=str(tmp_path)).load(COLOUR).train
    (tmp_path / "train" / "cat" / "0.bmp").unlink()
    with pytest.raises(ValueError, match=r"0\.bmp cannot be looked at"):
        split.identity()


def test_pictures_without_a_stamp_are_told_apart_by_their_pixels() -> None:
    images = random_pictures(1)
    stored, drawn = from_arrays(images, np.zeros(NUM_TRAIN)), [image[..., None] for image in images]
    assert from_list(drawn, np.zeros(NUM_TRAIN)).identity() == stored.identity()
    assert from_arrays(random_pictures(2), np.zeros(NUM_TRAIN)).identity() != stored.identity()


def test_the_quick_identity_of_pictures_follows_them_to_another_folder_and_tells_others_apart(tmp_path: Path) -> None:
    for folder, changed in (("here", 1), ("there", 1), ("other", 2)):
        (tmp_path / folder).mkdir()
        write_pictures(tmp_path / folder, changed, 0)
    splits = [HubImages(path=str(tmp_path / name)).load(COLOUR).train for name in ("here", "there", "other")]
    here, there, other = (split.quick_identity() for split in splits)
    assert here == there != other
    assert splits[0].identity() != splits[1].identity(), "which goes by names and times"
