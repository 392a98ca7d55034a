import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoImageProcessor, AutoModelForImageClassification, SiglipConfig, SiglipModel

from pipetransformer.data.base import ImageFormat
from pipetransformer.data.images.sources import from_arrays
from pipetransformer.data.images.split import ImageSplit
from pipetransformer.data.tasks import image_classification
from pipetransformer.models.base import Head
from pipetransformer.models.huggingface_vision import HuggingFaceVisionModel
from pipetransformer.models.instance import stack_of
from pipetransformer.models.stack import LayerStack

Folder = Callable[..., Path]

CLASSES = Head("image", 5)
ONE_LEVEL = 2 / 255  # of a colour, normalised
DINOV2_PROCESSOR = {
    "image_processor_type": "BitImageProcessor",
    "size": {"shortest_edge": 40},
    "crop_size": {"height": 32, "width": 32},
    "do_center_crop": True,
    "image_mean": [0.485, 0.456, 0.406],
    "image_std": [0.229, 0.224, 0.225],
}


def build(folder: Path, shape: tuple[int, ...] = (3, 16, 16), pretrained: bool = False, **changes: Any) -> LayerStack:
    return HuggingFaceVisionModel(name=str(folder), pretrained=pretrained, **changes).build(CLASSES, shape, seed=0)


def state_of(stack: LayerStack) -> dict[str, Tensor]:
    return {name: tensor for layer in stack.layers for name, tensor in layer.original_state().items()}


def saved(folder: Path, to: Path, shape: tuple[int, ...] = (3, 16, 16), **changes: Any) -> Path:
    spec = HuggingFaceVisionModel(name=str(folder), pretrained=False, **changes)
    stack = spec.build(CLASSES, shape, seed=0)
    spec.save(stack, state_of(stack), to)
    return to


@pytest.mark.parametrize("pretrained", [False, True])
def test_parameters_that_only_pretraining_uses_are_noted(
    pretrained: bool, encoder_folder: Folder, tmp_path: Path
) -> None:
    tiny = {"hidden_size": 16, "num_attention_heads": 2, "image_size": 16, "patch_size": 4}
    folder = encoder_folder("dinov2_with_registers", num_hidden_layers=3, **tiny)
    stack = build(saved(folder, tmp_path) if pretrained else folder, pretrained=pretrained)
    assert stack.idle == {"dinov2_with_registers.embeddings.mask_token"}
    assert [len(stack.idle_parameters(index)) for index in range(len(stack))] == [1, 0, 0, 0, 0]


def test_the_published_preprocessing_is_the_format(encoder_folder: Folder) -> None:
    folder = encoder_folder("dinov2")
    (folder / "preprocessor_config.json").write_text(json.dumps(DINOV2_PROCESSOR))

    assert HuggingFaceVisionModel(name=str(folder)).input_format() == {
        "size": 32,
        "num_channels": 3,
        "mean": (0.485, 0.456, 0.406),
        "std": (0.229, 0.224, 0.225),
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": {"height": 32, "width": 24}, "do_center_crop": False}, "has no square size; give model.image_size"),
        ({"rescale_factor": 1 / 127.5}, "multiplies pixels by 0.00784.* and not by 1/255"),
    ],
)
def test_preprocessing_that_pictures_do_not_get_is_refused(
    changes: dict[str, Any], message: str, encoder_folder: Folder
) -> None:
    folder = encoder_folder("dinov2")
    (folder / "preprocessor_config.json").write_text(json.dumps(DINOV2_PROCESSOR | changes))

    with pytest.raises(ValueError, match=message):
        HuggingFaceVisionModel(name=str(folder)).input_format()


def test_weights_without_preprocessing_are_refused_with_ways_out(encoder_folder: Folder, no_network: None) -> None:
    with pytest.raises(ValueError, match=r"no image processor under model\.name=.*Without network give"):
        HuggingFaceVisionModel(name=str(encoder_folder("vit"))).input_format()


@pytest.mark.parametrize("shape", [(40, 40), (48, 31), (17, 64)])
def test_transformers_reads_pictures_for_a_saved_model_as_the_run_did(
    shape: tuple[int, int], encoder_folder: Folder, tmp_path: Path
) -> None:
    folder = saved(encoder_folder("vit"), tmp_path, image_size=16)
    pixels = np.random.default_rng(0).integers(0, 256, (1, *shape, 3), dtype=np.uint8)
    wanted = ImageFormat(**HuggingFaceVisionModel(name=str(folder)).input_format())
    split = ImageSplit("train", from_arrays(pixels, np.zeros(1, dtype=np.int64)), wanted, image_classification(5))

    for backend, tolerance in (("pil", 1e-6), ("torchvision", 1.01 * ONE_LEVEL)):
        processor = AutoImageProcessor.from_pretrained(folder, backend=backend)
        read = processor(Image.fromarray(pixels[0]), return_tensors="pt").pixel_values
        torch.testing.assert_close(split.inputs([0], None), read, rtol=0, atol=tolerance)


