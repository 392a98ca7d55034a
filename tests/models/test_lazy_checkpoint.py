from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from pipetransformer.models.lazy_checkpoint import Checkpoint, named_tensors, placeholder

TENSORS = {
    "weight": torch.randn(4, 4),
    "old.bias": torch.randn(4),
    "scale": torch.randn(1, 1, 4),
    "ids": torch.arange(3),
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    """Two files."""
    names = list(TENSORS)
    for file, part in (("a", names[:2]), ("b", names[2:])):
        save_file({name: TENSORS[name] for name in part}, tmp_path / f"{file}.safetensors")
    return Checkpoint(sorted(tmp_path.iterdir()))


def test_tags_have_the_shapes_and_hardly_any_bytes() -> None:
    large = placeholder(7, (250_000, 1024))

    assert large.shape == (250_000, 1024)
    assert large.untyped_storage().nbytes() < 5_000_000


def test_tensors_are_read_by_the_names_that_they_go_to(checkpoint: Checkpoint) -> None:
    read = dict(checkpoint.read({"new": "weight", "newer": "ids"}))

    assert torch.equal(read["new"], TENSORS["weight"])
    assert torch.equal(read["newer"], TENSORS["ids"])


def test_a_tag_is_found_where_it_went(checkpoint: Checkpoint) -> None:
    module = nn.Linear(4, 4)
    placeholders = checkpoint.placeholders()
    module.load_state_dict({"weight": placeholders["weight"], "bias": placeholders["old.bias"]}, assign=True)

    assert checkpoint.origins(module.named_parameters()) == {"weight": "weight", "bias": "old.bias"}


@pytest.mark.parametrize(
    "change",
    [lambda t: t * 1, lambda t: t.T, lambda t: t.contiguous(), lambda t: torch.cat([t]), lambda t: t.to("meta")],
)
def test_what_was_computed_from_a_tag_is_none(change: object, checkpoint: Checkpoint) -> None:
    assert checkpoint.origins([("weight", change(checkpoint.placeholders()["weight"]))]) == {}  # type: ignore[operator]


def test_named_tensors_have_the_buffers_that_are_not_saved() -> None:
    module = nn.Linear(1, 1)
    module.register_buffer("positions", torch.arange(2), persistent=False)

    assert list(named_tensors(module)) == ["weight", "bias", "positions"]
