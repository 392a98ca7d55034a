import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

from pipetransformer.data.base import ImageFormat
from pipetransformer.data.images.sources import from_arrays
from pipetransformer.data.images.split import ImageSplit
from pipetransformer.data.tasks import image_classification
from pipetransformer.models.base import Head
from pipetransformer.models.stack import LayerStack, WithoutFilling, without_storage
from pipetransformer.models.timm import TimmModel
from pipetransformer.models.timm_layers import split_layers
from pipetransformer.models.timm_rotary import RotaryPositions

TINY = {"patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 2}


def tiny(**changes: Any) -> TimmModel:
    options = {**TINY, **changes.pop("options", {})}
    return TimmModel(**{"name": "vit_tiny_patch16_224", "pretrained": False, "options": options, **changes})


def build(spec: TimmModel, shape: tuple[int, ...] = (3, 16, 16), kind: str = "image") -> LayerStack:
    return spec.build(Head(kind, 5), shape, seed=0)


def saved(folder: Path, spec: TimmModel | None = None, shape: tuple[int, ...] = (3, 16, 16)) -> LayerStack:
    spec = spec or tiny()
    stack = build(spec, shape)
    spec.save(stack, {name: t for layer in stack.layers for name, t in layer.original_state().items()}, folder)
    return stack


def test_importing_the_spec_imports_no_torch() -> None:
    code = "import sys, pipetransformer.models.timm; assert not {'torch', 'timm'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


class _Filled(TorchDispatchMode):
    """Counts what fills tensors without storage."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.partition(".")[0]
        self.count += name in WithoutFilling.NAMES and args[0].is_meta and args[0].is_floating_point()
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "eva02_tiny_patch14_224"])
def test_a_layer_is_drawn_alone_and_the_others_cost_nothing(name: str) -> None:
    with _Filled() as filled:
        stack = tiny(name=name).build_meta(Head("image", 5), (3, 16, 16), seed=0)
        stack.load(1)
    assert filled.count == 0
    assert stack[1].has_storage


def test_from_scratch_the_data_decides_the_format() -> None:
    assert tiny().input_format() == {"size": None, "num_channels": None, "mean": (0.5,), "std": (0.5,)}
    assert tiny(image_size=32, num_channels=1).input_format()["size"] == 32


def test_a_published_model_decides_the_format() -> None:
    deit = TimmModel(name="deit_tiny_patch16_224").input_format()

    assert deit == {
        "size": 224,
        "num_channels": 3,
        "mean": pytest.approx((0.485, 0.456, 0.406)),
        "std": pytest.approx((0.229, 0.224, 0.225)),
    }


def test_a_published_model_on_grey_images_takes_the_mean_over_its_channels() -> None:
    wanted = TimmModel(name="deit_tiny_patch16_224", num_channels=1, image_size=96).input_format()

    assert (wanted["size"], wanted["num_channels"]) == (96, 1)
    assert wanted["mean"] == pytest.approx(((0.485 + 0.456 + 0.406) / 3,))


def test_a_saved_model_asks_for_the_images_that_it_was_trained_on(tmp_path: Path) -> None:
    saved(tmp_path, tiny(name="deit_tiny_patch16_224"), shape=(1, 16, 16))

    wanted = TimmModel(name=str(tmp_path)).input_format()

    assert wanted == {"size": 16, "num_channels": 1, "mean": (0.5,), "std": (0.5,)}


def test_a_pretrained_folder_keeps_its_body_and_gets_a_new_head_for_other_classes(tmp_path: Path) -> None:
    stack = saved(tmp_path)
    again = TimmModel(name=str(tmp_path)).build(Head("image", 7), (3, 16, 16), seed=9)

    assert all(torch.equal(t, again[1].module.state_dict()[n]) for n, t in stack[1].module.state_dict().items())
    assert again[-1].module.head.weight.shape == (7, 24)


def test_a_folder_without_pretrained_gives_the_architecture_alone(tmp_path: Path) -> None:
    stack = saved(tmp_path)
    again = TimmModel(name=str(tmp_path), pretrained=False).build(Head("image", 5), (3, 16, 16), seed=9)

    assert again.num_blocks == 2
    assert not torch.equal(again[1].module.mlp.fc1.weight, stack[1].module.mlp.fc1.weight)


def test_a_larger_image_resamples_the_positions_of_a_pretrained_model(tmp_path: Path) -> None:
    saved(tmp_path)
    stack = TimmModel(name=str(tmp_path), image_size=32).build(Head("image", 5), (3, 32, 32), seed=0)

    assert stack[0].module.pos_embed.shape == (1, 65, 24)
    assert stack(torch.zeros(2, 3, 32, 32)).shape == (2, 5)


def test_a_saved_folder_keeps_the_options(tmp_path: Path) -> None:
    saved(tmp_path, tiny(options={"drop_path_rate": 0.1, "global_pool": "avg"}))

    assert json.loads((tmp_path / "config.json").read_text())["model_args"]["global_pool"] == "avg"
    assert timm.create_model(f"local-dir:{tmp_path}", pretrained=True).fc_norm.weight.shape == (24,)


def test_drop_path_and_dropout_reach_the_layers() -> None:
    stack = build(tiny(options={"drop_path_rate": 0.5, "proj_drop_rate": 0.2, "drop_rate": 0.3}))

    assert stack[2].module.drop_path1.drop_prob == 0.5
    assert stack[1].module.attn.proj_drop.p == 0.2
    assert stack[3].module.head_drop.p == 0.3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"options": {"patch_drop_rate": 0.1}}, "patch_drop_rate=0.1"),
        ({"options": {"img_size": 32}}, "use model.image_size"),
        ({"options": {"num_classes": 3}}, "follows from the data"),
    ],
)
def test_options_that_are_decided_elsewhere_are_refused_without_torch(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny(**changes).check()


@pytest.mark.parametrize(
    ("changes", "shape", "message"),
    [
        ({}, (3, 16, 20), r"16x20 pixels are not square; give model\.image_size"),
        ({}, (3, 18, 18), r"18x18 .* patches of 4; give model\.image_size a multiple of 4"),
        ({"num_channels": 1}, (3, 16, 16), r"3 channels, the model takes 1; give model\.num_channels=3"),
        ({"name": "resnet18", "options": {}}, (3, 16, 16), r"resnet18"),
        ({"options": {"heads": 3}}, (3, 16, 16), r"model\.options=.*heads"),
        ({"options": {"num_heads": 5}}, (3, 16, 16), r"model\.options=.*num_heads"),
        ({"name": "vit_unheard_of"}, (3, 16, 16), r"model\.name=vit_unheard_of"),
        ({"image_size": 0}, (3, 16, 16), r"model\.image_size=0 must be at least 1"),
        ({"num_channels": -1}, (3, 16, 16), r"model\.num_channels=-1 must be at least 1"),
        (
            {"options": {"drop_path_rate": 2}},
            (3, 16, 16),
            r"does not run with model\.options=.*'drop_path_rate': 2\}: ",
        ),
        ({"options": {"patch_size": 0}}, (3, 16, 16), r"model\.options=.*patch_size"),
        ({"options": {"embed_dim": 0}}, (3, 16, 16), r"model\.options=.*embed_dim"),
        (
            {"name": "swin_tiny_patch4_window7_224"},
            (3, 16, 16),
            r"is a SwinTransformer, whose hidden state changes its",
        ),
        ({"options": {"global_pool": ""}}, (3, 16, 16), r"its head gives \(5, 5\) .* 5 numbers; .*global_pool=avg"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(tiny(**changes), shape)


@pytest.mark.parametrize("name", ["vit_base_patch16_xp_224", "vit_small_patch16_18x2_224"])
def test_blocks_of_parallel_parts_run_layer_by_layer(name: str) -> None:
    spec = TimmModel(name=name, pretrained=False, options={"embed_dim": 24, "num_heads": 2, "depth": 2})
    stack = spec.build(Head("image", 3), (3, 32, 32), seed=1)
    model = timm.create_model(name, embed_dim=24, num_heads=2, depth=2, img_size=32, num_classes=3).eval()
    model.load_state_dict({name: t for layer in stack.layers for name, t in layer.original_state().items()})
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(stack.eval()(x), model(x), rtol=0, atol=1e-6)


def test_another_architecture_is_refused_with_what_is_supported() -> None:
    with pytest.raises(ValueError, match=r"is a ResNet, .*; supported is .* vit_"):
        build(TimmModel(name="resnet18", pretrained=False), (3, 64, 64))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("swin_tiny_patch4_window7_224", r"SwinTransformer, whose hidden state changes its shape from stage to stage"),
    ],
)
def test_a_transformer_that_is_no_flat_list_is_refused_by_name_and_reason(name: str, reason: str) -> None:
    with pytest.raises(ValueError, match=rf"model\.name={name} is an? {reason}.*; supported is .* vit_") as refused:
        TimmModel(name=name, pretrained=False).build_meta(Head("image", 5), (3, 224, 224), seed=0)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"rope_type": "mixed"}, r"learned, .* \(rope_type=mixed\) .*; choose a model with fixed ones"),
        (
            {"rope_type": "dinov3", "rope_rescale_coords": 2.0},
            r"drawn anew in each step, .*; give model\.options\.rope_rescale_coords=1$",
        ),
    ],
)
def test_an_eva_whose_rotary_positions_are_not_fixed_is_refused_by_reason(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=rf"eva02_tiny_patch14_224 cannot .* layer: its rotary positions are {reason}"):
        build(tiny(name="eva02_tiny_patch14_224", options=options))


def test_an_eva_whose_rotary_positions_are_drawn_without_effect_is_that_with_fixed_ones() -> None:
    drawn = {"rope_type": "dinov3", "rope_rescale_coords": 1.0, "rope_shift_coords": 0.0}
    images = torch.randn(2, 3, 16, 16)
    one, other = (
        build(tiny(name="eva02_tiny_patch14_224", options=options)) for options in (drawn, {"rope_type": "dinov3"})
    )

    assert torch.equal(one(images), other(images))


def test_images_that_differ_in_patches_are_refused_by_reason() -> None:
    with pytest.raises(ValueError, match=r"is a NaFlexVit, whose images differ in their number of patches"):
        build(tiny(name="eva02_tiny_patch14_224", options={"use_naflex": True}))


def test_rotary_positions_are_of_the_size_of_the_images(tmp_path: Path) -> None:
    spec = tiny(name="eva02_tiny_patch14_224")
    saved(tmp_path, spec)
    stack = TimmModel(name=str(tmp_path), image_size=32).build(Head("image", 5), (3, 32, 32), seed=0)
    state = {name: t for layer in stack.layers for name, t in layer.original_state().items()}
    spec.save(stack, state, tmp_path / "larger")
    images = torch.randn(2, 3, 32, 32)

    original = timm.create_model(f"local-dir:{tmp_path / 'larger'}", pretrained=True)

    torch.testing.assert_close(stack.eval()(images), original.eval()(images))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("rope_type", ["cat", "dinov3", "mrope"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_rotary_positions_are_no_tensors_and_bit_for_bit_those_of_timm(
    dynamic: bool, rope_type: str, dtype: torch.dtype
) -> None:
    options = {"rope_type": rope_type, "dynamic_img_size": dynamic, "img_size": 16, "num_classes": 5}
    model = timm.create_model("eva02_tiny_patch14_224", **TINY, **options).to(dtype)
    stack = split_layers(without_storage(model))
    positions = RotaryPositions(model)(torch.empty(1, dtype=dtype))
    shape = () if hasattr(model.rope, "feat_shape") and not dynamic else ((4, 4),)

    assert positions.dtype == model.rope.get_embed(*shape).dtype
    assert torch.equal(positions, model.rope.get_embed(*shape))
    assert not [name for layer in stack.layers for name, _ in layer.tensors() if "rope" in name]


@pytest.mark.thinned("mci")
@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("vit_small_resnet26d_224", r"patch_embed\.backbone\.conv1\.1 \(BatchNorm2d\)"),
        ("vit_base_resnet50d_224", r"patch_embed\.backbone\.conv1\.1 \(BatchNorm2d\)"),
        ("vit_base_mci_224", r"patch_embed\.backbone\.0\.bn \(BatchNormAct2d\)"),
    ],
)
def test_a_model_whose_training_changes_buffers_is_refused_by_name(name: str, module: str) -> None:
    with pytest.raises(ValueError, match=rf"model\.name={name} cannot .*: {module} changes its buffer running_mean"):
        TimmModel(name=name, pretrained=False).build_meta(Head("image", 5), (3, 224, 224), seed=0)


def test_a_hybrid_without_batch_statistics_is_accepted() -> None:
    spec = TimmModel(name="vit_tiny_r_s16_p8_224", pretrained=False)

    assert spec.build_meta(Head("image", 5), (3, 64, 64), seed=0).num_blocks == 12


def test_each_block_of_an_eva_is_scaled_by_its_own_number(monkeypatch: pytest.MonkeyPatch) -> None:
    scaled = build(tiny(name="eva02_tiny_patch14_224"))
    monkeypatch.setattr("timm.models.eva.Eva.fix_init_weight", lambda _: None)
    plain = build(tiny(name="eva02_tiny_patch14_224"))

    for number in (1, 2):
        for path in ("attn.proj", "mlp.fc2"):
            one, other = (stack[number].module.get_submodule(path).weight for stack in (plain, scaled))
            torch.testing.assert_close(other, one / (2 * number) ** 0.5)
        assert torch.equal(plain[number].module.mlp.fc1.weight, scaled[number].module.mlp.fc1.weight)


def test_each_block_is_scaled_by_its_own_number() -> None:
    plain, scaled = (build(tiny(options={"depth": 3, "fix_init": fix})) for fix in (False, True))

    for number in (1, 2, 3):
        for path in ("attn.proj", "mlp.fc2"):
            one, other = (stack[number].module.get_submodule(path).weight for stack in (plain, scaled))
            torch.testing.assert_close(other, one / (2 * number) ** 0.5)
        assert torch.equal(plain[number].module.mlp.fc1.weight, scaled[number].module.mlp.fc1.weight)


def timm_transform(folder: Path) -> Callable[[Image.Image], torch.Tensor]:
    model = timm.create_model(f"local-dir:{folder}", pretrained=True)
    return timm.data.create_transform(**timm.data.resolve_data_config({}, model=model))


@pytest.mark.parametrize("shape", [(16, 16), (32, 32), (11, 11), (21, 34), (50, 23)])
def test_timm_reads_pictures_for_a_saved_model_as_the_run_did(shape: tuple[int, int], tmp_path: Path) -> None:
    saved(tmp_path, tiny(name="deit_tiny_patch16_224"))
    pixels = np.random.default_rng(0).integers(0, 256, (1, *shape, 3), dtype=np.uint8)
    wanted = ImageFormat(**TimmModel(name=str(tmp_path)).input_format())
    pictures = from_arrays(pixels, np.zeros(1, dtype=np.int64))
    (expected,) = ImageSplit("test", pictures, wanted, image_classification(1)).inputs([0], None)

    found = timm_transform(tmp_path)(Image.fromarray(pixels[0]))

    assert torch.equal(found, expected)


def test_a_saved_model_of_another_size_forgets_the_cropping_of_the_model_that_it_began_with(tmp_path: Path) -> None:
    saved(tmp_path, tiny(name="deit3_small_patch16_224"))
    config = timm.data.resolve_data_config({}, model=timm.create_model(f"local-dir:{tmp_path}", pretrained=True))

    assert (config["interpolation"], config["crop_pct"], config["input_size"]) == ("bilinear", 1.0, (3, 16, 16))


@pytest.mark.parametrize("labels", [("ant", "bee", "cat", "dog", "elk"), ()])
def test_a_saved_model_knows_the_classes(labels: tuple[str, ...], tmp_path: Path) -> None:
    stack = tiny().build(Head("image", 5, labels), (3, 16, 16), seed=0)
    tiny().save(stack, {name: t for layer in stack.layers for name, t in layer.original_state().items()}, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())

    assert config.get("label_names", []) == list(labels)
    assert not config["pretrained_cfg"].get("label_names")


def test_a_checkpoint_with_a_tensor_that_has_no_place_is_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    save_file({**state, "blocks.0.attn.relative": torch.zeros(2)}, tmp_path / "model.safetensors")

    with pytest.raises(ValueError, match=r"blocks\.0\.attn\.relative"):
        TimmModel(name=str(tmp_path)).build(Head("image", 5), (3, 16, 16), seed=0)


def test_another_task_is_refused() -> None:
    with pytest.raises(ValueError, match="asks for a span head; choose a text model"):
        build(tiny(), kind="span")


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "nobody/vit", "/no/such/folder"])
def test_weights_out_of_reach_are_reported_with_both_ways_out(name: str) -> None:
    with pytest.raises(ValueError, match=r"model\.name=<folder>.*model\.pretrained=false"):
        build(TimmModel(name=name), (3, 224, 224))


def test_a_folder_without_config_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json"):
        build(TimmModel(name=str(tmp_path)))


def test_a_folder_of_another_library_is_reported(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')

    with pytest.raises(ValueError, match=r"could not load .*architecture"):
        build(TimmModel(name=str(tmp_path)))
