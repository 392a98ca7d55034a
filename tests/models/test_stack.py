from collections import OrderedDict

import pytest
import torch
from torch import Tensor, nn

from pipetransformer.errors import UserError
from pipetransformer.models.layer import deep_copy, shallow_copy
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


def test_a_deep_copy_has_tensors_and_hooks_of_its_own() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    module[0].register_forward_hook(lambda _, __, out: out + 1)
    twin, called = deep_copy(module), list[str]()
    module[1].register_forward_hook(lambda *_: called.append("the original"))
    module.eval(), twin.eval()
    x = torch.randn(2, 4)
    assert torch.equal(module(x), twin(x)), "the hook that was there is no hook of the copy"
    assert called == ["the original"], "a hook of the original is called by the copy"
    twin[1].register_forward_pre_hook(lambda *_: called.append("the copy"))
    module(x)
    assert called == ["the original"] * 2, "a hook of the copy is called by the original"
    tables = [id(table) for each in twin.modules() for table in vars(each).values() if isinstance(table, OrderedDict)]
    assert len({*tables}) == len(tables), "two modules of the copy share a table of hooks"
    assert {*map(id, module.parameters())}.isdisjoint(map(id, twin.parameters()))
    assert all(map(torch.equal, module.state_dict().values(), twin.state_dict().values()))


def test_a_deep_copy_keeps_what_is_one_in_one_and_takes_what_stands_for_a_part() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    module[1].weight = module[0].weight
    bias = nn.Parameter(torch.full((4,), 7.0))
    twin = deep_copy(module, {id(module[0].bias): bias})
    assert twin[0].weight is twin[1].weight is not module[0].weight
    assert twin[0].bias is bias


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
