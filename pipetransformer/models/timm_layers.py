"""Splits a timm Vision Transformer or Eva into layers that run its own code.

The embedding is the original model without blocks, the head is what stands behind them::

    model:  patch embedding, positions, norm_pre -> blocks -> norm -> pooling, fc_norm, head
    stack:  embedding                               blocks    head

The blocks of an Eva are also given rotary positions (:mod:`pipetransformer.models.timm_rotary`).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from timm.layers import GluMlp, Mlp, PatchEmbed
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from pipetransformer.errors import UserError
from pipetransformer.models.checks import beside_weights, check_same_outputs, draw_all
from pipetransformer.models.layer import Forward, Layer, shallow_copy
from pipetransformer.models.stack import LayerStack
from pipetransformer.models.timm_rotary import RotaryPositions
from pipetransformer.models.tp_plan import Column, Heads, Rule, TpPlan

FlatModel = VisionTransformer | Eva
"""Classes of timm whose blocks are a flat list."""
BLOCKS = "blocks."
EMBEDDING_PLAN: TpPlan = {
    "": Column({"cls_token": 2, "reg_token": 2, "dist_token": 2, "pos_embed": 2}),
    "patch_embed.proj": Column({"weight": 0, "bias": 0}),
    "norm_pre": "column_norm",
}
BLOCK_PLAN: dict[str, Rule] = {
    "norm1": "norm",
    "attn": Heads(("num_heads", "attn_dim")),
    "attn.qkv": "packed_colwise:3",
    "attn.q_norm": "replicated",
    "attn.k_norm": "replicated",
    "attn.proj": "rowwise",
    "ls1": "hidden",
    "norm2": "norm",
    "mlp.fc1": "colwise",
    "mlp.fc2": "rowwise",
    "ls2": "hidden",
}
_BEHIND_THE_BLOCKS = ("norm", "attn_pool", "fc_norm", "head_drop", "head", "head_dist")


def split_layers(model: FlatModel, config: Any = None) -> LayerStack:
    """Returns the model as a flat stack that shares its parameters.

    Args:
        model: With or without storage.
        config: Kept for :meth:`TimmModel.save`.

    Raises:
        UserError: It has an ingredient that no list of layers can hold.
    """
    patches: Any = model.patch_embed
    num_tokens, width = patches.num_patches + model.num_prefix_tokens, model.embed_dim
    return LayerStack(_layers(model), lambda images: torch.Size((len(images), num_tokens, width)), config)


def check_runs_by_layers(model: FlatModel, create: Callable[..., FlatModel], num_outputs: int) -> set[str]:
    """Checks on a two-block copy that the stack computes what the model computes, and trains in any micro-batches.

    Args:
        model: May have no storage.
        create: Makes the model with other arguments of ``timm.create_model``.
        num_outputs: Numbers that the head must give for each image.

    Returns:
        The names of parameters of the copy that get no gradient.

    Raises:
        UserError: It does not, with the reason.
    """
    patches: Any = model.patch_embed
    side = 2 * patches.feat_ratio()
    tiny = create(pretrained=False, img_size=side, **_short(model), **_narrow(model))
    draw_all(tiny)
    outputs, idle = _check(tiny, (side, side))
    if outputs.shape[1:] != (num_outputs,):
        raise UserError(
            f"its head gives {tuple(outputs.shape[1:])} for an image in place of {num_outputs} numbers; give "
            "model.options.global_pool=avg, or token where there is a class token"
        )
    return idle


def check_instance(model: FlatModel) -> set[str]:
    """Checks a model with weights, without most of its blocks, as :func:`check_runs_by_layers` does.

    Raises:
        UserError: It cannot be trained layer by layer, with the reason.
    """
    short: Any = shallow_copy(model)
    short.blocks = nn.Sequential(*list(model.blocks)[:2])
    return _check(short, short.patch_embed.img_size)[1]


def _check(model: FlatModel, size: tuple[int, int]) -> tuple[Tensor, set[str]]:
    """Returns the outputs for four images of noise, and the names of parameters that get no gradient."""
    stack = split_layers(model)
    first = next(weight for weight in model.patch_embed.parameters() if weight.dim() == 4)  # (D, C, height, width)
    shape, generator = (4, first.shape[1], *size), torch.Generator().manual_seed(0)
    images, _ = beside_weights(model, torch.randn(shape, generator=generator, dtype=first.dtype))  # (B, C, H, W)
    idle = stack.check(images)
    check_same_outputs(stack, model, model, images)
    with torch.no_grad():
        return stack(images), idle


def _short(model: FlatModel) -> dict[str, Any]:
    """Returns arguments that make the model one of two blocks."""
    depth = min(2, len(model.blocks))
    attentions: list[Any] = [block.attn for block in model.blocks][:depth] if isinstance(model, Eva) else []
    grouped = [each.num_kv_heads for each in attentions if hasattr(each, "num_kv_heads")]
    return {"depth": depth, **({"num_kv_heads": grouped} if grouped else {})}


def _narrow(model: FlatModel) -> dict[str, int]:
    """Returns arguments that make the model narrow, where its patch embedding allows any width."""
    heads: list[Any] = [part.num_heads for part in model.blocks.modules() if hasattr(part, "num_heads")]
    return {"embed_dim": 8 * int(heads[0])} if heads and type(model.patch_embed) is PatchEmbed else {}


def _layers(model: FlatModel) -> list[Layer]:
    if getattr(model, "patch_drop", None) is not None and not isinstance(model.patch_drop, nn.Identity):
        raise UserError("its patch_drop leaves out other patches of each image in each step; make it without")
    embedding: Any = shallow_copy(model)
    head = shallow_copy(model)
    for name in _BEHIND_THE_BLOCKS:
        embedding._modules.pop(name, None)
    embedding.blocks, embedding.norm = nn.Sequential(), nn.Identity()
    run_block: Forward = _run_block
    if isinstance(model, Eva) and model.rope is not None:
        embedding.rope = None
        run_block = partial(_run_rotary_block, RotaryPositions(model))
    head._modules = {name: part for name, part in head._modules.items() if name in _BEHIND_THE_BLOCKS}
    head._parameters = {}
    has_plan = isinstance(model, VisionTransformer)
    blocks = [
        Layer(block, run_block, f"{BLOCKS}{index}.", _plan_of(block) if has_plan else None)
        for index, block in enumerate(model.blocks)
    ]
    return [
        Layer(embedding, _run_embedding, tp_plan=EMBEDDING_PLAN if has_plan else None),
        *blocks,
        Layer(head, _run_head),
    ]


def _plan_of(block: Any) -> TpPlan:
    """Returns how a block is split: a gated MLP has values and gates in one matrix, and each is cut by itself."""
    mlp = getattr(block, "mlp", None)  # a block of parallel parts has none of its own
    if isinstance(mlp, GluMlp):
        return BLOCK_PLAN | {"mlp.fc1": "packed_colwise:2"}
    if isinstance(mlp, Mlp):
        return BLOCK_PLAN
    return {name: rule for name, rule in BLOCK_PLAN.items() if not name.startswith("mlp.")}  # refused by name


def _run_embedding(model: FlatModel, images: Tensor, **_: Any) -> Tensor:
    return model.forward_features(images)  # the copy has no blocks: (B, C, H, W) -> (B, T, D)


def _run_block(block: nn.Module, hidden: Tensor, **_: Any) -> Tensor:
    return block(hidden)


def _run_rotary_block(positions: RotaryPositions, block: nn.Module, hidden: Tensor, **_: Any) -> Tensor:
    return block(hidden, rope=positions(hidden))


def _run_head(model: FlatModel, hidden: Tensor, **_: Any) -> Tensor:
    return model.forward_head(model.norm(hidden))  # (B, T, D) -> (B, num_outputs)
