import pytest
import torch
from torch import Tensor, nn

from pipetransformer.errors import UserError
from pipetransformer.models.layer import shallow_copy
from pipetransformer.models.stack import Layer, LayerStack, WithoutFilling, seeded


def scale(module: nn.Module, x: Tensor, factor: float = 1.0, **_: object) -> Tensor:
    return module(x) * factor


def stack_of(num_layers: int) -> LayerStack:
    layers = [Layer(nn.Linear(4, 4), scale, f"part.{index}.") for index in range(num_layers)]
    return LayerStack(layers, lambda x: x.shape)


def test_every_layer_gets_the_context_and_ignores_what_it_does_not_know() -> None:
    stack, x = stack_of(3), torch.randn(2, 4)
    expected = x
    for index in range(3):
        expected = stack[index].module(expected) * 2

    assert torch.equal(stack(x, factor=2.0, mask=None), expected)


def test_blocks_are_what_stands_between_embedding_and_head() -> None:
    assert (stack_of(5).num_blocks, len(stack_of(5))) == (3, 5)


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="0 blocks"):
        stack_of(2)


def test_a_layer_without_weights_and_source_says_what_to_set() -> None:
    stack = stack_of(3).to("meta")
    with pytest.raises(UserError, match=r"layer 1 of 3 has no initial weights.*set stack\.source to a function"):
        stack.load(1)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"part.1.weight": (4, 4)}, r"the initial part\.1\.bias are missing; a stack's source yields"),
        ({"part.1.weight": (4, 4), "bias": (4,)}, r"bias is no tensor of this layer"),
        ({"part.1.weight": (4, 4), "part.1.bias": (1,)}, r"part\.1\.bias has shape \(1,\), and the layer's \(4,\)"),
    ],
    ids=["too few", "another name", "another shape, which torch would repeat"],
)
def test_a_source_that_yields_other_tensors_is_refused_by_name(values: dict[str, tuple[int, ...]], words: str) -> None:
    stack = stack_of(3).to("meta")
    stack.source = lambda _: iter({name: torch.zeros(shape) for name, shape in values.items()}.items())
    with pytest.raises(UserError, match=words):
        stack.load(1)


def test_tensors_and_state_have_original_names_and_only_the_state_leaves_out_what_is_not_saved() -> None:
    module = nn.Linear(2, 2)
    module.register_buffer("positions", torch.arange(2), persistent=False)
    layer = Layer(module, scale, "encoder.3.")

    assert [name for name, _ in layer.tensors()] == ["encoder.3.weight", "encoder.3.bias", "encoder.3.positions"]
    assert list(layer.original_state()) == ["encoder.3.weight", "encoder.3.bias"]


def test_a_shallow_copy_shares_parameters_and_can_lose_parts_alone() -> None:
    original = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    original.register_parameter("bias", nn.Parameter(torch.zeros(1)))
    twin = shallow_copy(original)
    del twin[1], twin.bias

    assert twin[0].weight is original[0].weight
    assert len(original) == 2
    assert original.bias is not None


def test_seeded_draws_repeat_and_leave_the_outer_draws_alone() -> None:
    torch.manual_seed(7)
    expected = torch.rand(2)
    torch.manual_seed(7)
    with seeded(1):
        first = torch.rand(2)
    outside = torch.rand(2)
    with seeded(1):
        second = torch.rand(2)

    assert torch.equal(first, second)
    assert torch.equal(outside, expected)


def test_tensors_with_storage_are_filled_as_ever_beside_those_without() -> None:
    with seeded(0), WithoutFilling():
        empty = nn.Linear(3, 3, device="meta")
        nn.init.trunc_normal_(empty.weight)
        drawn = nn.Linear(3, 3)
        nn.init.trunc_normal_(drawn.bias)
    with seeded(0):
        expected = nn.Linear(3, 3)
        nn.init.trunc_normal_(expected.bias)
    assert empty.weight.is_meta
    assert torch.equal(drawn.weight, expected.weight)
    assert torch.equal(drawn.bias, expected.bias)
