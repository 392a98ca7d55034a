"""Features come back as they went in, or within the bound that the codec states."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipetransformer.autocache.codec import codec
from pipetransformer.config.sections import STORAGE

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
LOSSY = ["bfloat16", "float16", "int8"]


@pytest.mark.parametrize("dtype", DTYPES)
@given(seed=st.integers(0, 2**32 - 1), num_rows=st.integers(1, 5), hidden_size=st.integers(1, 7))
def test_exact_keeps_every_bit_pattern(dtype: torch.dtype, seed: int, num_rows: int, hidden_size: int) -> None:
    size = (num_rows, hidden_size * dtype.itemsize)
    bits = torch.from_numpy(np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8))
    exact = codec("exact", hidden_size, dtype)
    rows = exact.encode(bits.view(dtype))
    assert rows.shape == (num_rows, exact.row_bytes)
    assert torch.equal(rows, bits)
    assert torch.equal(exact.decode(rows).view(torch.uint8), bits)


@pytest.mark.parametrize("dtype", DTYPES)
def test_exact_keeps_payloads_of_nan_infinities_and_signed_zeros(dtype: torch.dtype) -> None:
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    special = torch.tensor([[torch.inf, -torch.inf, -0.0, torch.nan]], dtype=dtype)
    special.view(integer)[0, 3] += 5  # a payload
    exact = codec("exact", 4, dtype)
    assert torch.equal(exact.decode(exact.encode(special)).view(integer), special.view(integer))


@pytest.mark.parametrize("name", STORAGE)
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_comes_back_not_finite_and_spoils_nothing(name: str, dtype: torch.dtype) -> None:
    features = torch.tensor([[1.0, torch.inf, -0.5], [-torch.inf, torch.nan, 0.25], [1.0, 2.0, 3.0]], dtype=dtype)
    this = codec(name, 3, dtype)
    back = this.decode(this.encode(features))
    assert back.dtype == dtype
    assert torch.equal(back.isfinite(), features.isfinite())
    assert torch.allclose(back[back.isfinite()], features[features.isfinite()], atol=0.02)


@pytest.mark.parametrize("name", STORAGE)
@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_bytes_are_zero_features_and_back(name: str, dtype: torch.dtype) -> None:
    this = codec(name, 3, dtype)
    assert torch.equal(this.decode(torch.zeros(2, this.row_bytes, dtype=torch.uint8)), torch.zeros(2, 3, dtype=dtype))
    assert torch.equal(this.decode(this.encode(torch.zeros(2, 3, dtype=dtype))), torch.zeros(2, 3, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@settings(deadline=None)
@given(seed=st.integers(0, 2**32 - 1), exponent=st.integers(-150, 120), spread=st.integers(0, 20))
def test_int8_errs_by_half_a_scale_at_most(dtype: torch.dtype, seed: int, exponent: int, spread: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(4, 6, generator=generator, dtype=torch.float64)
    features = (features * 2.0 ** (exponent - spread * torch.rand(4, 6, generator=generator))).to(dtype)
    features = features.where(features.isfinite(), 1)
    this = codec("int8", 6, dtype)
    back = this.decode(this.encode(features))
    scales = (features.double().abs().amax(1, keepdim=True) / 127).clamp(min=2.0**-126)
    rounding = back.double().abs() * torch.finfo(dtype).eps + torch.finfo(dtype).smallest_normal
    rounding = rounding * (dtype in (torch.float16, torch.bfloat16))
    error = (back.double() - features.double()).abs()
    assert bool((error <= scales * (0.5 + 2.0**-16) + rounding).all())


@pytest.mark.parametrize("name", LOSSY)
def test_a_finite_feature_that_does_not_fit_is_refused(name: str) -> None:
    features = torch.tensor([[1.0, 3.5e38, torch.inf]], dtype=torch.float64)
    limit = {"bfloat16": r"3\.38953e\+38", "float16": "65504", "int8": r"3\.40282e\+38"}[name]
    with pytest.raises(OverflowError, match=rf"3\.5e\+38 does not fit.*{name}.*{limit}: set storage=exact"):
        codec(name, 3, torch.float64).encode(features)


def test_the_largest_that_float16_holds_is_kept() -> None:
    half = codec("float16", 2, torch.float32)
    largest = torch.tensor([[65504.0, -65504.0]])
    assert torch.equal(half.decode(half.encode(largest)), largest)


@pytest.mark.parametrize(("name", "expected"), [("exact", 40), ("float32", 20), ("float16", 10), ("int8", 9)])
def test_bytes_of_a_token(name: str, expected: int) -> None:
    this = codec(name, 5, torch.float64)
    assert this.row_bytes == expected
    assert this.encode(torch.ones(2, 5, dtype=torch.float64)).shape == (2, expected)
