"""Encodings of features as rows of bytes."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from pipetransformer.errors import FeatureOverflow

CASTS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Codec(ABC):
    """Encodes features as rows of bytes and back, a row per token, on the device of the features.

    A finite feature comes back finite or is refused; a NaN or infinity comes back as one that is not finite. Rows of
    zero bytes decode to features of zero.

    Attributes:
        hidden_size: Width of a feature, D.
        dtype: Type of the features, before encoding and after decoding.
        row_bytes: Bytes of a token.
        is_plain: The rows are the features' own bytes, so that there is nothing to decode.
    """

    is_plain = False

    def __init__(self, hidden_size: int, dtype: torch.dtype, row_bytes: int) -> None:
        self.hidden_size, self.dtype, self.row_bytes = hidden_size, dtype, row_bytes

    @abstractmethod
    def encode(self, features: Tensor) -> Tensor:
        """Encodes features (R, D) of ``dtype`` as uint8 (R, row_bytes).

        Raises:
            OverflowError: A finite feature is too large for the codec.
        """

    @abstractmethod
    def decode_into(self, rows: Tensor, out: Tensor) -> None:
        """Decodes rows uint8 (R, row_bytes) into features (R, D) of ``dtype``."""

    def decode(self, rows: Tensor) -> Tensor:
        """Decodes rows uint8 (R, row_bytes) as features (R, D) of ``dtype``."""
        out = torch.empty(len(rows), self.hidden_size, dtype=self.dtype, device=rows.device)
        self.decode_into(rows, out)
        return out


class Cast(Codec):
    """Features in another floating-point type, rounded to nearest; bit for bit in their own."""

    def __init__(self, hidden_size: int, dtype: torch.dtype, stored: torch.dtype) -> None:
        super().__init__(hidden_size, dtype, hidden_size * stored.itemsize)
        self.is_plain, self._stored = stored == dtype, stored

    def encode(self, features: Tensor) -> Tensor:
        assert features.dtype == self.dtype, f"features are {features.dtype}, the store is of {self.dtype}"
        stored = features.contiguous().to(self._stored)
        limit = torch.finfo(self._stored).max
        if limit < torch.finfo(self.dtype).max and not torch.equal(stored.isfinite(), features.isfinite()):
            _refuse(features, limit, str(self._stored).removeprefix("torch."))
        return stored.view(torch.uint8)

    def decode_into(self, rows: Tensor, out: Tensor) -> None:
        out.copy_(rows.contiguous().view(self._stored))


class Int8(Codec):
    """Features as whole multiples, -127 to 127, of a scale per token: max|x| / 127, and 2 ** -126 at least.

    The error of a feature is at most scale / 2, besides the rounding of float32 (2 ** -16 of the scale) and of
    ``dtype``. The unused multiple -128 stands for features that are not finite: they come back as NaN and do not
    change their token's scale. A row is the scale as float32, then D multiples.
    """

    SMALLEST, NOT_FINITE = 2.0**-126, -128  # smaller scales lack the digits for the bound

    def __init__(self, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__(hidden_size, dtype, 4 + hidden_size)
        self._wide = torch.promote_types(dtype, torch.float32)

    def encode(self, features: Tensor) -> Tensor:
        assert features.dtype == self.dtype, f"features are {features.dtype}, the store is of {self.dtype}"
        wide = features.to(self._wide)
        finite = wide.isfinite()
        largest = torch.where(finite, wide, 0).abs().amax(1, keepdim=True)
        scales = (largest / 127).clamp(min=self.SMALLEST).float()
        if not (scales * 127).isfinite().all():
            _refuse(features, torch.finfo(torch.float32).max, "int8")
        multiples = torch.where(finite, wide / scales, self.NOT_FINITE).round().to(torch.int8)
        return torch.cat([scales.view(torch.uint8), multiples.view(torch.uint8)], dim=1)

    def decode_into(self, rows: Tensor, out: Tensor) -> None:
        scales = rows[:, :4].contiguous().view(torch.float32)
        multiples = rows[:, 4:].view(torch.int8)
        wide = out if self.dtype == self._wide else torch.empty_like(out, dtype=self._wide)
        wide.copy_(multiples).mul_(scales)
        if len(rows) and multiples.amin() == self.NOT_FINITE:  # checking is cheaper than filling
            wide.masked_fill_(multiples == self.NOT_FINITE, torch.nan)
        if wide is not out:
            out.copy_(wide)


def codec(name: str, hidden_size: int, dtype: torch.dtype) -> Codec:
    """Returns the codec of a name, for features (R, hidden_size) of a floating-point type.

    Args:
        name: A key of :data:`CASTS`, ``int8``, or ``exact``, which stores the features' own bits.
        hidden_size: Width of a feature, D.
        dtype: Type of the features.
    """
    if name == "int8":
        return Int8(hidden_size, dtype)
    return Cast(hidden_size, dtype, dtype if name == "exact" else CASTS[name])


def _refuse(features: Tensor, limit: float, name: str) -> None:
    largest = torch.where(features.isfinite(), features, 0).abs().max().item()
    raise FeatureOverflow(
        f"a feature of size {largest:.6g} does not fit `storage`={name}, whose largest is {limit:.6g}: "
        "set `storage`=exact" + (" or bfloat16" if name == "float16" else "")
    )