def test_positions_of_dinov2_fit_images_of_another_size(encoder_folder: Folder, tmp_path: Path) -> None:
    folder = saved(encoder_folder("dinov2"), tmp_path)
    stack = build(folder, (3, 24, 24), pretrained=True).double().eval()
    original = AutoModelForImageClassification.from_pretrained(folder, dtype=torch.float64).eval()
    images = torch.randn(2, 3, 24, 24, dtype=torch.float64)

    assert stack.hidden_shape(images) == stack[0](images).shape == (2, 37, 16)
    torch.testing.assert_close(stack(images), original(images).logits, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["vit", "siglip"])
def test_positions_of_another_size_are_refused_with_the_size_to_give(
    name: str, encoder_folder: Folder, tmp_path: Path
) -> None:
    folder = saved(encoder_folder(name), tmp_path)

    with pytest.raises(ValueError, match=r"takes images of 16x16 .*give model\.image_size=16, or") as refused:
        build(folder, (3, 24, 24), pretrained=True)
    assert "\n" not in str(refused.value)


def test_images_that_do_not_divide_into_patches_are_refused(encoder_folder: Folder) -> None:
    with pytest.raises(ValueError, match=r"18x18 pixels do not divide .*give model\.image_size a multiple of 4"):
        build(encoder_folder("vit"), (3, 18, 18))


def test_stochastic_depth_of_dinov2_is_refused_with_the_option(encoder_folder: Folder) -> None:
    with pytest.raises(ValueError, match=r"drop_path_rate=0\.1\).*give model\.options\.drop_path_rate=0"):
        build(encoder_folder("dinov2", drop_path_rate=0.1))


def test_parts_that_no_classifier_runs_are_left_out(encoder_folder: Folder, tmp_path: Path) -> None:
    assert not [name for name in state_of(build(encoder_folder("dinov2"))) if "mask_token" in name]
    assert not [name for name in state_of(build(encoder_folder("siglip"))) if ".head." in name]


def test_the_vision_tower_of_a_whole_siglip_keeps_its_weights(encoder_folder: Folder, tmp_path: Path) -> None:
    tower = saved(encoder_folder("siglip"), tmp_path / "tower")
    sizes = SiglipConfig.from_pretrained(tower).vision_config.to_dict()
    tiny = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8, "vocab_size": 9}
    whole = SiglipModel(SiglipConfig(vision_config={**sizes, "vision_use_head": True}, text_config=tiny))
    whole.save_pretrained(tmp_path / "whole")

    state = state_of(build(tmp_path / "whole", pretrained=True))

    published = whole.state_dict()
    assert all(torch.equal(tensor, published[name]) for name, tensor in state.items() if "classifier" not in name)
    assert not [name for name in state if "text_model" in name]


def test_a_dinov2_with_its_mask_token_is_accepted(encoder_folder: Folder, tmp_path: Path) -> None:
    whole = AutoModelForImageClassification.from_pretrained(saved(encoder_folder("dinov2"), tmp_path / "trained"))
    config = whole.config
    config.use_mask_token = True
    published = type(whole)(config)
    published.save_pretrained(tmp_path / "published")
    assert "dinov2.embeddings.mask_token" in published.state_dict()

    state = state_of(build(tmp_path / "published", pretrained=True))

    assert torch.equal(state["dinov2.layernorm.weight"], published.dinov2.layernorm.weight)


@pytest.mark.parametrize("name", ["vit", "dinov2", "siglip"])
def test_an_instance_with_parts_that_are_not_run_is_split_and_given_back(
    name: str, encoder_folder: Folder, tmp_path: Path
) -> None:
    folder = saved(encoder_folder(name), tmp_path)
    model = AutoModelForImageClassification.from_pretrained(folder)
    if name == "siglip":
        config = model.config
        config.vision_config.vision_use_head = True
        model = type(model)(config)
    stack = stack_of(model)
    for index in range(len(stack)):
        stack.load(index)
    images = torch.randn(2, 3, 16, 16)

    torch.testing.assert_close(stack.eval()(images), model.eval()(images).logits)
    assert state_of(stack).keys() == model.state_dict().keys()


def test_a_text_model_is_refused_by_what_it_lacks(encoder_folder: Folder) -> None:
    with pytest.raises(ValueError, match=r"its image_size is None; supported are square images"):
        build(encoder_folder("bert"))
