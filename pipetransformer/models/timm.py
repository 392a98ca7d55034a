"""timm's Vision Transformers (ViT, DeiT and their kin) as a flat stack.

The layers run timm's own code: the embedding is the original model without blocks, the head is what stands behind them.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pipetransformer.models.base import Head, ModelSpec

if TYPE_CHECKING:
    from timm.models.vision_transformer import VisionTransformer
    from torch import Tensor, nn

    from pipetransformer.models.stack import Layer, LayerStack
    from pipetransformer.models.timm_weights import Create, Drawn

_BEHIND_THE_BLOCKS = ("norm", "attn_pool", "fc_norm", "head_drop", "head", "head_dist")
_NOT_AN_OPTION = {
    "num_classes": "it follows from the data",
    "in_chans": "use model.num_channels",
    "img_size": "use model.image_size",
    "pretrained": "use model.pretrained",
}


@dataclass(frozen=True, kw_only=True)
class TimmModel(ModelSpec):
    """A Vision Transformer from timm: its name there or on the hub, or a folder with config.json and its weights.

    Attributes:
        options: Arguments of ``timm.create_model``: patch_size, embed_dim, depth, num_heads, drop_path_rate, ...
        image_size: Side length in pixels; ``None`` takes the published model's, or the data's own from scratch.
        num_channels: Image channels; ``None`` takes the published model's, or the data's own from scratch.
    """

    options: dict[str, Any] = field(default_factory=dict)
    image_size: int | None = None
    num_channels: int | None = None

    modality: ClassVar[str] = "image"
    libraries: ClassVar[tuple[str, ...]] = ("timm",)

    def check(self) -> None:
        for option, remedy in _NOT_AN_OPTION.items():
            if option in self.options:
                raise ValueError(f"model.options.{option}={self.options[option]} is not an option: {remedy}")
        if self.options.get("patch_drop_rate"):
            raise ValueError(
                f"model.options.patch_drop_rate={self.options['patch_drop_rate']}: images would differ in tokens and "
                "in what the cache may keep; leave it out, or use drop_path_rate to regularise"
            )

    def input_format(self) -> dict[str, Any]:
        """Keyword arguments of ``ImageFormat``: the published model's preprocessing, or none worth the name."""
        if not self.pretrained:
            return {"size": self.image_size, "num_channels": self.num_channels, "mean": (0.5,), "std": (0.5,)}
        from timm.data.config import resolve_model_data_config

        published = resolve_model_data_config(self._outline())
        num_channels, size, _ = published["input_size"]
        wanted = self.num_channels or num_channels
        return {
            "size": self.image_size or size,
            "num_channels": wanted,
            "mean": _per_channel(published["mean"], wanted),
            "std": _per_channel(published["std"], wanted),
        }

    def outline(self, head: Head, input_shape: tuple[int, ...], seed: int) -> LayerStack:
        from pipetransformer.models.timm_weights import Drawn

        self.check()
        self._check_data(head, input_shape)
        num_channels, size, _ = input_shape
        arguments = {"num_classes": head.num_outputs, "in_chans": num_channels, "img_size": size}
        create = partial(self._create, **arguments)
        model = create(pretrained=False, device="meta")
        stack = _cut(model, arguments)
        drawn = Drawn(model, stack, create, seed)
        if self.pretrained:
            return self._published(stack, create, drawn, seed)
        stack.source = drawn
        return stack

    def save(self, stack: LayerStack, state: dict[str, Tensor], folder: Path) -> None:
        """Writes model.safetensors and config.json for ``timm.create_model("local-dir:<folder>", pretrained=True)``."""
        import torch
        from timm.models import save_for_hf

        with torch.device("meta"):
            model = self._create(pretrained=False, **stack.config)
        model.load_state_dict({name: tensor.cpu() for name, tensor in state.items()}, assign=True)
        num_channels, size = stack.config["in_chans"], stack.config["img_size"]
        wanted = self.input_format()
        preprocessing = {
            "input_size": (num_channels, size, size),
            "mean": _per_channel(wanted["mean"], num_channels),
            "std": _per_channel(wanted["std"], num_channels),
        }
        save_for_hf(
            model,
            str(folder),
            model_config={"pretrained_cfg": preprocessing},
            # recent versions of timm know their arguments, older ones have to be told
            model_args={**self.options, "in_chans": num_channels, "img_size": size},
            safe_serialization=True,
        )

    def _published(self, stack: LayerStack, create: Create, drawn: Drawn, seed: int) -> LayerStack:
        """The stack with the published weights as its source, or whole where they cannot be read layer by layer."""
        from pipetransformer.models.stack import seeded
        from pipetransformer.models.timm_weights import Published, find_checkpoint

        with self._explained():
            checkpoint = find_checkpoint(drawn.model.pretrained_cfg)
        source = Published(checkpoint, create, drawn) if checkpoint else None
        if source and not any(name.startswith("blocks.") for name in source.converted):
            stack.source = source
            return stack
        with seeded(seed):
            whole = _cut(create(pretrained=True), stack.config)
        why = "timm converts them" if source else "there is no model.safetensors"
        warnings.warn(
            f"every process reads all weights of model.name={self.name} before it keeps its own: {why}; save the model "
            "once with timm.models.save_for_hf to avoid it",
            stacklevel=2,
        )
        return whole

    def _check_data(self, head: Head, input_shape: tuple[int, ...]) -> None:
        if head.kind != "image":
            raise ValueError(
                f"a timm model has an image head, the dataset asks for a {head.kind} head; choose a text model"
            )
        num_channels, height, width = input_shape
        if height != width:
            raise ValueError(f"images of {height}x{width} pixels are not square; give model.image_size=<pixels>")
        pixels_per_patch = self._outline().patch_embed.feat_ratio()
        if height % pixels_per_patch:
            raise ValueError(
                f"images of {height}x{width} pixels do not divide into patches of {pixels_per_patch}; give "
                f"model.image_size a multiple of {pixels_per_patch}, or change model.options.patch_size"
            )
        expected = self.input_format()["num_channels"]
        if expected not in (None, num_channels):
            raise ValueError(
                f"images have {num_channels} channels, the model takes {expected}; "
                f"give model.num_channels={num_channels}"
            )

    def _outline(self) -> VisionTransformer:
        """The model as published, without storage: for questions about its sizes and its preprocessing."""
        import torch

        with torch.device("meta"):
            return self._create(pretrained=False)

    def _create(self, pretrained: bool, **arguments: Any) -> VisionTransformer:
        import timm
        from timm.models.vision_transformer import VisionTransformer

        with self._explained():
            model = timm.create_model(self._source(), pretrained=pretrained, **self.options, **arguments)
        if not isinstance(model, VisionTransformer):
            raise ValueError(
                f"model.name={self.name} is a {type(model).__name__}; supported is what timm builds as a "
                "VisionTransformer: vit_*, deit_*, deit3_* and folders with one of these"
            )
        return model

    @contextmanager
    def _explained(self) -> Iterator[None]:
        from safetensors import SafetensorError

        try:
            yield
        except (TypeError, AssertionError) as error:
            raise ValueError(f"{self.name} does not go with model.options={self.options}: {error}") from error
        except (OSError, RuntimeError, ValueError, KeyError, SafetensorError) as error:
            raise ValueError(
                f"timm could not load model.name={self.name} (model.pretrained={self.pretrained}): {error}. Without "
                "network give model.name=<folder> with config.json and model.safetensors, or a name that timm lists "
                "with model.pretrained=false to start from scratch"
            ) from error

    def _source(self) -> str:
        """The name with the scheme by which timm tells folders, the hub and its own list apart."""
        if Path(self.name).is_dir():
            return f"local-dir:{self.name}"
        return f"hf-hub:{self.name}" if "/" in self.name and ":" not in self.name else self.name


