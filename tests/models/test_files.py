"""Files of a model that could run code, or that lead out of its folder, are refused before they are opened."""

import json
import pickle
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from support.jobs import ROOT

from pipetransformer.errors import UserError
from pipetransformer.models.base import Head, ModelSpec
from pipetransformer.models.huggingface import HuggingFaceModel
from pipetransformer.models.timm import TimmModel, find_pickle
from pipetransformer.models.to_safetensors import convert

Folder = Callable[..., Path]
TINY = {"patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 2}
HEAD = {"text": Head("sequence", 3), "image": Head("image", 5)}
SHAPE = {"text": (), "image": (3, 16, 16)}


class Bomb:
    """Leaves a mark where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.mark), "w")


@pytest.fixture(params=["text", "image"])
def spec(request: pytest.FixtureRequest, encoder_folder: Folder, tmp_path: Path) -> ModelSpec:
    """A published model of each family."""
    folder = tmp_path / "published"
    folder.mkdir()
    made: ModelSpec
    if request.param == "text":
        made = HuggingFaceModel(name=str(encoder_folder("bert")), pretrained=False)
    else:
        made = TimmModel(name="vit_tiny_patch16_224", pretrained=False, options=TINY)
    stack = made.build(HEAD[made.modality], SHAPE[made.modality], seed=1)
    made.save(stack, {n: t for layer in stack.layers for n, t in layer.original_state().items()}, folder)
    if request.param == "text":
        return HuggingFaceModel(name=str(folder))
    return TimmModel(name=str(folder), image_size=16, num_channels=3)


def build(spec: ModelSpec) -> dict[str, torch.Tensor]:
    stack = spec.build(HEAD[spec.modality], SHAPE[spec.modality], seed=0)
    return {name: tensor for layer in stack.layers for name, tensor in layer.original_state().items()}


def pickled(spec: ModelSpec, extra: object = None) -> dict[str, torch.Tensor]:
    """Leaves the weights only as a pickle."""
    folder = Path(spec.name)
    state = load_file(folder / "model.safetensors")
    torch.save(state if extra is None else {**state, "extra": extra}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    return state


def test_pickled_weights_are_refused_and_never_opened(spec: ModelSpec, tmp_path: Path) -> None:
    pickled(spec, Bomb(tmp_path / "ran"))
    words = r"weights are only in pytorch_model\.bin, a pickle, .*to_safetensors .*model\.allow_pickle=true$"
    for ask in (spec.check_exists, lambda: build(spec)):
        with pytest.raises(UserError, match=words) as caught:
            ask()
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "ran").exists()


@pytest.mark.thinned("[text")
def test_the_command_of_the_refusal_converts(spec: ModelSpec) -> None:
    expected = pickled(spec)
    with pytest.raises(UserError) as caught:
        spec.check_exists()
    command = shlex.split(str(caught.value).partition("convert it once by: ")[2].partition(";")[0])
    subprocess.run([sys.executable, *command[1:]], cwd=ROOT, check=True, capture_output=True)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in build(spec).items())


def test_allowed_pickles_are_read_but_run_nothing(spec: ModelSpec, tmp_path: Path) -> None:
    values = {name: getattr(spec, name) for name in vars(spec)} | {"allow_pickle": True}
    trusting = type(spec)(**values)
    expected = pickled(spec)
    with pytest.warns(UserWarning, match=r"reads all weights .* no model\.safetensors"):
        assert all(torch.equal(tensor, expected[name]) for name, tensor in build(trusting).items())

    torch.save({"extra": Bomb(tmp_path / "ran")}, Path(spec.name) / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"could not load model\.name="):
        build(trusting)
    assert not (tmp_path / "ran").exists()


def test_what_holds_more_than_tensors_is_not_converted(tmp_path: Path) -> None:
    torch.save({"extra": Bomb(tmp_path / "ran")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match="no file of tensors alone and is not converted"):
        convert(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(tmp_path / "ran"), protocol=2))
    with pytest.raises(UserError, match="no file of tensors alone and is not converted"):
        convert(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_shards_and_training_checkpoints_are_converted(tmp_path: Path) -> None:
    first, second = {"a": torch.ones(2)}, {"b": torch.zeros(3)}
    torch.save(first, tmp_path / "pytorch_model-00001-of-00002.bin")
    torch.save(second, tmp_path / "pytorch_model-00002-of-00002.bin")
    assert load_file(convert(tmp_path)).keys() == {"a", "b"}
    for file in tmp_path.iterdir():
        file.unlink()
    torch.save({"epoch": 3, "state_dict": first}, tmp_path / "last.pth.tar")
    assert load_file(convert(tmp_path)).keys() == {"a"}


@pytest.mark.parametrize("file", ["pytorch_model.bin", "best.pth", "last.pth.tar", "weights.pt", "run.ckpt"])
def test_every_pickle_that_timm_would_take_is_found(file: str, tmp_path: Path) -> None:
    (tmp_path / file).touch()
    assert find_pickle({"source": "local-dir", "file": str(tmp_path)}) == file
    assert find_pickle({"source": "", "file": str(tmp_path / file)}) == str(tmp_path / file)
    assert find_pickle({"source": "", "url": f"https://somewhere/{file}"}) == f"https://somewhere/{file}"
    (tmp_path / "model.safetensors").touch()
    assert find_pickle({"source": "local-dir", "file": str(tmp_path)}) is None


def test_a_checkpoint_path_among_the_options_of_timm_is_refused(tmp_path: Path) -> None:
    spec = TimmModel(
        name="vit_tiny_patch16_224", pretrained=False, options={"checkpoint_path": str(tmp_path / "x.pth")}
    )
    with pytest.raises(
        UserError, match=r"model\.options\.checkpoint_path=.* is not an option: use model\.name=<folder>"
    ):
        spec.check()


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize("family", [HuggingFaceModel, TimmModel])
def test_pickled_weights_in_the_cache_of_the_hub_are_refused(
    family: type[ModelSpec], spec: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not isinstance(spec, family):
        pytest.skip("the other family")
    pickled(spec, Bomb(tmp_path / "ran"))
    snapshot = tmp_path / "hub" / "models--somebody--model" / "snapshots" / ("0" * 40)
    shutil.copytree(spec.name, snapshot)
    refs = snapshot.parents[1] / "refs"
    refs.mkdir()
    (refs / "main").write_text("0" * 40)
    for constant in ("huggingface_hub.constants.HF_HUB_CACHE", "transformers.utils.hub.constants.HF_HUB_CACHE"):
        monkeypatch.setattr(constant, str(tmp_path / "hub"))
    values = {name: getattr(spec, name) for name in vars(spec)} | {"name": "somebody/model"}
    with pytest.raises(
        UserError,
        match=r"model\.name=somebody/model .* pytorch_model\.bin, .*hf download somebody/model --local-dir model && ",
    ):
        build(type(spec)(**values))
    assert not (tmp_path / "ran").exists()


def write_code(folder: Path, mark: Path) -> None:
    """Adds code that leaves a mark where it is imported."""
    for file, classes in (
        (
            "config.json",
            {"AutoConfig": "code.C", "AutoModelForSequenceClassification": "code.M", "AutoModel": "code.M"},
        ),
        ("tokenizer_config.json", {"AutoTokenizer": ["code.T", "code.T"]}),
    ):
        settings = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps({**settings, "auto_map": classes}))
    (folder / "code.py").write_text(
        f"__import__('pathlib').Path({str(mark)!r}).touch()\n"
        "from transformers import BertConfig, BertForSequenceClassification\n"
        "class C(BertConfig):\n    pass\n"
        "class M(BertForSequenceClassification):\n    config_class = C\n"
    )


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_code_of_a_model_or_its_tokenizer_is_refused(encoder_folder: Folder, tmp_path: Path, file: str) -> None:
    folder = encoder_folder("bert")
    other = {"config.json": "tokenizer_config.json", "tokenizer_config.json": "config.json"}[file]
    kept = (folder / other).read_text()
    write_code(folder, tmp_path / "ran")
    (folder / other).write_text(kept)
    spec = HuggingFaceModel(name=str(folder), pretrained=False)
    words = rf"its {file} has auto_map, .*model\.trust_remote_code=true$"
    asks: list[Callable[[], object]] = [spec.check_exists, spec.input_format]
    for ask in [*asks, lambda: build(spec)] if file == "config.json" else asks:
        with pytest.raises(UserError, match=words) as caught:
            ask()
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "ran").exists()


def test_trusted_code_runs(encoder_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("transformers.dynamic_module_utils", "transformers.utils.hub"):
        monkeypatch.setattr(f"{module}.HF_MODULES_CACHE", str(tmp_path / "modules"), raising=False)
    folder = encoder_folder("bert")
    write_code(folder, tmp_path / "ran")
    spec = HuggingFaceModel(name=str(folder), pretrained=False, trust_remote_code=True)
    spec.check_exists()
    assert build(spec)
    assert (tmp_path / "ran").exists()


def test_trust_cannot_come_in_by_the_options(encoder_folder: Folder) -> None:
    spec = HuggingFaceModel(name=str(encoder_folder("bert")), options={"trust_remote_code": True})
    with pytest.raises(UserError, match=r"use model\.trust_remote_code"):
        spec.input_format()


@pytest.mark.parametrize(
    ("shard", "words"),
    [
        ("../outside.safetensors", "which is outside the model's folder"),
        ("/etc/passwd", "which is outside the model's folder"),
        ("..\\outside.safetensors", "which is outside the model's folder"),
        ("pytorch_model.bin", "which is no .safetensors file"),
        (7, "which is no .safetensors file"),
    ],
)
def test_an_index_names_safetensors_files_of_its_folder(
    encoder_folder: Folder, shard: object, words: str, tmp_path: Path
) -> None:
    folder = encoder_folder("bert")
    save_file({"x": torch.zeros(1)}, folder.parent / "outside.safetensors", {"format": "pt"})
    torch.save(Bomb(tmp_path / "ran"), folder / "pytorch_model.bin")
    index = {"metadata": {}, "weight_map": {"bert.embeddings.word_embeddings.weight": shard}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=rf"model\.safetensors\.index\.json names .*{words}"):
        build(HuggingFaceModel(name=str(folder)))
    assert not (tmp_path / "ran").exists()


def test_a_tokenizer_names_files_of_its_folder(encoder_folder: Folder) -> None:
    folder = encoder_folder("bert")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["fast_tokenizer_files"] = ["../../tokenizer.4.0.json"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(UserError, match=r"tokenizer_config\.json names .* outside the model's folder"):
        HuggingFaceModel(name=str(folder)).input_format()


def test_timm_runs_no_code_of_a_folder(tmp_path: Path) -> None:
    """timm reads sizes from config.json and takes classes from its own list alone."""
    (tmp_path / "config.json").write_text(
        json.dumps({"architecture": "os.system", "auto_map": {"AutoModel": "code.M"}})
    )
    with pytest.raises((UserError, RuntimeError), match=r"os\.system"):
        TimmModel(name=str(tmp_path), pretrained=False).build(HEAD["image"], SHAPE["image"], seed=0)
    assert "os.system" not in timm.list_models()
