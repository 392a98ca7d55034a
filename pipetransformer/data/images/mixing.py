"""Mixup and cutmix: each picture of a global batch is mixed with another one, and so are their targets.

The partner of a picture is that at the same place of the reversed global batch, as in ``timm.data.Mixup``, and how much
of it is taken follows from (seed, step). So every replica knows both for its rows, whatever the topology::

    global batch    a b c d e f        partners    f e d c b a
    replica 0       a b c              reads       f e d  beside its own
    replica 1       d e f              reads       c b a

The draws are timm's, in its order: with its generator in the same state, ``timm.data.Mixup`` on the global batch gives
the same pictures and targets. In addition a batch may have an odd number of pictures: the middle one stays as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

MODES = ("batch", "pair", "elem")
MIXING = 2  # part of the key of a draw, which the transforms of a picture do not have


@dataclass(frozen=True)
class Mix:
    """Draws of some rows of a global batch.

    Attributes:
        partners: Sample id of each row's partner, (B,).
        shares: Fraction of each row's own target, (B,), in the precision of timm's; the partner has the rest.
        boxes: Part of the picture that is the partner's as [top, bottom, left, right], (B, 4); where it is empty, the
            pictures are blended by their shares.
    """

    partners: np.ndarray
    shares: np.ndarray
    boxes: np.ndarray

    def take(self, rows: np.ndarray) -> Mix:
        """Returns the draws of these rows (M,)."""
        return Mix(self.partners[rows], self.shares[rows], self.boxes[rows])

    def inputs(self, own: Tensor, partners: Tensor) -> Tensor:
        """Mixes pictures (B, C, H, W) with those of their partners."""
        mixed = own.clone()
        for row, (share, (top, bottom, left, right)) in enumerate(zip(self.shares, self.boxes, strict=True)):
            if top < bottom and left < right:
                mixed[row, :, top:bottom, left:right] = partners[row, :, top:bottom, left:right]
            elif share != 1:
                mixed[row] = own[row] * share + partners[row] * (1 - share)
        return mixed

    def targets(self, own: Tensor, partners: Tensor, num_outputs: int) -> Tensor:
        """Mixes classes (B,), or vectors (B, C) of multi-label targets, to vectors (B, C) of float64."""
        import torch

        shares = torch.from_numpy(self.shares).double()[:, None]
        return shares * _as_vectors(own, num_outputs) + (1 - shares) * _as_vectors(partners, num_outputs)


@dataclass(frozen=True)
class Mixing:
    """Mixes the pictures of a global batch.

    Attributes:
        mixup: Both parameters of the Beta distribution that shares of blended pictures are drawn from; 0: no mixup.
        cutmix: The same for the area of a box that is cut out of the partner; 0: no cutmix.
        prob: Probability that a batch, pair or picture is mixed.
        switch_prob: Probability of cutmix where both are on.
        mode: One of :data:`MODES`: one draw for the batch, for each two partners, or for each picture.
        image_shape: (C, H, W) of a picture.
        num_outputs: Classes.
    """

    mixup: float
    cutmix: float
    prob: float
    switch_prob: float
    mode: str
    image_shape: tuple[int, ...]
    num_outputs: int

    def draw(self, seed: int, step: int, global_ids: np.ndarray) -> Mix:
        """Draws for all rows of a global batch (B,), the same on every rank."""
        from pipetransformer.data.images.library_rng import kept_generators, seed_generators

        size = len(global_ids)
        with kept_generators():
            seed_generators(seed, step, MIXING)
            shares, boxes = self._draw_batch() if self.mode == "batch" else self._draw_each(self._num_draws(size))
        if self.mode == "batch":
            shares, boxes = np.repeat(shares, size), np.repeat(boxes, size, axis=0)
        elif self.mode == "pair":  # the pictures of a pair have one draw
            shares = np.concatenate([shares, np.ones(size % 2, shares.dtype), shares[::-1]])
            boxes = np.concatenate([boxes, np.zeros((size % 2, 4), dtype=np.int64), boxes[::-1]])
        return Mix(global_ids[::-1], shares, boxes)

    def _num_draws(self, size: int) -> int:
        return size // 2 if self.mode == "pair" else size

    def _draw_batch(self) -> tuple[np.ndarray, np.ndarray]:
        """Draws once, shares (1,) and boxes (1, 4)."""
        share, cuts = 1.0, False
        if np.random.rand() < self.prob:  # noqa: NPY002 - timm's generator, seeded above; so below
            cuts = self._always_cuts or (self._may_cut and bool(np.random.rand() < self.switch_prob))  # noqa: NPY002
            alpha = self.cutmix if cuts else self.mixup
            share = float(np.random.beta(alpha, alpha))  # noqa: NPY002
        box, share = self._box(share) if cuts and share != 1 else (np.zeros(4, dtype=np.int64), share)
        return np.array([share]), box[None]

    def _draw_each(self, num_draws: int) -> tuple[np.ndarray, np.ndarray]:
        """Draws shares (num_draws,) and boxes (num_draws, 4)."""
        cuts = np.full(num_draws, self._always_cuts)
        if self.mixup and self.cutmix:
            cuts = np.random.rand(num_draws) < self.switch_prob  # noqa: NPY002
            of_cuts, of_blends = (np.random.beta(alpha, alpha, num_draws) for alpha in (self.cutmix, self.mixup))  # noqa: NPY002
            drawn = np.where(cuts, of_cuts, of_blends)
        else:
            alpha = self.mixup or self.cutmix
            drawn = np.random.beta(alpha, alpha, num_draws)  # noqa: NPY002
        is_mixed = np.random.rand(num_draws) < self.prob  # noqa: NPY002
        shares = np.where(is_mixed, drawn.astype(np.float32), np.float32(1))  # (num_draws,), float32
        boxes = np.zeros((num_draws, 4), dtype=np.int64)
        for row in np.flatnonzero(cuts & (shares != 1)):
            boxes[row], shares[row] = self._box(shares[row])
        return shares, boxes

    @property
    def _may_cut(self) -> bool:
        return self.cutmix > 0

    @property
    def _always_cuts(self) -> bool:
        return self._may_cut and self.mixup == 0

    def _box(self, share: float | np.float32) -> tuple[np.ndarray, float]:
        """Draws a box whose area is about ``1 - share``, and returns the share that it leaves."""
        from timm.data.mixup import cutmix_bbox_and_lam

        box, left = cutmix_bbox_and_lam(self.image_shape, share)
        return np.array(box), float(left)


def _as_vectors(targets: Tensor, num_outputs: int) -> Tensor:
    """Returns classes (B,) as (B, C) of zeros and a one, and vectors (B, C) as they are; float64."""
    from torch.nn.functional import one_hot

    return (targets if targets.ndim == 2 else one_hot(targets.long(), num_outputs)).double()
