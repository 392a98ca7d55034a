"""Vision towers of Hugging Face transformers (ViT, DINOv2, SigLIP) as a flat stack."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pipetransformer.errors import UserError
from pipetransformer.models.base import Head
from pipetransformer.models.files import check_code, read_settings
from pipetransformer.models.huggingface_base import REMEDY, TransformersSpec, first_line

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from pipetransformer.models.stack import LayerStack

PROCESSOR = "preprocessor_config.json"
NOT_RUN = {"use_mask_token": False, "vision_use_head": False}
"""Settings of parts that no image classifier runs: DINOv2's token of masked patches and SigLIP's pooling."""
_BILINEAR = 2  # Pillow's number


@dataclass(frozen=True, kw_only=True)
class HuggingFaceVisionModel(TransformersSpec):
    """A vision tower with a classifier of images.

    From scratch it takes the configuration of ``name``.

    Attributes:
        image_size: Side length in pixels; ``None`` takes that of the published preprocessing, or the data's own from
            scratch. Positions are for one size, but those of DINOv2 fit any.
    """

    image_size: int | None = None

    modality: ClassVar[str] = "image"
    preprocessing: ClassVar[str] = PROCESSOR
    heads: ClassVar[dict[str, str]] = {"image": "AutoModelForImageClassification"}

    def check(self) -> None:
        self._check_picture(image_size=self.image_size)
        super().check()

    def input_format(self) -> dict[str, Any]:
        """Returns keyword arguments of ``ImageFormat``: the published preprocessing, or a plain one from scratch."""
        from pipetransformer.models.huggingface_vision_layers import vision_config

        if not self.pretrained:
            return {"size": self.image_size, "num_channels": None, "mean": (0.5,), "std": (0.5,)}
        processor = self._processor()
        crop = processor.get("crop_size") if processor.get("do_center_crop") else None
        size = self.image_size or _side(crop or processor.get("size"))
        if size is None:
            raise UserError(f"the {PROCESSOR} of model.name={self.name} has no square size; give model.image_size")
        normalizes = processor.get("do_normalize", True)
        return {
            "size": size,
            "num_channels": vision_config(self._config()).num_channels,
            "mean": tuple(processor["image_mean"]) if normalizes else (0.0,),
            "std": tuple(processor["image_std"]) if normalizes else (1.0,),
        }

    def build_meta(self, head: Head, input_shape: tuple[int, ...], seed: int) -> LayerStack:
        stack = super().build_meta(head, input_shape, seed)
        self._check_size(stack, input_shape)
        return stack

    def _save_preprocessing(self, model: PreTrainedModel, folder: Path) -> None:
        """Writes preprocessor_config.json, which resizes and normalises as the run did: the shorter side, the middle.

        With ``backend="pil"`` it gives the same pictures, by default the same up to one of 255 levels of a colour.
        """
        from transformers.models.bit.image_processing_pil_bit import BitImageProcessorPil

        from pipetransformer.models.huggingface_vision_layers import vision_config

        wanted, sizes = self.input_format(), vision_config(model.config)
        size, num_channels = wanted["size"] or sizes.image_size, sizes.num_channels
        BitImageProcessorPil(
            size={"shortest_edge": size},
            crop_size={"height": size, "width": size},
            resample=_BILINEAR,
            image_mean=_per_channel(wanted["mean"], num_channels),
            image_std=_per_channel(wanted["std"], num_channels),
            do_convert_rgb=num_channels == 3,
        ).save_pretrained(folder)

    def _config_for(self, input_shape: tuple[int, ...]) -> PretrainedConfig:
        """Returns the configuration for images (C, H, W), without the parts that are not run."""
        from pipetransformer.models.huggingface_vision_layers import vision_config

        config = self._config()
        sizes = vision_config(config)
        if len(input_shape) != 3:
            raise UserError(f"model.name={self.name} reads images, the dataset has texts; choose a text model")
        num_channels, height, width = input_shape
        if height != width or height % sizes.patch_size:
            raise UserError(
                f"images of {height}x{width} pixels do not divide into squares of patches of {sizes.patch_size}; give "
                f"model.image_size a multiple of {sizes.patch_size}"
            )
        if not self.pretrained:
            sizes.image_size, sizes.num_channels = height, num_channels
        for name, value in NOT_RUN.items():
            if hasattr(sizes, name):
                setattr(sizes, name, value)
        return config

    def _check_config(self, config: PretrainedConfig) -> None:
        from pipetransformer.models.huggingface_vision_layers import check_vision_config

        check_vision_config(config)

    def _check_size(self, stack: LayerStack, input_shape: tuple[int, ...]) -> None:
        """Runs the embedding without storage: most have positions for images of one size."""
        import torch

        from pipetransformer.models.huggingface_vision_layers import vision_config
        from pipetransformer.models.stack import without_storage

        try:
            without_storage(stack[0])(torch.empty(2, *input_shape, device="meta"))
        except (ValueError, RuntimeError) as error:
            sizes = vision_config(stack.config[1])
            raise UserError(
                f"model.name={self.name} takes images of {sizes.image_size}x{sizes.image_size} pixels in "
                f"{sizes.num_channels} channels, the dataset gives {input_shape}; give "
                f"model.image_size={sizes.image_size}, or model.pretrained=false"
            ) from error

    def _processor(self) -> dict[str, Any]:
        """Returns the settings of the image processor."""
        from transformers import AutoImageProcessor

        check_code(self.name, PROCESSOR, read_settings(Path(self.name) / PROCESSOR), self.trust_remote_code)
        try:
            found = AutoImageProcessor.from_pretrained(self.name, trust_remote_code=self.trust_remote_code)
        except (ValueError, LookupError, TypeError, AttributeError, OSError, ImportError) as error:
            raise UserError(
                f"transformers found no image processor under model.name={self.name}: {first_line(error)}. {REMEDY}"
            ) from error
        processor = found.to_dict()
        scale = processor.get("rescale_factor", 1 / 255) if processor.get("do_rescale", True) else 1.0
        if abs(scale * 255 - 1) > 1e-6:
            raise UserError(
                f"the {PROCESSOR} of model.name={self.name} multiplies pixels by {scale} and not by 1/255 before it "
                "normalises them; choose another model"
            )
        return processor


def _side(size: Any) -> int | None:
    """Returns the side length of a square image, or of the shorter side."""
    if not size:
        return None
    if size.get("shortest_edge"):
        return size["shortest_edge"]
    return size["height"] if size.get("height") == size.get("width") else None


def _per_channel(values: tuple[float, ...], num_channels: int) -> list[float]:
    """Returns one value per channel; one stands for all."""
    return list(values) * num_channels if len(values) == 1 else list(values)
