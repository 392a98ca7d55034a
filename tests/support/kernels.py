"""Kernels whose rounding is known, in place of the machine's.

How the machine's kernels round depends on the processor and, on some processors, on the shape that they are called
with: a product of more rows may be summed up in another order.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

ATEN = torch.ops.aten
PRODUCTS = {ATEN.mm.default, ATEN.bmm.default, ATEN.addmm.default}
NOT_ROUNDED_ONCE = PRODUCTS | {  # a sum, or a function whose last bit is the library's affair
    ATEN._log_softmax.default, ATEN._log_softmax_backward_data.default, ATEN._softmax.default,
    ATEN._softmax_backward_data.default, ATEN.convolution.default, ATEN.convolution_backward.default,
    ATEN.embedding_dense_backward.default, ATEN.gelu.default, ATEN.gelu_backward.default,
    ATEN.linalg_vector_norm.default, ATEN.native_layer_norm.default, ATEN.native_layer_norm_backward.default,
    ATEN.sum.default, ATEN.sum.dim_IntList, ATEN.tanh.default, ATEN.tanh_backward.default,
}  # fmt: skip


class _RoundedOnce(TorchDispatchMode):
    """Computes in float64 and rounds the result, which then depends on the numbers alone, not on how they lie."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        dtype = next((arg.dtype for arg in args if isinstance(arg, Tensor) and arg.is_floating_point()), None)
        if func not in NOT_ROUNDED_ONCE or dtype in (None, torch.float64):
            return func(*args, **kwargs)
        wide = tree_map(lambda value: torch.float64 if value is dtype else _cast(value, torch.float64), args)
        return tree_map(lambda value: _cast(value, dtype), func(*wide, **kwargs))


class _ShapeDependent(TorchDispatchMode):
    """Sums a 16-bit product in parts, as many as its number of rows has it, and rounds the sum after each."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if func not in PRODUCTS or args[-1].dtype.itemsize != 2:
            return func(*args, **(kwargs or {}))
        *bias, left, right = args
        num_rows = left.shape[:-1].numel()
        size = (3, 4, 8)[num_rows % 3]  # of the parts
        cut = zip(left.split(size, -1), right.split(size, -2), strict=True)
        parts = [(a.double() @ b.double()).to(left.dtype) for a, b in cut]
        total = parts[0]
        for part in (*parts[1:], *bias):
            total = total + part
        return total


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def _in_place_of_the_machines(mode: TorchDispatchMode) -> AbstractContextManager[object]:
    """Attention as products and a softmax, each of which the mode sees."""
    with ExitStack() as stack:
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        stack.enter_context(mode)
        return stack.pop_all()


def _wide_norms() -> AbstractContextManager[object]:
    """Norms of Llama and Gemma, and rotary embeddings of ModernBERT, in the type of the hidden state.

    They round it to float32 themselves. So a difference in the last bit of float64, which another shape of a product
    may make, becomes one of float32 where it lies between two of its numbers.
    """
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    from transformers.models.modernbert import modeling_modernbert

    def norm(x: Tensor, eps: float) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)

    def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int) -> tuple[Tensor, Tensor]:
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        turn = modeling_modernbert.rotate_half
        return q * cos + turn(q) * sin, k * cos + turn(k) * sin

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(modeling_modernbert, "apply_rotary_pos_emb", rotated))
        stack.enter_context(
            mock.patch.object(LlamaRMSNorm, "forward", lambda own, x: own.weight * norm(x, own.variance_epsilon))
        )
        stack.enter_context(
            mock.patch.object(Gemma3RMSNorm, "forward", lambda own, x: (1 + own.weight) * norm(x, own.eps))
        )
        return stack.pop_all()


KERNELS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "native": nullcontext,
    "rounded once": lambda: _in_place_of_the_machines(_RoundedOnce()),
    "wide norms": _wide_norms,
    "shape-dependent": lambda: _in_place_of_the_machines(_ShapeDependent()),
}
