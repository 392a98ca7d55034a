"""Parameters that layers share: each layer has its own, and the stack knows which are one."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from support.masked import MASKED_LM, MaskedLanguageModel
from torch import Tensor, nn
from transformers import BertForMaskedLM

from pipetransformer.models.stack import Layer, LayerStack, ParamRef

WORDS, DECODER = "bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"


def run(module: nn.Module, x: Tensor, **_: object) -> Tensor:
    return module(x)


def tied_modules() -> list[nn.Module]:
    """Word embeddings, a block, and an output layer whose matrix is the word embeddings."""
    embedding, output = nn.Embedding(5, 4), nn.Linear(4, 5)
    output.weight = embedding.weight
    return [embedding, nn.Linear(4, 4), output]


def stack_of(modules: list[nn.Module]) -> LayerStack:
    return LayerStack([Layer(module, run, f"{i}.") for i, module in enumerate(modules)], lambda x: torch.Size(x.shape))


def test_a_shared_parameter_becomes_one_of_each_layer_and_the_original_stays_as_it_is() -> None:
    embedding, block, output = tied_modules()
    stack = stack_of([embedding, block, output])
    first, second = (stack[place.layer].by_name()[place.name] for place in stack.ties[0])

    assert stack.ties == ((ParamRef(0, "0.weight"), ParamRef(2, "2.weight")),)
    assert output.weight is embedding.weight
    assert first is embedding.weight
    assert second is not first
    assert second.data_ptr() != first.data_ptr()
    assert torch.equal(first, second)


def test_a_model_that_shares_nothing_has_no_ties() -> None:
    assert stack_of([nn.Linear(2, 2) for _ in range(3)]).ties == ()


def test_it_belongs_to_the_lowest_layer_and_freezes_with_it() -> None:
    stack = stack_of(tied_modules())
    head = stack[2].by_name()

    assert [list(map(id, stack.trainable(2, first))) for first in (0, 2)] == [
        [id(head["2.weight"]), id(head["2.bias"])],
        [id(head["2.bias"])],
    ]
    assert stack.trainable(1, 2) == []
    assert [p.shape for p in stack.own_parameters(2)] == [(5,)]
    assert stack.num_parameters == 5 * 4 + (4 * 4 + 4) + 5


def test_a_module_that_is_in_several_layers_is_taken_apart_with_its_parameters() -> None:
    shared = nn.Linear(4, 4)
    stack = stack_of([nn.Sequential(shared, nn.Linear(4, 4)) for _ in range(3)])
    copies = [[stack[place.layer].by_name()[place.name] for place in tie] for tie in stack.ties]

    assert [[place.name for place in tie] for tie in stack.ties] == [
        [f"{layer}.0.{kind}" for layer in range(3)] for kind in ("weight", "bias")
    ]
    assert len({id(copy) for places in copies for copy in places}) == 6
    assert all(torch.equal(copy, places[0]) for places in copies for copy in places)


def test_a_layer_that_shares_all_it_has_is_refused() -> None:
    shared = nn.Linear(4, 4)

    with pytest.raises(ValueError, match="layer 1 of 3 shares all its 2 parameters"):
        stack_of([shared, shared, nn.Linear(4, 4)])


def test_a_layer_without_storage_gets_a_shared_weight_from_the_layer_that_it_belongs_to() -> None:
    stack = stack_of(tied_modules())
    expected = copy.deepcopy(stack)
    stack.to("meta")
    given = stack.names()
    stack.source = lambda index: ((name, dict(expected[index].tensors())[name]) for name in given[index])
    stack.load(2)

    assert given[2] == ["2.bias"]
    assert torch.equal(stack[2].by_name()["2.weight"], expected[0].by_name()["0.weight"])
    assert not stack[0].has_storage
    assert stack.loaded_copy(2, "cpu").has_storage


def test_what_a_layer_has_under_two_names_stays_one_parameter_on_the_way_to_and_from_the_meta_device() -> None:
    head = nn.Linear(4, 5)
    head.register_parameter("offset", head.bias)
    stack = stack_of([nn.Embedding(5, 4), nn.Linear(4, 4), head])
    stack.to("meta")
    stack[2].to_empty(device="cpu")

    assert stack.ties == ()
    assert stack[2].module.offset is stack[2].module.bias
    assert stack[2].original_state().keys() == {"2.weight", "2.bias", "2.offset"}


def masked_stack(folder: Path, pretrained: bool = False) -> tuple[MaskedLanguageModel, LayerStack]:
    spec = MaskedLanguageModel(name=str(folder), pretrained=pretrained)
    return spec, spec.build(MASKED_LM.head, (), seed=0)


def test_a_familys_tie_is_found_and_both_layers_start_alike_loaded_alone(encoder_folder: Callable[..., Path]) -> None:
    spec, whole = masked_stack(encoder_folder("bert"))
    meta = spec.build_meta(MASKED_LM.head, (), seed=0)
    head = len(meta) - 1
    meta.load(head)

    assert meta.ties == whole.ties == ((ParamRef(0, WORDS), ParamRef(head, DECODER)),)
    assert torch.equal(meta[head].by_name()[DECODER], whole[0].by_name()[WORDS])
    assert whole[0].by_name()[WORDS].std() > 0
    assert not meta[0].has_storage


def test_a_shared_weight_is_saved_once_and_the_original_library_ties_it_again(
    encoder_folder: Callable[..., Path], tmp_path: Path
) -> None:
    spec, stack = masked_stack(encoder_folder("bert"))
    spec.save(stack, {name: t for layer in stack.layers for name, t in layer.original_state().items()}, tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        keys = set(file.keys())
    original = BertForMaskedLM.from_pretrained(tmp_path).eval()
    ids = torch.randint(5, 15, (2, 6))

    assert len({WORDS, DECODER} & keys) == 1
    assert original.get_parameter(DECODER) is original.get_parameter(WORDS)
    found, expected = stack.double().eval()(ids), original.double()(ids).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_published_weights_with_a_tie_are_read_into_both_layers(
    encoder_folder: Callable[..., Path], tmp_path: Path
) -> None:
    spec, stack = masked_stack(encoder_folder("bert"))
    spec.save(stack, {name: t for layer in stack.layers for name, t in layer.original_state().items()}, tmp_path)

    with pytest.warns(UserWarning, match="reads all weights"):  # transformers makes the head's bias anew
        _, again = masked_stack(tmp_path, pretrained=True)

    assert again.ties == stack.ties
    for one, other in zip(stack.layers, again.layers, strict=True):
        assert all(torch.equal(tensor, other.original_state()[name]) for name, tensor in one.original_state().items())
