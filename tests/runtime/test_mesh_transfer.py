"""Tensors of a layer as one message between the ranks of a mesh."""

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipetransformer.runtime.mesh_transfer import pack, unpack

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool)
FORMS = st.lists(st.tuples(st.lists(st.integers(0, 3), max_size=3), st.sampled_from(DTYPES)), max_size=6)


@given(FORMS)
def test_packed_tensors_come_back_bit_for_bit(forms: list[tuple[list[int], torch.dtype]]) -> None:
    """An odd number of bytes before a wide type, scalars, tensors without numbers and an empty layer among them."""
    generator = torch.Generator().manual_seed(0)
    drawn = [(torch.randn(shape, generator=generator) * 3).to(dtype) for shape, dtype in forms]
    tensors = {str(index): tensor for index, tensor in enumerate(drawn)}
    found = unpack(pickle.loads(pickle.dumps(pack(tensors))))
    assert list(found) == list(tensors)
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert torch.equal(found[name], tensor)


@pytest.mark.parametrize("of", [lambda x: x.t(), lambda x: x[:, 1:], lambda x: x.requires_grad_()])
def test_a_view_is_packed_in_its_own_order(of: object) -> None:
    tensor = of(torch.arange(6.0).view(2, 3))  # type: ignore[operator]
    found = unpack(pack({"x": tensor}))["x"]
    assert torch.equal(found, tensor)
    assert not found.requires_grad


def test_unpacked_tensors_share_no_memory() -> None:
    packed = pack({"a": torch.zeros(2), "b": torch.zeros(2)})
    first, again = unpack(packed), unpack(packed)
    first["a"].fill_(1)
    assert not again["a"].any()
    assert first["a"].untyped_storage().nbytes() == 8
