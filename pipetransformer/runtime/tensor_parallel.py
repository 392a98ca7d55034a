"""Layers whose parameters the ranks of a mesh have in parts: the library's own modules with other leaves.

A rank runs timm's or transformers' modules unmodified, as if the model were narrower; only products, norms over a
split width and embeddings know that other ranks exist. The distributed program is differentiated as one program: each
exchange has its true adjoint. So a copy of a parameter has its own part of the gradient, and copies get the sum::

    forward     x --all-gather--> X --product with all-gathered W--> Y --reduce-scatter--> y
    backward   dx <-reduce-scatter- dX                               dY <--all-gather---- dy
               dw <-reduce-scatter- dY^T X

Activations and weights stay in parts, so backward all-gathers them again, as that of SUMMA does.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from pipetransformer.errors import UserError
from pipetransformer.mesh import WHOLE, StageMesh
from pipetransformer.models.layer import Layer
from pipetransformer.models.split import WITHOUT_MESH, parts_of, tp_plan_of
from pipetransformer.models.tp_plan import Column, Heads, Rule, kind_of_rule, ruled
from pipetransformer.runtime.mesh import MeshAxis, RankMesh, widened

Place = tuple[MeshAxis, int | None] | None
_CLASSES: dict[str, type[nn.Module]] = {
    **dict.fromkeys(("colwise", "rowwise"), nn.Linear),
    "embedding": nn.Embedding,
    **dict.fromkeys(("norm", "column_norm"), nn.LayerNorm),
}
"""Modules that a rule is for, and that another one stands for on a mesh."""


class _Product(Function):
    """``leave(enter(x) @ gather(weight).T)``, of which backward keeps the parts only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, enter: Place, gather: Place, leave: Place) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.exchanges = enter, gather, leave
        y = F.linear(_gathered(x, enter), _gathered(weight, gather))
        if leave is None:
            return y
        axis, dim = leave
        return axis.all_reduce(y) if dim is None else axis.reduce_scatter(y, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        (x, weight), (enter, gather, leave) = ctx.saved_tensors, ctx.exchanges
        if leave is not None:
            axis, dim = leave
            gradient = axis.all_reduce(gradient) if dim is None else axis.all_gather(gradient, dim)
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            of_x = _scattered(gradient @ _gathered(weight, gather), enter)
        if ctx.needs_input_grad[1]:
            whole_x = _gathered(x, enter)
            of_weight = _scattered(gradient.flatten(0, -2).T @ whole_x.flatten(0, -2), gather)
        return of_x, of_weight, None, None, None


def _gathered(x: Tensor, place: Place) -> Tensor:
    if place is None:
        return x
    axis, dim = place
    assert dim is not None, "parts have a dimension"
    return axis.all_gather(x, dim)


def _scattered(x: Tensor, place: Place) -> Tensor:
    if place is None:
        return x
    axis, dim = place
    assert dim is not None, "parts have a dimension"
    return axis.reduce_scatter(x, dim)


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: MeshAxis, dim: int) -> Tensor:
        ctx.place = axis, dim
        return axis.all_gather(x, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        axis, dim = ctx.place
        return axis.reduce_scatter(gradients[0], dim), None, None


class _Slice(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, first: int, size: int) -> Tensor:
        ctx.place = dim, first, x.shape[dim]
        return x.narrow(dim, first, size).contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,), (dim, first, size) = gradients, ctx.place
        shape = list(gradient.shape)
        shape[dim] = size
        whole = gradient.new_zeros(shape)
        whole.narrow(dim, first, gradient.shape[dim]).copy_(gradient)
        return whole, None, None, None


def all_gather(x: Tensor, axis: MeshAxis, dim: int) -> Tensor:
    """All-gathers a tensor that goes on alike on all ranks of the axis; its gradient is summed and scattered."""
    return x if axis.size == 1 else _Gather.apply(x, axis, dim)


def own_slice(x: Tensor, dim: int, first: int, size: int) -> Tensor:
    """Returns a slice of a tensor that all ranks have; the gradient outside of it is zero."""
    return _Slice.apply(x, dim, first, size)


