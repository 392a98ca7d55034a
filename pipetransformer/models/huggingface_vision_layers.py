"""Splits a vision tower of transformers into layers that run its own modules.

Its forward is one line per part::

    base model:  embeddings (patches, class token, positions) -> blocks -> norm
    task model:  base model -> the class token, or a mean over the patches -> classifier
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from pipetransformer.errors import UserError
from pipetransformer.models.checks import beside_weights, check_same_outputs, draw_all
from pipetransformer.models.huggingface_heads import find_base, logits, make_head
from pipetransformer.models.layer import Layer
from pipetransformer.models.stack import LayerStack

_NORMS = ("layernorm", "post_layernorm")
_NOT_RUN = {"head"}  # SigLIP's pooling, which its classifier does not use; it is kept with the head


def reads_images(model: PreTrainedModel) -> bool:
    """Returns whether a model takes images."""
    return model.main_input_name == "pixel_values"


def vision_config(config: PretrainedConfig) -> Any:
    """Returns the part of a configuration that has the sizes of the vision tower."""
    return getattr(config, "vision_config", config)


def split_vision(model: PreTrainedModel) -> LayerStack:
    """Returns the task model as a flat stack that shares its parameters.

    Raises:
        UserError: The model is built in another way.
    """
    prefix, base = find_base(model)
    check_vision_config(model.config)
    container, blocks = _find_blocks(base)
    norm = next((name for name in _NORMS if name in base._modules), None)
    beside = {name for name, _ in base.named_children()} - {"embeddings", container.partition(".")[0], norm} - _NOT_RUN
    if norm is None or beside or "embeddings" not in base._modules:
        raise UserError("it is not made of embeddings, blocks and a norm alone")
    after = {name: part for name, part in base.named_children() if name == norm or name in _NOT_RUN}
    layers = [
        Layer(base.get_submodule("embeddings"), _run_embedding, f"{prefix}.embeddings."),
        *(Layer(block, _run_block, f"{prefix}.{container}.{index}.") for index, block in enumerate(blocks)),
        Layer(make_head(model, after), _run_head),
    ]
    sizes = vision_config(model.config)
    num_others = "cls_token" in dict(layers[0].module.named_parameters(recurse=False))
    num_others += getattr(sizes, "num_register_tokens", 0)

    def hidden_shape(images: Tensor) -> torch.Size:
        num_patches = (images.shape[-2] // sizes.patch_size) * (images.shape[-1] // sizes.patch_size)
        return torch.Size((len(images), num_patches + num_others, sizes.hidden_size))

    return LayerStack(layers, hidden_shape, config=(type(model), model.config))


def _find_blocks(base: nn.Module) -> tuple[str, nn.ModuleList]:
    """Returns the blocks and their path; refuses modules beside them that the layers would not run."""
    lists = {path: part for path, part in base.named_modules() if isinstance(part, nn.ModuleList)}
    path = max(lists, key=lambda candidate: len(lists[candidate]), default="")
    container, _, name = path.rpartition(".")
    if not path or (container and {part for part, _ in base.get_submodule(container).named_children()} != {name}):
        raise UserError("it is not made of embeddings, blocks and a norm alone")
    return path, lists[path]


def check_vision_config(config: PretrainedConfig) -> None:
    """Raises UserError for a configuration that no list of layers can hold, with the reason."""
    sizes = vision_config(config)
    if getattr(sizes, "drop_path_rate", 0):
        raise UserError(
            f"its stochastic depth (drop_path_rate={sizes.drop_path_rate}) draws numbers that depend on the topology; "
            "give model.options.drop_path_rate=0"
        )
    for name in ("image_size", "patch_size"):
        if not isinstance(getattr(sizes, name, None), int):
            raise UserError(f"its {name} is {getattr(sizes, name, None)}; supported are square images and patches")


def check_vision(model: PreTrainedModel) -> set[str]:
    """Checks a model with weights: its layers compute what it computes, and train in any micro-batches.

    Returns:
        The names of parameters that get no gradient.

    Raises:
        UserError: It cannot be trained layer by layer, with the reason.
    """
    stack, sizes = split_vision(model), vision_config(model.config)
    shape = 4, sizes.num_channels, sizes.image_size, sizes.image_size
    images, _ = beside_weights(model, torch.randn(shape, dtype=model.dtype))  # (B, C, H, W)
    idle = stack.check(images)
    check_same_outputs(stack, model, lambda pixels: logits(model(pixel_values=pixels)), images)
    return idle


def tiny_vision_model(model: PreTrainedModel) -> PreTrainedModel:
    """Returns a model of the same kind with two blocks, four patches and random weights.

    Args:
        model: May have no storage.
    """
    config = copy.deepcopy(model.config)
    sizes = vision_config(config)
    sizes.image_size = 2 * sizes.patch_size
    sizes.num_hidden_layers = min(2, sizes.num_hidden_layers)
    if hasattr(sizes, "intermediate_size"):
        sizes.intermediate_size = 8
    tiny = type(model)(config)
    draw_all(tiny)
    return tiny


def _run_embedding(embeddings: nn.Module, images: Tensor, **_: Any) -> Tensor:
    """Maps images (B, C, H, W) to (B, T, D)."""
    return embeddings(images)


def _run_block(block: nn.Module, hidden: Tensor, **_: Any) -> Tensor:
    return block(hidden, None)  # no mask


def _run_head(model: nn.Module, hidden: Tensor, **_: Any) -> Tensor:
    """Maps the last block's output (B, T, D), which comes in place of the images, to (B, num_labels)."""
    return logits(model(pixel_values=hidden))
