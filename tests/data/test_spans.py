import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipetransformer.data.spans import best_spans


def brute_force(logits: torch.Tensor, allowed: torch.Tensor, max_answer_length: int) -> list[list[float]]:
    """All spans of one window by falling score."""
    num_tokens = len(logits)
    pairs = [(start, end) for start in range(num_tokens) for end in range(start, num_tokens)]
    spans = [
        [start, end, (logits[start, 0] + logits[end, 1]).item()]
        for start, end in pairs
        if allowed[start] and allowed[end] and end - start < max_answer_length and (start > 0 or end == 0)
    ]
    return sorted(spans, key=lambda span: -span[2])


@given(
    st.integers(0, 2**31), st.integers(1, 3), st.integers(1, 9), st.integers(1, 12), st.integers(2, 60), st.booleans()
)
def test_the_best_spans_are_those_of_an_exhaustive_search(
    seed: int, batch: int, num_tokens: int, max_answer_length: int, k: int, masked: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(batch, num_tokens, 2, generator=generator, dtype=torch.float64)
    allowed = torch.rand(batch, num_tokens, generator=generator) < (0.5 if masked else 1.0)
    found = best_spans(logits, allowed, max_answer_length, k)
    assert found.shape == (batch, k, 3)
    for row in range(batch):
        expected = brute_force(logits[row], allowed[row], max_answer_length)[:k]
        assert found[row, : len(expected)].tolist() == expected
        assert (found[row, len(expected) :, 2] == -torch.inf).all()


def test_positions_survive_half_precision() -> None:
    logits = torch.zeros(1, 400, 2, dtype=torch.bfloat16)
    logits[0, 301, 0] = logits[0, 303, 1] = 5
    found = best_spans(logits, torch.ones(1, 400, dtype=torch.bool), 30, 2)
    assert found.dtype == torch.float32
    assert found[0, 0].tolist() == pytest.approx([301, 303, 10])