class ShardedLinear(nn.Linear):
    """A product whose weight the ranks of a mesh have in parts.

    Args:
        whole: The module that it stands for; with its parameters, which are cut later.
        style: ``colwise`` or ``rowwise``.
        mesh: Told where the output is.
    """

    def __init__(self, whole: nn.Linear, style: str, mesh: RankMesh) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = whole.in_features, whole.out_features
        self.weight, self.bias = whole.weight, whole.bias
        exchanges = mesh.mesh.exchanges("colwise" if style == "colwise" else "rowwise")
        self._exchanges = tuple(mesh.along(exchange) for exchange in exchanges)
        self._mesh, self._place_after = mesh, "inner" if style == "colwise" else "hidden"

    def forward(self, input: Tensor) -> Tensor:
        """Multiplies this rank's part of the input; returns its part of the output.

        Under autocast both are cast before they are gathered, so that half the bytes are sent.
        """
        dtype, device = input.dtype, input.device.type
        if torch.is_autocast_enabled(device) and dtype != torch.float64:
            dtype = torch.get_autocast_dtype(device)
        y = _Product.apply(input.to(dtype), self.weight.to(dtype), *self._exchanges)
        self._mesh.place = self._place_after
        return y if self.bias is None else y + self.bias.to(dtype)


class _LayerNorm(Function):
    """A norm of rows of which each rank along an axis has a part. It keeps its input, and two numbers of each row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, axis: MeshAxis, eps: float) -> Tensor:
        width, wide = x.shape[-1], widened(x)
        mean = wide.mean(-1)  # (...)
        deviations = (wide - mean[..., None]).square().sum(-1)
        means, squares = axis.all_gather(torch.stack([mean, deviations])[None], 0).unbind(1)  # (size, ...)
        mean = means.mean(0)
        variance = (squares + width * (means - mean).square()).sum(0) / (width * axis.size)
        mean, scale = mean[..., None], torch.rsqrt(variance + eps)[..., None]
        ctx.save_for_backward(x, weight, mean, scale)
        ctx.axis = axis
        normalized = (wide - mean) * scale
        if weight is not None:
            normalized = normalized * weight
        return normalized if bias is None else normalized + bias

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,), (x, weight, mean, scale), axis = gradients, ctx.saved_tensors, ctx.axis
        normalized, rows = (widened(x) - mean) * scale, range(gradient.ndim - 1)
        of_x = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            inner = gradient if weight is None else gradient * weight
            sums = torch.stack([inner.sum(-1), (inner * normalized).sum(-1)])  # (2, ...)
            of_mean, of_scale = axis.all_gather(sums[None], 0).sum(0)[..., None] / (x.shape[-1] * axis.size)
            of_x = ((inner - of_mean - normalized * of_scale) * scale).to(x.dtype)
        if ctx.needs_input_grad[1]:
            of_weight = (gradient * normalized).sum([*rows])
        if ctx.needs_input_grad[2]:
            of_bias = gradient.sum([*rows])
        return of_x, of_weight, of_bias, None, None


class ShardedLayerNorm(nn.LayerNorm):
    """A norm over a width of which each rank along an axis has a part.

    The ranks all-gather mean and squared deviations of each row, and combine them by the parallel variance of Chan et
    al. (1979): a difference of squares would lose digits.
    """

    def __init__(self, whole: nn.LayerNorm, axis: MeshAxis) -> None:
        nn.Module.__init__(self)
        self.normalized_shape, self.eps = whole.normalized_shape, whole.eps
        self.elementwise_affine = whole.elementwise_affine
        self.weight, self.bias = whole.weight, whole.bias
        self._axis = axis

    def forward(self, input: Tensor) -> Tensor:
        """Normalizes (..., D / size); in float32 under autocast, as torch's own."""
        return _LayerNorm.apply(input, self.weight, self.bias, self._axis, self.eps)


class ShardedEmbedding(nn.Embedding):
    """A table of which each rank has a part of the width, and where rows of the batch are split a part of that."""

    def __init__(self, whole: nn.Embedding, rows: MeshAxis) -> None:
        nn.Module.__init__(self)
        self.num_embeddings, self.embedding_dim = whole.num_embeddings, whole.embedding_dim
        self.padding_idx, self.weight, self._rows = whole.padding_idx, whole.weight, rows

    def forward(self, input: Tensor) -> Tensor:
        """Looks up (B, T) in the table's part of this rank's width, (B, T, D / tp)."""
        return F.embedding(input, all_gather(self.weight, self._rows, 1), self.padding_idx)


