"""Pretrained weights: from the file to the layer that wants them, and no further."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

from pipetransformer.models import lazy_checkpoint
from pipetransformer.models.base import Head
from pipetransformer.models.huggingface import HuggingFaceModel
from pipetransformer.models.stack import LayerStack
from pipetransformer.models.timm import TimmModel

Folder = Callable[..., Path]
TINY = {"patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 2}


def state_of(stack: LayerStack) -> dict[str, torch.Tensor]:
    return {name: tensor for layer in stack.layers for name, tensor in layer.original_state().items()}


@pytest.fixture
def encoder(encoder_folder: Folder, tmp_path: Path) -> Path:
    """A published BERT."""
    spec = HuggingFaceModel(name=str(encoder_folder("bert")), pretrained=False)
    stack = spec.build(Head("sequence", 3), (), seed=1)
    spec.save(stack, state_of(stack), tmp_path)
    return tmp_path


@pytest.fixture
def picture_model(tmp_path: Path) -> Path:
    """A published ViT for color images of 16 pixels."""
    spec = TimmModel(name="vit_tiny_patch16_224", pretrained=False, options=TINY)
    stack = spec.build(Head("image", 5), (3, 16, 16), seed=1)
    spec.save(stack, state_of(stack), tmp_path)
    return tmp_path


@pytest.fixture
def keys_read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The keys whose tensors are read from a file."""
    keys: list[str] = []
    opened = lazy_checkpoint.safe_open

    class Watched:
        def __init__(self, *args: Any) -> None:
            self.file = opened(*args)

        def __enter__(self) -> "Watched":
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

        def get_tensor(self, key: str) -> torch.Tensor:
            keys.append(key)
            return self.file.get_tensor(key)

    monkeypatch.setattr(lazy_checkpoint, "safe_open", Watched)
    return keys


def text_meta(folder: Path, num_outputs: int = 3, seed: int = 0) -> LayerStack:
    return HuggingFaceModel(name=str(folder)).build_meta(Head("sequence", num_outputs), (), seed)


def image_meta(folder: Path, num_outputs: int = 5, shape: tuple[int, ...] = (3, 16, 16), seed: int = 0) -> LayerStack:
    return TimmModel(name=str(folder), image_size=shape[1], num_channels=shape[0]).build_meta(
        Head("image", num_outputs), shape, seed
    )


def test_only_the_tensors_of_the_layer_are_read(encoder: Path, keys_read: list[str]) -> None:
    stack = text_meta(encoder)
    assert keys_read == []
    stack.load(2)

    assert sorted(keys_read) == sorted(stack[2].original_state())


def test_only_the_tensors_of_the_layer_are_read_of_a_vision_transformer(
    picture_model: Path, keys_read: list[str]
) -> None:
    stack = image_meta(picture_model)
    assert keys_read == []
    stack.load(1)

    assert sorted(keys_read) == sorted(stack[1].original_state())


def test_a_loaded_copy_leaves_the_stack_without_storage(encoder: Path) -> None:
    stack = text_meta(encoder)

    assert stack.loaded_copy(2, "cpu").has_storage
    assert not any(stack[index].has_storage for index in range(len(stack)))


def test_shards_are_read_where_the_index_says(encoder: Path) -> None:
    expected = AutoModelForSequenceClassification.from_pretrained(encoder)
    expected.save_pretrained(encoder, max_shard_size="5KB")
    (encoder / "model.safetensors").unlink()
    assert len(list(encoder.glob("*.safetensors"))) > 1

    stack = HuggingFaceModel(name=str(encoder)).build(Head("sequence", 3), (), seed=0)

    assert all(torch.equal(tensor, expected.state_dict()[name]) for name, tensor in state_of(stack).items())


def test_old_names_and_half_precision_are_understood(encoder: Path) -> None:
    state = load_file(encoder / "model.safetensors")
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}

    def renamed(name: str) -> str:
        for new, legacy in old.items():
            name = name.replace(new, legacy)
        return name.removeprefix("bert.")

    save_file({renamed(n): t.half() for n, t in state.items()}, encoder / "model.safetensors", {"format": "pt"})
    stack = HuggingFaceModel(name=str(encoder)).build(Head("sequence", 3), (), seed=0)

    assert all(torch.equal(t, state[n].half().float()) for n, t in state_of(stack).items() if "classifier" not in n)


def test_without_safetensors_the_whole_model_is_read_and_it_is_said(encoder: Path) -> None:
    state = load_file(encoder / "model.safetensors")
    torch.save(state, encoder / "pytorch_model.bin")
    (encoder / "model.safetensors").unlink()

    with pytest.warns(UserWarning, match=r"reads all weights .* no model\.safetensors"):
        stack = HuggingFaceModel(name=str(encoder), allow_pickle=True).build_meta(Head("sequence", 3), (), 0)

    assert all(torch.equal(tensor, state[name]) for name, tensor in state_of(stack).items())


def test_a_vision_transformer_without_safetensors_is_read_whole_and_it_is_said(picture_model: Path) -> None:
    state = load_file(picture_model / "model.safetensors")
    torch.save(state, picture_model / "pytorch_model.bin")
    (picture_model / "model.safetensors").unlink()

    spec = TimmModel(name=str(picture_model), image_size=16, num_channels=3, allow_pickle=True)
    with pytest.warns(UserWarning, match=r"reads all weights .* no model\.safetensors"):
        stack = spec.build_meta(Head("image", 5), (3, 16, 16), 0)

    assert all(torch.equal(tensor, state[name]) for name, tensor in state_of(stack).items())


def test_weights_that_timm_converts_in_every_block_are_read_whole_and_it_is_said(
    picture_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def doubled(state: dict[str, torch.Tensor], *_: object, **__: object) -> dict[str, torch.Tensor]:
        return {name: tensor * 2 if "qkv" in name else tensor for name, tensor in state.items()}

    monkeypatch.setattr("timm.models.vision_transformer.checkpoint_filter_fn", doubled)
    state = load_file(picture_model / "model.safetensors")

    with pytest.warns(UserWarning, match="reads all weights .* timm converts them"):
        stack = image_meta(picture_model)

    name = "blocks.0.attn.qkv.weight"
    assert torch.equal(stack[1].original_state()[name], state[name] * 2)


@pytest.mark.parametrize(("num_channels", "size"), [(1, 16), (3, 32), (1, 32)])
def test_positions_and_channels_are_resized_as_timm_does_it(num_channels: int, size: int, picture_model: Path) -> None:
    stack = image_meta(picture_model, shape=(num_channels, size, size))
    expected = timm.create_model(
        f"local-dir:{picture_model}", pretrained=True, in_chans=num_channels, img_size=size
    ).state_dict()

    for index in range(len(stack)):
        stack.load(index)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in state_of(stack).items())


@pytest.mark.parametrize("meta", [text_meta, image_meta])
def test_a_new_head_follows_the_seed_alone(meta: Callable[..., LayerStack], request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue("encoder" if meta is text_meta else "picture_model")

    def head(seed: int, *before: int) -> dict[str, torch.Tensor]:
        stack = meta(folder, num_outputs=7, seed=seed)
        for index in (*before, len(stack) - 1):
            stack.load(index)
        return stack[len(stack) - 1].original_state()

    first, again, other = head(1), head(1, 0, 2), head(2)
    name = next(name for name in first if name in ("classifier.weight", "head.weight"))
    assert len(first[name]) == 7
    assert all(torch.equal(tensor, again[name]) for name, tensor in first.items())
    assert not torch.equal(first[name], other[name])
