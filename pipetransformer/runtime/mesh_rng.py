"""Random numbers by sample on a mesh: each rank draws the slice of a mask that belongs to its part of the tensor.

Number i of a stream depends on i alone, so a slice has the numbers of the whole mask, and the stream goes on by all of
them. Put together, the masks of a mesh are those of one process bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from pipetransformer.runtime.mesh import MeshAxis, RankMesh
from pipetransformer.runtime.ring_attention import ring_scores, ring_values
from pipetransformer.runtime.rng import PerSampleRng, attention_weights, layer_word, sample_words


class ShardedRng(PerSampleRng):
    """Dropout, attention dropout and stochastic depth on the parts of a mesh; and attention around its ring.

    Args:
        keys: Of this rank's part of the batch, (B,).
        mesh: Knows where in a layer the computation is, and by that how the next mask is split.
        token_sizes: The tokens of each rank of the ring.
    """

    def __init__(self, keys: Tensor, mesh: RankMesh, token_sizes: Sequence[int]) -> None:
        self._mesh, self._token_sizes = mesh, token_sizes
        self._inner_samples = sample_words(mesh.inner_rows(keys))
        super().__init__(mesh.rows(keys))

    def layer(self, index: int) -> None:
        """Starts the streams of the layer that runs next."""
        super().layer(index)
        self._hidden_keys, self._inner_keys = self._keys, self._inner_samples ^ layer_word(index)

    def _fill(self, mask: Tensor, p: float) -> Tensor:
        self._keys = self._inner_keys if self._mesh.place == "inner" else self._hidden_keys
        return super()._fill(mask, p)

    def _next_words(self, shape: torch.Size, device: torch.device) -> Tensor:
        whole, own = self._slice(shape)
        return super()._next_words(torch.Size(whole), device).view(whole)[own].reshape(1, -1)

    def _slice(self, shape: Sequence[int]) -> tuple[list[int], tuple[slice, ...]]:
        """Returns the shape of the whole mask of a sample, and this rank's part of it.

        Args:
            shape: Of this rank's mask of a sample: (heads, queries, keys), (tokens, width), (width,), or ones.
        """
        whole, own, place = list(shape), [slice(None)] * len(shape), self._mesh.place
        if math.prod(shape) == 1 or place == "whole":
            return whole, tuple(own)
        if len(shape) == 3:
            self._split(whole, own, 0, self._mesh.inner)
            self._split_tokens(whole, own, 1)
            return whole, tuple(own)
        if place == "inner":
            self._split(whole, own, len(shape) - 1, self._mesh.inner)
        elif place == "embed" or self._mesh.mesh.splits_hidden:
            self._split(whole, own, len(shape) - 1, self._mesh.hidden)
        if len(shape) == 2 and place != "embed":
            self._split_tokens(whole, own, 0)
        return whole, tuple(own)

    @staticmethod
    def _split(whole: list[int], own: list[slice], dim: int, axis: MeshAxis) -> None:
        size = whole[dim]
        own[dim], whole[dim] = slice(axis.index * size, (axis.index + 1) * size), size * axis.size

    def _split_tokens(self, whole: list[int], own: list[slice], dim: int) -> None:
        first = sum(self._token_sizes[: self._mesh.tokens.index])
        own[dim], whole[dim] = slice(first, first + whole[dim]), sum(self._token_sizes)

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        ring = self._mesh.tokens
        if ring.size == 1 or self._mesh.place == "whole":  # a head that pools by attention has all tokens
            return super()._attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        assert not is_causal, "a decoder's attention does not go around a ring"
        assert not enable_gqa, "a decoder's attention does not go around a ring"
        self._mesh.num_rings += 1
        scores = ring_scores(query, key, ring, self._token_sizes)
        scores = scores * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
        weights = attention_weights(scores, attn_mask, is_causal=False)
        return ring_values(self._dropout(weights, dropout_p), value, ring, self._token_sizes)
