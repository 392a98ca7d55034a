"""Keys and identities are equal for equal things, and only for these."""

import json
from dataclasses import asdict, fields, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.caches import OURS
from torch import Tensor, nn

from pipetransformer.autocache import fingerprint as identity
from pipetransformer.autocache.fingerprint import StoreFingerprint, level_key


def layer(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "weight": torch.randn(4, 3, generator=generator),
        "bias": torch.randn(4, generator=generator).bfloat16(),
        "steps": torch.tensor(7),
        "mask": torch.tensor([True, False]),
        "nothing": torch.empty(0, 3),
    }


def flipped(tensor: Tensor) -> Tensor:
    """Flips the lowest bit of the last byte."""
    changed = tensor.clone()
    changed.reshape(-1).view(torch.uint8)[-1] ^= 1
    return changed


@pytest.mark.parametrize("name", ["weight", "bias", "steps", "mask"])
def test_one_bit_of_any_type_of_tensor_makes_another_key(name: str) -> None:
    other = layer() | {name: flipped(layer()[name])}
    assert level_key(0, [layer()]) == level_key(0, [layer()])
    assert level_key(0, [layer()]) != level_key(0, [other])


def test_names_types_and_shapes_count_beside_the_bytes() -> None:
    zeros = torch.zeros(2, 3)
    alike = [
        {"a": zeros},
        {"b": zeros},
        {"a": zeros.reshape(3, 2)},
        {"a": zeros.reshape(6)},
        {"a": zeros.int()},
        {"a": zeros[:1], "b": zeros[1:]},
        {"a": zeros, "b": torch.empty(0)},
        {},
    ]
    assert len({level_key(0, [each]) for each in alike}) == len(alike)


def test_layers_and_their_order_count_and_so_does_the_level_below() -> None:
    one, two = layer(1), layer(2)
    lists = [[one], [two], [one, two], [two, one], [{f"{name}2": tensor for name, tensor in two.items()} | one]]
    keys = {level_key(below, layers) for below in (0, 1, 1 << 63) for layers in lists}
    assert len(keys) == 3 * len(lists)


@given(st.integers(1, 6), st.data())
@settings(max_examples=20, deadline=None)
def test_a_prefix_has_one_key_however_many_freezes_it_took(num_layers: int, data: st.DataObject) -> None:
    layers = [{"weight": torch.full((2,), float(index))} for index in range(num_layers)]
    cuts = data.draw(st.sets(st.integers(1, num_layers)))
    key, start = 0, 0
    for cut in sorted({*cuts, num_layers}):
        key, start = level_key(key, layers[start:cut]), cut
    assert key == level_key(0, layers)


def test_neither_the_order_of_names_nor_gaps_in_memory_nor_gradients_count() -> None:
    key = level_key(0, [layer()])
    assert key == level_key(0, [dict(reversed(layer().items()))])
    with_gaps = layer() | {"weight": layer()["weight"].t().contiguous().t()}
    assert key == level_key(0, [with_gaps])
    assert key == level_key(0, [layer() | {"weight": nn.Parameter(layer()["weight"])}])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_the_device_of_the_weights_does_not_count() -> None:
    assert level_key(0, [layer()]) == level_key(0, [{name: tensor.cuda() for name, tensor in layer().items()}])


def test_a_key_is_never_that_of_the_input(monkeypatch: pytest.MonkeyPatch) -> None:
    digest = SimpleNamespace(update=lambda content: None, digest=lambda: bytes(8))
    monkeypatch.setattr(identity, "blake2b", lambda *_, **__: digest)
    assert level_key(0, [layer()]) == 1
    with pytest.raises(AssertionError, match="at least one layer"):
        level_key(0, [])


def test_a_key_has_64_bits() -> None:
    keys = [level_key(0, [layer(seed)]) for seed in range(32)]
    assert 1 << 60 < max(keys) < 1 << 64


def test_weights_are_read_where_they_lie() -> None:
    weights = torch.zeros(1000)
    assert np.frombuffer(identity.raw_bytes(weights), np.uint8).ctypes.data == weights.data_ptr()


def changed(value: Any) -> Any:
    return f"{value}0" if isinstance(value, str) else value + 1


@pytest.mark.parametrize("name", [field.name for field in fields(StoreFingerprint)])
def test_every_field_makes_another_identity_and_is_named_with_both_values(name: str) -> None:
    other = replace(OURS, **{name: changed(getattr(OURS, name))})
    assert other.digest() != OURS.digest()
    difference = OURS.explain_difference(other)
    assert difference.startswith(name.replace("_", " "))
    assert (f"{getattr(other, name)}, here {getattr(OURS, name)}") in difference
    assert "), " not in difference, "nothing else is named"


def test_equal_identities_have_one_digest_and_no_difference() -> None:
    assert replace(OURS).digest() == OURS.digest()
    assert OURS.explain_difference(replace(OURS)) == ""
    assert len(OURS.digest()) == 16


def test_of_long_values_the_part_that_differs_is_shown() -> None:
    long, longer = (replace(OURS, model="vit " + "block " * 100 + name + " rest" * 100) for name in ("gelu", "relu"))
    difference = long.explain_difference(longer)
    assert "relu" in difference.split(", here ")[0]
    assert "gelu" in difference.split(", here ")[1]
    assert len(difference) < 150


def test_an_identity_comes_back_from_its_file() -> None:
    assert StoreFingerprint.from_json(OURS.to_json()) == OURS


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "Expecting value"),
        (OURS.to_json()[:40], "Unterminated|Expecting"),
        ("[]", "it is a list"),
        (json.dumps(asdict(OURS) | {"colour": "red"}), "another version: only one of both knows colour"),
        (json.dumps(dict(list(asdict(OURS).items())[1:])), "another version: only one of both knows split_name"),
        (json.dumps(asdict(OURS) | {"hidden_size": "16"}), "hidden_size is '16', not of type int"),
    ],
    ids=["empty", "cut off", "no object", "a field more", "a field less", "another type"],
)
def test_a_damaged_identity_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StoreFingerprint.from_json(text)
