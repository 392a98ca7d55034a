"""Models and datasets come from the hub by the commands of the README; here from a hub on this machine."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.command import Ended, command
from support.hub import Hub, serving
from support.jobs import ROOT, Job
from support.texts import write_encoder

SMALL = ("logger=none", "parallel=single", "epochs=1")
COMMANDS = {
    "questions": ("model=bert", "dataset=squad", "dataset.stride=4", "batch_size=2"),
    "pictures": ("model=vit", "model.name=somebody/small-vit", "dataset=cifar100", "batch_size=2"),
}
IN_TURN = """
import json, sys
from pipetransformer.command import main
commands = json.loads(sys.argv.pop())
for arguments in commands:
    sys.argv[1:] = arguments
    main()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def hub(folder: Path) -> Iterator[Hub]:
    hub = Hub(folder / "hub")
    with serving(hub):
        yield hub


@pytest.fixture(scope="module")
def ended(hub: Hub, folder: Path) -> Ended:
    """How two commands ended, one after the other in one process: imports take longest."""
    write_bert(hub.root / "models" / "google-bert" / "bert-base-uncased")
    write_questions(hub.root / "datasets" / "rajpurkar" / "squad")
    write_vit(hub.root / "models" / "somebody" / "small-vit")
    write_pictures(hub.root / "datasets" / "uoft-cs" / "cifar100")
    commands = json.dumps([[*SMALL, *options, f"hydra.run.dir={name}"] for name, options in COMMANDS.items()])
    variables = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": hub.url, "HF_HOME": str(folder / "home")}
    return command(folder, sys.executable, "-c", IN_TURN, commands, PYTHONPATH=str(ROOT), **variables)


def write_questions(folder: Path) -> None:
    """SQuAD as the hub has it: one parquet file of each split."""
    from datasets import Dataset

    for split, count in (("train", 6), ("validation", 4)):
        rows = {
            "id": [f"{split} {number}" for number in range(count)],
            "title": ["Birds"] * count,
            "context": ["a bird sings"] * count,
            "question": ["a bird"] * count,
            "answers": [{"text": ["bird"], "answer_start": [2]}] * count,
        }
        Dataset.from_dict(rows).to_parquet(folder / "plain_text" / f"{split}-00000-of-00001.parquet")


def write_pictures(folder: Path) -> None:
    """Pictures of noise in the columns of CIFAR-100."""
    from datasets import ClassLabel, Dataset, Features, Image
    from PIL.Image import fromarray

    features = Features({"img": Image(), "fine_label": ClassLabel(names=["apple", "fish"])})
    draw = np.random.default_rng(0)
    for split, count in (("train", 6), ("test", 4)):
        pictures = [fromarray(draw.integers(0, 256, (32, 32, 3), dtype=np.uint8)) for _ in range(count)]
        rows = Dataset.from_dict({"img": pictures, "fine_label": [0, 1] * (count // 2)}, features=features)
        rows.to_parquet(folder / "cifar100" / f"{split}-00000-of-00001.parquet")


def write_bert(folder: Path) -> None:
    from transformers import AutoConfig, AutoModel

    AutoModel.from_config(AutoConfig.from_pretrained(write_encoder(folder))).save_pretrained(folder)


def write_vit(folder: Path) -> None:
    import timm

    model = timm.create_model("vit_tiny_patch16_224", depth=2, embed_dim=12, num_heads=2, num_classes=5)
    timm.models.save_for_hf(
        model, folder, model_args={"depth": 2, "embed_dim": 12, "num_heads": 2}, safe_serialization="both"
    )


def assert_learned(hub: Hub, run: Path, ended: Ended, metric: str, split: str, files: set[str]) -> None:
    """The run came to its end with the hub's four samples to evaluate on, and took these files from it."""
    assert ended.code == 0, ended.err
    measured = Job(run, "").summary["metric"]
    assert (measured["name"], measured["split"], measured["num_samples"]) == (metric, split, 4)
    assert hub.handed_out >= files


def test_bert_learns_questions_of_the_hub(hub: Hub, folder: Path, ended: Ended) -> None:
    files = {
        "google-bert/bert-base-uncased/model.safetensors",
        "google-bert/bert-base-uncased/tokenizer.json",
        "rajpurkar/squad/plain_text/validation-00000-of-00001.parquet",
    }
    assert_learned(hub, folder / "questions", ended, "f1", "validation", files)


def test_a_vision_transformer_of_the_hub_learns_its_pictures(hub: Hub, folder: Path, ended: Ended) -> None:
    files = {"somebody/small-vit/model.safetensors", "uoft-cs/cifar100/cifar100/test-00000-of-00001.parquet"}
    assert_learned(hub, folder / "pictures", ended, "accuracy", "test", files)
