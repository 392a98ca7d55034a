"""What cannot be trained is refused before the first step, in words that say what to change."""

import gzip
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.jobs import TINY, Job, run_job
from support.pool import Pool
from support.texts import text_run, write_encoder, write_squad, write_table

Refuse = Callable[..., str]


@pytest.fixture
def refuse(pool: Pool, tmp_path: Path) -> Refuse:
    """The message with which a run on ``world_size`` devices is refused."""

    def run(*overrides: str, world_size: int = 1) -> str:
        job = run_job(pool, world_size, tmp_path / "run", *overrides)
        assert job.error
        assert not job.losses, "it is refused before the first step"
        return job.error

    return run


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("encoder"))


def write_idx(file: Path, values: np.ndarray) -> None:
    header = bytes((0, 0, 8, values.ndim)) + struct.pack(f">{values.ndim}I", *values.shape)
    file.write_bytes(gzip.compress(header + values.astype(np.uint8).tobytes()))


def write_mnist(folder: Path, labels: list[int]) -> Path:
    for part in ("train", "t10k"):
        write_idx(folder / f"{part}-images-idx3-ubyte.gz", np.zeros((len(labels), 8, 8)))
        write_idx(folder / f"{part}-labels-idx1-ubyte.gz", np.array(labels))
    return folder


@pytest.mark.thinned("-1-", "-2-", "overrides8")
@pytest.mark.parametrize(
    ("overrides", "world_size", "words"),
    [
        (["model.options.patch_size=3"], 1, ["8x8 pixels", "patches of 3", "model.image_size"]),
        (["model.num_channels=5"], 1, ["channels", "model.num_channels="]),
        (["model.options.num_heads=3"], 1, ["model.options"]),
        (["model.name=vit_of_nobody"], 1, ["model.name=vit_of_nobody", "<folder>"]),
        (
            ["freeze=schedule", "freeze.num_frozen=[1,9]"],
            1,
            ["freezes up to 9 blocks", "the model has 2", "freeze.num_frozen="],
        ),
        (
            ["dataset.transforms=[{name: RandomCrop, size: 4}]"],
            1,
            ["test split", "shape (1, 8, 8)", "(1, 4, 4)", "model.image_size=", "Resize or CenterCrop"],
        ),
        (["batch_size=65"], 1, ["batch_size=65", "64 training samples", "lower batch_size"]),
        (["batch_size=2", "parallel.num_replicas=4"], 4, ["parallel.num_replicas=4", "batch_size=2"]),
        (["batch_size=1", "model.options.depth=1"], 4, ["parallel.world_size=4", "3 layers", "batch_size=1"]),
        (["parallel.num_stages=2", "parallel.num_replicas=2"], 2, ["need 4 devices, and there are 2"]),
        (["parallel.num_stages=5"], 1, ["parallel.num_stages=5", "4 layers"]),
        (
            ["parallel.schedule=1f1b", "parallel.num_stages=2", "parallel.num_microbatches=1"],
            2,
            ["parallel.num_microbatches is at most 1", "parallel.schedule=gpipe"],
        ),
    ],
)
def test_a_run_that_does_not_fit_is_refused(
    refuse: Refuse, overrides: list[str], world_size: int, words: list[str]
) -> None:
    message = refuse(*TINY, *overrides, world_size=world_size)
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    "overrides",
    [
        ["dataset=cifar10", "dataset.hub_name=nobody/nothing"],
        ["dataset=image_folder", "dataset.hub_name=nobody/nothing"],
        ["model=vit", "model.name=nobody/nothing"],
        ["model=bert", "dataset=squad", "model.name=nobody/nothing"],
    ],
    ids=lambda overrides: " ".join(overrides),
)
def test_without_network_the_message_names_the_option_that_takes_a_folder(refuse: Refuse, overrides: list[str]) -> None:
    message = refuse("logger=none", *overrides)
    assert ("dataset.path=" if "dataset.hub_name" in overrides[1] else "model.name=<folder>") in message


def test_a_label_outside_the_classes_is_refused_for_pictures(refuse: Refuse, tmp_path: Path) -> None:
    folder = write_mnist(tmp_path, [0, 1, 10, 1])
    message = refuse("dataset=fashion_mnist", f"dataset.path={folder}", "batch_size=2", "logger=none")
    assert "10" in message
    assert "dataset.num_classes" in message


def test_a_label_outside_the_classes_is_refused_for_texts(refuse: Refuse, tmp_path: Path, encoder: Path) -> None:
    for name in ("train", "dev"):
        write_table(tmp_path / f"{name}.tsv", [0, 7])
    message = refuse(*text_run(encoder, "sst2", tmp_path))
    assert "'7'" in message
    assert "0 to 1" in message


def test_an_empty_split_is_refused(refuse: Refuse, tmp_path: Path, encoder: Path) -> None:
    write_table(tmp_path / "train.tsv", [])
    write_table(tmp_path / "dev.tsv", [1])
    message = refuse(*text_run(encoder, "sst2", tmp_path))
    assert "train" in message
    assert "dataset.path" in message


def test_an_answer_outside_its_context_is_refused(refuse: Refuse, tmp_path: Path, encoder: Path) -> None:
    message = refuse(*text_run(encoder, "squad", write_squad(tmp_path / "data.json", start=40)))
    assert "q1" in message
    assert "correct answer_start" in message


def test_the_smallest_budget_in_the_message_is_enough_and_less_is_not(pool: Pool, tmp_path: Path) -> None:
    wide = [*TINY, "model.options={patch_size: 4, embed_dim: 128, depth: 4, num_heads: 2}", "epochs=1"]

    def with_budget(name: str, gib: float) -> Job:
        return run_job(pool, 2, tmp_path / name, *wide, f"parallel.device_memory_gib={gib}")

    message = with_budget("nothing", 0.001).error
    told_gib = float(message.split("at least ")[1].split(" GiB")[0])
    assert told_gib > 0.002
    assert "raise parallel.device_memory_gib" in message
    assert "no plan fits" in with_budget("less", told_gib - 0.001).error
    enough = with_budget("enough", told_gib)
    assert not enough.error
    assert enough.summary["status"] == "completed"
