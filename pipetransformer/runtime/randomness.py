"""Random numbers that belong to a sample, so that dropout is the same at every topology (design promise 1).

Each sample of the global batch has a stream for each layer, seeded by (seed, step, sample, layer). A random function
inside a layer draws row b of its mask from the stream of sample b: which rank computes the row, and with which others,
makes no difference. The price is one draw per row in place of one per batch.
"""

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Generator, Tensor
from torch.overrides import TorchFunctionMode

_MASK = (1 << 63) - 1


def sample_keys(seed: int, step: int, ids: np.ndarray) -> Tensor:
    """One key per sample, shape (B,), int64, from (seed, step, sample)."""
    mixed = _mix(np.asarray(ids, dtype=np.uint64) ^ _mix(np.uint64(step) ^ _mix(np.uint64(seed))))
    return torch.from_numpy((mixed & np.uint64(_MASK)).astype(np.int64))


def _mix(value: Any) -> Any:
    """The finaliser of splitmix64: close inputs give unrelated outputs."""
    with np.errstate(over="ignore"):
        value = np.asarray(value, dtype=np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return value ^ (value >> np.uint64(31))


class SampleRandomness(TorchFunctionMode):
    """Inside it, dropout, attention dropout and stochastic depth draw from the streams of the samples.

    Args:
        keys: Shape (B,), one key per row of the batch.
        layer: Index of the layer that runs.

    Raises:
        RuntimeError: A random function that it does not know, because its result would depend on the topology.
    """

    def __init__(self, keys: Tensor, layer: int) -> None:
        super().__init__()
        self._keys, self._layer = keys, layer
        self._generators: list[Generator] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.dropout:
            return self._dropout(*args, **kwargs)
        if func is F.scaled_dot_product_attention and kwargs.get("dropout_p", 0.0) > 0:
            return self._attention(*args, **kwargs)
        if func is Tensor.bernoulli_:
            return self._fill(*args, **kwargs)
        if func in _UNKNOWN:
            raise RuntimeError(
                f"layer {self._layer} calls {func.__name__}: its numbers would depend on the topology. "
                "Set the model option that uses it to 0 through model.options"
            )
        return func(*args, **kwargs)

    def _dropout(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0:
            return x
        if p == 1:
            return x * 0
        return x * self._fill(torch.empty_like(x, requires_grad=False), 1 - p).div_(1 - p)

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        **_: Any,
    ) -> Tensor:
        assert not is_causal, "encoders attend in both directions"
        scores = query @ key.transpose(-2, -1) * (scale or 1 / math.sqrt(query.shape[-1]))
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, -math.inf)
        elif attn_mask is not None:
            scores = scores + attn_mask
        return self._dropout(scores.softmax(-1), dropout_p) @ value

    def _fill(self, mask: Tensor, p: float) -> Tensor:
        """Sets row b to Bernoulli(p) numbers of sample b."""
        assert mask.shape[0] == len(self._keys), (
            f"{tuple(mask.shape)} does not begin with the batch of {len(self._keys)}"
        )
        for row, generator in zip(mask, self._streams(mask.device), strict=True):
            row.bernoulli_(p, generator=generator)
        return mask

    def _streams(self, device: torch.device) -> list[Generator]:
        if not self._generators:
            layer = int(_mix(self._layer))
            for key in self._keys.tolist():
                generator = Generator(device)
                generator.manual_seed((key ^ layer) & _MASK)
                self._generators.append(generator)
        return self._generators


_UNKNOWN = {
    torch.rand, torch.randn, torch.randint, torch.randperm, torch.rand_like, torch.randn_like, torch.bernoulli,
    torch.multinomial, torch.normal, Tensor.uniform_, Tensor.normal_, Tensor.random_, Tensor.exponential_,
    F.alpha_dropout, F.feature_alpha_dropout, F.dropout1d, F.dropout2d, F.dropout3d,
}  # fmt: skip