def _per_channel(values: tuple[float, ...], num_channels: int) -> tuple[float, ...]:
    """The values themselves where there is one per channel, else their mean for each."""
    return tuple(values) if len(values) == num_channels else (sum(values) / len(values),) * num_channels


def _cut(model: VisionTransformer, arguments: dict[str, Any]) -> LayerStack:
    from torch import Size

    from pipetransformer.models.stack import LayerStack

    num_tokens, width = model.patch_embed.num_patches + model.num_prefix_tokens, model.embed_dim
    return LayerStack(_layers(model), lambda images: Size((len(images), num_tokens, width)), arguments)


def _layers(model: VisionTransformer) -> list[Layer]:
    from torch import nn

    from pipetransformer.models.sharing import shallow_copy
    from pipetransformer.models.stack import Layer

    embedding, head = shallow_copy(model), shallow_copy(model)
    for name in _BEHIND_THE_BLOCKS:
        embedding._modules.pop(name, None)
    embedding.blocks, embedding.norm = nn.Sequential(), nn.Identity()
    head._modules = {name: part for name, part in head._modules.items() if name in _BEHIND_THE_BLOCKS}
    head._parameters = {}
    blocks = [Layer(block, _run_block, f"blocks.{index}.") for index, block in enumerate(model.blocks)]
    return [Layer(embedding, _run_embedding), *blocks, Layer(head, _run_head)]


def _run_embedding(model: VisionTransformer, images: Tensor, **_: Any) -> Tensor:
    return model.forward_features(images)  # the copy has no blocks: (B, C, H, W) -> (B, T, D)


def _run_block(block: nn.Module, hidden: Tensor, **_: Any) -> Tensor:
    return block(hidden)


def _run_head(model: VisionTransformer, hidden: Tensor, **_: Any) -> Tensor:
    return model.forward_head(model.norm(hidden))  # (B, T, D) -> (B, num_outputs)