def shard_layer(layer: Layer, mesh: RankMesh, is_head: bool = False) -> None:
    """Replaces the leaves of a layer that the plan names, and cuts its parameters to the parts of this rank.

    Names stay as they are, so optimizers, freezing and checkpoints go on by name.

    Args:
        layer: Changed in place, with storage or without.
        is_head: The layer stays whole.

    Raises:
        UserError: A parameter has no rule, or attention would not go around the ring.
    """
    _refuse_own_attention(layer, mesh.mesh)
    module, found = layer.module, parts_of(layer, is_head)
    layer.whole_shapes = {name: parameter.shape for name, parameter in layer.by_name().items()}
    if is_head:
        layer.cuts = {name: (part, WHOLE) for name, part in found.items()}
        return
    for path, rule in list(ruled(module, tp_plan_of(layer))):
        replace_leaf(module, path, rule, mesh)
    for name, part in found.items():
        box = mesh.mesh.box(part.style, mesh.rank)
        layer.cuts[name] = part, box
        path, _, leaf = name.removeprefix(layer.prefix).rpartition(".")
        owner = module.get_submodule(path)
        whole = getattr(owner, leaf)
        setattr(owner, leaf, nn.Parameter(part.cut(whole.detach(), box).clone(), whole.requires_grad))


def check_modules(layer: Layer, mesh: StageMesh) -> None:
    """Refuses a layer below the head whose modules do not run on a mesh, before it is cut.

    Raises:
        UserError: A module is of another class than its rule is for, or attention would not go around the ring.
    """
    _refuse_own_attention(layer, mesh)
    for path, rule in ruled(layer.module, tp_plan_of(layer)):
        if isinstance(rule, str):
            _check_class(path, layer.module.get_submodule(path), kind_of_rule(rule)[0], mesh)


def _refuse_own_attention(layer: Layer, mesh: StageMesh) -> None:
    """Refuses attention that computes its own softmax: a ring takes the place of torch's function alone."""
    own = (name for name, module in layer.module.named_modules() if getattr(module, "fused_attn", True) is False)
    if mesh.cp > 1 and (name := next(own, None)) is not None:
        raise UserError(
            f"`cp`={mesh.cp} splits the tokens, and {layer.prefix}{name} computes its attention without torch's "
            "scaled_dot_product_attention, so that tokens would not see each other; set its fused_attn (timm: "
            "TIMM_FUSED_ATTN=1), or take `cp`=1"
        )


def replace_leaf(module: nn.Module, path: str, rule: Rule, mesh: RankMesh) -> None:
    """Replaces one module by the one that stands for it on a mesh."""
    child: Any = module.get_submodule(path)
    if isinstance(rule, Heads):
        for name in filter(partial(hasattr, child), rule.attributes):  # older versions lack some
            setattr(child, name, getattr(child, name) // mesh.inner.size)
        return
    if isinstance(rule, Column):
        return
    kind, _ = kind_of_rule(rule)
    expected = _check_class(path, child, kind, mesh.mesh)
    replacement: nn.Module | None = None
    if expected is nn.Linear:
        replacement = ShardedLinear(child, kind, mesh)
    elif expected is nn.Embedding:
        replacement = ShardedEmbedding(child, mesh.axes.get("dp_shard", MeshAxis(1, 0)))
    elif expected is nn.LayerNorm:
        replacement = ShardedLayerNorm(child, mesh.hidden)
    if replacement is not None:
        parent, _, leaf = path.rpartition(".")
        setattr(module.get_submodule(parent), leaf, replacement.train(child.training))


def _check_class(path: str, child: nn.Module, kind: str, mesh: StageMesh) -> type[nn.Module] | None:
    """Returns the class of modules that another one stands for on a mesh; ``None`` where they stay."""
    expected: type[nn.Module] | None = _CLASSES.get(kind)
    if kind == "norm" and not mesh.splits_hidden:
        return None
    if expected is not None and not isinstance(child, expected):
        remedy = "run with parallel.tp_algorithm=1d" if kind == "norm" else WITHOUT_MESH
        raise _cannot_split(path, child, f"nn.{expected.__name__}", remedy)
    return expected


def _cannot_split(path: str, module: nn.Module, expected: str, remedy: str = WITHOUT_MESH) -> UserError:
    return UserError(f"{path} is a {type(module).__name__} and not an {expected}, and cannot be split; {remedy}")
