"""Random numbers that belong to a sample: uniform, unrelated between samples and layers, the same in any company."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipetransformer.models import shared_dropout
from pipetransformer.runtime.rng import PerSampleRng, RefuseOtherRandomness, sample_keys

NUM_SAMPLES, NUM_NUMBERS = 256, 2048
KEYS = sample_keys(seed=1, step=3, ids=np.arange(NUM_SAMPLES))


def kept(p: float, layer: int = 2, keys: Tensor = KEYS) -> Tensor:
    """Where dropout keeps ones, (B, N), as 0 and 1."""
    with PerSampleRng(keys, layer):
        return (F.dropout(torch.ones(len(keys), NUM_NUMBERS), p) != 0).double()


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_as_many_are_kept_as_the_rate_says_in_every_sample_and_at_every_place(p: float) -> None:
    mask = kept(p)
    for axis, num in ((None, mask.numel()), (0, NUM_SAMPLES), (1, NUM_NUMBERS)):
        deviation = (mask.mean() if axis is None else mask.mean(axis)) - (1 - p)
        scores = deviation / (p * (1 - p) / num) ** 0.5
        assert scores.abs().max() < 6, "no place or sample stands out"
        assert axis is None or 0.8 < scores.std() < 1.2, "they scatter as independent draws do"


def test_samples_and_layers_and_steps_are_unrelated() -> None:
    other_step = sample_keys(seed=1, step=4, ids=np.arange(NUM_SAMPLES))
    masks = torch.cat([kept(0.5), kept(0.5, layer=3), kept(0.5, keys=other_step)])
    correlation = torch.corrcoef(masks).fill_diagonal_(0) * NUM_NUMBERS**0.5
    assert correlation.abs().max() < 6
    assert correlation.std() == pytest.approx(1, abs=0.05)


def test_a_sample_draws_the_same_in_any_company() -> None:
    order = torch.randperm(NUM_SAMPLES, generator=torch.Generator().manual_seed(0))
    assert torch.equal(kept(0.3, keys=KEYS[order]), kept(0.3)[order])
    assert torch.equal(kept(0.3, keys=KEYS[5:6]), kept(0.3)[5:6])


def test_calls_within_a_layer_differ_and_start_anew_with_it() -> None:
    with PerSampleRng(KEYS, 1) as streams:
        first, second = (F.dropout(torch.ones(NUM_SAMPLES, 64), 0.5) for _ in range(2))
        streams.layer(1)
        again = F.dropout(torch.ones(NUM_SAMPLES, 64), 0.5)
    assert not torch.equal(first, second)
    assert torch.equal(first, again)


def test_what_samples_have_in_common_is_drawn_by_the_step_and_the_layer_alone() -> None:
    def drawn(keys: Tensor, layer: int = 1) -> tuple[Tensor, Tensor]:
        with PerSampleRng(keys, layer):
            common = shared_dropout.draw_once(torch.ones(6, NUM_NUMBERS), 0.5, True)
            return common, F.dropout(torch.ones(len(keys), NUM_NUMBERS), 0.5)

    common, own = drawn(KEYS)
    one_common, one_own = drawn(KEYS[7:8])

    assert torch.equal(common, one_common)
    assert torch.equal(own[7:8], one_own)
    others = [drawn(KEYS, layer=2)[0], drawn(sample_keys(seed=1, step=4, ids=np.arange(3)))[0], own]
    correlation = torch.corrcoef(torch.cat([common, *others])).fill_diagonal_(0) * NUM_NUMBERS**0.5
    assert correlation.abs().max() < 6
    assert torch.equal(shared_dropout.draw_once(common, 0.5, False), common)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("p", [0.3, 1.0])
def test_dropout_in_place_changes_its_input_as_torchs_does(p: float, dtype: torch.dtype) -> None:
    x = torch.ones(NUM_SAMPLES, 8, dtype=dtype)
    with PerSampleRng(KEYS, 1) as streams:
        expected = F.dropout(x, p)
        assert x.eq(1).all()
        streams.layer(1)
        assert F.dropout(x, p, inplace=True) is x
    assert torch.equal(x, expected)


def test_the_expected_value_stays() -> None:
    with PerSampleRng(KEYS):
        x = torch.full((NUM_SAMPLES, 4096), 3.0)
        assert F.dropout(x, 0.1).mean() == pytest.approx(3.0, rel=1e-3)
        assert torch.equal(F.dropout(x, 1.0), torch.zeros_like(x))
        assert F.dropout(x, 0.1, training=False) is x


def test_attention_without_dropout_is_torchs_own() -> None:
    query = torch.randn(4, 2, 3, 8, generator=torch.Generator().manual_seed(0))
    expected = F.scaled_dot_product_attention(query, query, query)
    with PerSampleRng(KEYS[:4]):
        torch.testing.assert_close(F.scaled_dot_product_attention(query, query, query), expected, rtol=0, atol=0)
        dropped = F.scaled_dot_product_attention(query, query, query, dropout_p=0.5)
        almost = F.scaled_dot_product_attention(query, query, query, dropout_p=1e-12)
    assert not torch.allclose(dropped, expected)
    torch.testing.assert_close(almost, expected)


SEEN = torch.ones(4, 1, 3, 3, dtype=torch.bool).tril()
SEEN[1], SEEN[2, :, :, 2] = False, False  # one sample of padding alone, one with a token of padding
ATTENTION = {
    "none": {},
    "causal": {"is_causal": True},
    "mask": {"attn_mask": SEEN},
    "bias": {"attn_mask": torch.randn(4, 4, 3, 3).masked_fill(~SEEN, -torch.inf)},
    "scale": {"is_causal": True, "scale": 0.3},
    "grouped": {"is_causal": True, "enable_gqa": True},
}


@pytest.mark.parametrize("options", ATTENTION.values(), ids=ATTENTION)
def test_attention_with_hardly_any_dropout_is_torchs_for_every_mask(options: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(0)
    num_heads = 4, 2 if "enable_gqa" in options else 4
    query, key = (torch.randn(4, num, 3, 8, generator=generator) for num in num_heads)

    def outputs_and_gradients(dropout_p: float) -> list[Tensor]:
        leaves = query.clone().requires_grad_(), key.clone().requires_grad_(), key.clone().requires_grad_()
        outputs = F.scaled_dot_product_attention(*leaves, dropout_p=dropout_p, **options)
        (outputs * query).sum().backward()
        return [outputs.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    expected = outputs_and_gradients(0.0)
    with PerSampleRng(KEYS[:4]):
        torch.testing.assert_close(outputs_and_gradients(0.0), expected, rtol=0, atol=0)
        torch.testing.assert_close(outputs_and_gradients(1e-12), expected)


@pytest.mark.parametrize("name", ["causal", "grouped"])
def test_dropout_lets_no_query_see_a_key_after_it(name: str) -> None:
    query = torch.zeros(4, 2, 6, 1)
    key = query[:, : 1 if name == "grouped" else 2]
    value = torch.eye(6).expand(*key.shape[:2], 6, 6)  # the output is the weights of the keys
    with PerSampleRng(KEYS[:4]):
        weights = F.scaled_dot_product_attention(query, key, value, dropout_p=0.5, **ATTENTION[name])
    even = torch.ones(6, 6).tril() / torch.arange(1, 7)[:, None]
    assert bool(((weights == 0) | torch.isclose(weights, 2 * even)).all()), "dropped, or scaled up"
    assert weights[0].ne(weights[1]).any()
    assert 0.3 < weights[:, :, even > 0].gt(0).double().mean() < 0.7


def test_outside_it_torch_draws_as_ever() -> None:
    before = (F.dropout, F.scaled_dot_product_attention, Tensor.bernoulli_)
    with pytest.raises(ZeroDivisionError), PerSampleRng(KEYS):
        raise ZeroDivisionError
    assert (F.dropout, F.scaled_dot_product_attention, Tensor.bernoulli_) == before


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x)


@pytest.mark.parametrize("module", [Noise(), nn.Dropout1d(0.5), nn.AlphaDropout(0.5)])
def test_other_randomness_is_refused_by_name(module: nn.Module) -> None:
    x = torch.ones(4, 3, 2)
    with RefuseOtherRandomness(), PerSampleRng(KEYS[:4]), pytest.raises(RuntimeError, match=r"model\.options"):
        module(x)


def test_what_draws_from_the_streams_is_not_refused() -> None:
    with RefuseOtherRandomness(), PerSampleRng(KEYS[:4]):
        nn.Dropout(0.5)(torch.ones(4, 3))
        torch.empty(4, 1, 1).bernoulli_(0.5)
