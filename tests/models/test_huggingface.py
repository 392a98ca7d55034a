import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM, BertPreTrainedModel

from pipetransformer.errors import UserError
from pipetransformer.models.base import Head
from pipetransformer.models.huggingface import HuggingFaceModel
from pipetransformer.models.stack import LayerStack

Folder = Callable[..., Path]


def saved(folder: Path, source: Path, num_outputs: int = 3) -> LayerStack:
    spec = HuggingFaceModel(name=str(source), pretrained=False)
    stack = spec.build(Head("sequence", num_outputs), (), seed=0)
    spec.save(stack, {name: t for layer in stack.layers for name, t in layer.original_state().items()}, folder)
    return stack


def test_importing_the_spec_imports_no_torch() -> None:
    code = "import sys, pipetransformer.models.huggingface; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(("model_type", "max_length"), [("bert", 12), ("distilbert", 12), ("roberta", 10)])
def test_the_format_has_the_tokenizer_and_the_positions_that_fit(
    model_type: str, max_length: int, encoder_folder: Folder
) -> None:
    spec = HuggingFaceModel(name=str(encoder_folder(model_type)), pretrained=False)
    wanted = spec.input_format()
    ids = wanted["tokenizer"](" ".join(["bird"] * 40), truncation=True, max_length=wanted["max_length"])["input_ids"]
    stack = spec.build(Head("sequence", 3), (), seed=0)

    assert (wanted["max_length"], len(ids)) == (max_length, max_length)
    assert stack(torch.tensor([ids])).shape == (1, 3)
    with pytest.raises((IndexError, RuntimeError)):
        stack[0](torch.full((1, max_length + 1), ids[0]))


def test_a_saved_folder_has_its_tokenizer(encoder_folder: Folder, tmp_path: Path) -> None:
    source = encoder_folder("bert")
    saved(tmp_path, source)
    ids = [
        HuggingFaceModel(name=str(f)).input_format()["tokenizer"]("we see a fish").input_ids for f in (source, tmp_path)
    ]

    assert ids[0] == ids[1]


def test_a_pretrained_folder_keeps_its_encoder_and_gets_a_new_head_for_other_labels(
    encoder_folder: Folder, tmp_path: Path
) -> None:
    stack = saved(tmp_path, encoder_folder("bert"))
    again = HuggingFaceModel(name=str(tmp_path)).build(Head("sequence", 2), (), seed=9)

    assert all(torch.equal(t, again[1].module.state_dict()[n]) for n, t in stack[1].module.state_dict().items())
    assert again[-1].module.classifier.weight.shape == (2, 16)


@pytest.mark.parametrize("published", [AutoModel, AutoModelForMaskedLM])
def test_an_encoder_published_without_our_head_keeps_its_weights(
    published: type[AutoModel], encoder_folder: Folder
) -> None:
    folder = encoder_folder("bert")
    original = published.from_config(AutoConfig.from_pretrained(folder))
    original.save_pretrained(folder)

    stack = HuggingFaceModel(name=str(folder)).build(Head("sequence", 3), (), seed=0)

    encoder = original.base_model.state_dict()
    kept = {name: t for layer in stack.layers for name, t in layer.original_state().items() if "pooler" not in name}
    assert all(torch.equal(t, encoder[n.removeprefix("bert.")]) for n, t in kept.items() if n.startswith("bert."))


def test_options_change_the_configuration(encoder_folder: Folder) -> None:
    options = {"num_hidden_layers": 1, "hidden_dropout_prob": 0.25}
    spec = HuggingFaceModel(name=str(encoder_folder("bert")), pretrained=False, options=options)
    stack = spec.build(Head("sequence", 3), (), seed=0)

    assert stack.num_blocks == 1
    assert stack[1].module.output.dropout.p == 0.25


def test_fewer_blocks_than_published_are_the_lowest_ones(encoder_folder: Folder, tmp_path: Path) -> None:
    stack = saved(tmp_path, encoder_folder("bert"))
    again = HuggingFaceModel(name=str(tmp_path), options={"num_hidden_layers": 2}).build(
        Head("sequence", 1), (), seed=9
    )

    assert again.num_blocks == 2
    assert torch.equal(again[2].module.output.dense.weight, stack[2].module.output.dense.weight)


@pytest.mark.parametrize("options", [{"num_hidden_layers": 5}, {"intermediate_size": 40}])
def test_published_weights_that_do_not_fill_the_encoder_are_refused(
    options: dict[str, int], encoder_folder: Folder, tmp_path: Path
) -> None:
    saved(tmp_path, encoder_folder("bert"))

    with pytest.raises(ValueError, match=r"lack \d+ tensors of the encoder.*model\.pretrained=false"):
        HuggingFaceModel(name=str(tmp_path), options=options).build(Head("sequence", 3), (), seed=0)


def test_weights_that_the_library_does_not_initialize_are_refused(
    encoder_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BertPreTrainedModel, "_init_weights", lambda *_: None)
    stack = HuggingFaceModel(name=str(encoder_folder("bert")), pretrained=False).build_meta(Head("sequence", 3), (), 0)
    with pytest.raises(UserError, match=r"no rule to initialize bert.encoder.layer.0.*; use pretrained weights"):
        stack.load(1)
    monkeypatch.undo()
    stack.load(1)
    assert stack[1].has_storage


def test_an_unknown_option_is_refused(encoder_folder: Folder) -> None:
    spec = HuggingFaceModel(name=str(encoder_folder("bert")), pretrained=False, options={"hiden_dropout_prob": 0.1})

    with pytest.raises(ValueError, match=r"model\.options has hiden_dropout_prob"):
        spec.build(Head("sequence", 3), (), seed=0)


def test_an_option_of_the_wrong_type_is_refused(encoder_folder: Folder) -> None:
    spec = HuggingFaceModel(name=str(encoder_folder("bert")), pretrained=False, options={"hidden_size": "wide"})

    with pytest.raises(ValueError, match=r"model\.options=.*hidden_size"):
        spec.build(Head("sequence", 3), (), seed=0)


@pytest.mark.parametrize("labels", [("bad", "so so", "good"), ()])
def test_a_saved_model_has_the_labels_of_its_task_not_of_the_model_that_it_began_with(
    labels: tuple[str, ...], encoder_folder: Folder, tmp_path: Path
) -> None:
    old = {"id2label": {0: "a", 1: "b", 2: "c"}, "label2id": {"a": 0, "b": 1, "c": 2}}
    source = encoder_folder("bert", **old, problem_type="multi_label_classification")
    spec = HuggingFaceModel(name=str(source), pretrained=False)
    stack = spec.build(Head("sequence", 3, labels, "single_label_classification"), (), seed=0)
    spec.save(stack, {n: t for layer in stack.layers for n, t in layer.original_state().items()}, tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)

    names = labels or ("LABEL_0", "LABEL_1", "LABEL_2")
    assert config.id2label == dict(enumerate(names))
    assert config.label2id == {name: index for index, name in enumerate(names)}
    assert config.problem_type == "single_label_classification"


@pytest.mark.parametrize(
    "head",
    [Head("sequence", 1, problem_type="regression"), Head("span", 2), Head("token", 4)],
    ids=lambda head: head.kind,
)
def test_a_classifier_tuned_on_another_task_can_be_loaded(head: Head, encoder_folder: Folder, tmp_path: Path) -> None:
    spec = HuggingFaceModel(
        name=str(encoder_folder("bert", problem_type="single_label_classification")), pretrained=False
    )
    stack = spec.build(head, (), seed=0)
    spec.save(stack, {n: t for layer in stack.layers for n, t in layer.original_state().items()}, tmp_path)

    config = AutoConfig.from_pretrained(tmp_path)
    assert (config.num_labels, config.problem_type) == (head.num_outputs, head.problem_type)


@pytest.mark.parametrize("published", [AutoModel, AutoModelForMaskedLM])
def test_weights_that_the_encoder_has_no_place_for_are_refused(
    published: type[AutoModel], encoder_folder: Folder
) -> None:
    """As those of a BERT with relative positions, which transformers no longer computes."""
    folder = encoder_folder("bert")
    published.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    state = load_file(folder / "model.safetensors")
    prefix = "" if published is AutoModel else "bert."
    relative = {
        f"{prefix}encoder.layer.{i}.attention.self.distance_embedding.weight": torch.zeros(3, 8) for i in (0, 2)
    }
    save_file({**state, **relative}, folder / "model.safetensors", {"format": "pt"})

    with pytest.raises(ValueError, match=r"2 tensors that a BertForSequenceClassification .* no place for, the first "):
        HuggingFaceModel(name=str(folder)).build(Head("sequence", 3), (), seed=0)
    with pytest.raises(ValueError, match=r"1 tensors that a BertForSequenceClassification"):
        HuggingFaceModel(name=str(folder), options={"num_hidden_layers": 2}).build(Head("sequence", 3), (), seed=0)


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({"num_labels": 3}, "it follows from the data"),
        ({"problem_type": "regression"}, "it follows from the data"),
        ({"id2label": {0: "a"}}, "it follows from the data"),
        ({"dtype": "bfloat16"}, "use precision="),
        ({"torch_dtype": "bfloat16"}, "use precision="),
        ({"trust_remote_code": True}, "use model.trust_remote_code"),
    ],
)
def test_what_follows_from_elsewhere_is_not_an_option(options: dict[str, object], remedy: str) -> None:
    with pytest.raises(ValueError, match=f"model.options.{next(iter(options))} is not an option: {remedy}"):
        HuggingFaceModel(name="bert-base-uncased", options=options).check()


def test_images_are_refused(encoder_folder: Folder) -> None:
    with pytest.raises(ValueError, match=r"reads text, the dataset has images \(3, 8, 8\)"):
        HuggingFaceModel(name=str(encoder_folder("bert"))).build(Head("sequence", 3), (3, 8, 8), seed=0)


@pytest.mark.parametrize("model_type", ["t5", "bart"])
def test_an_encoder_decoder_is_refused_with_what_is_supported(model_type: str, encoder_folder: Folder) -> None:
    spec = HuggingFaceModel(name=str(encoder_folder(model_type)), pretrained=False)

    with pytest.raises(ValueError, match=rf"\({model_type}\) .* has an encoder and a decoder; supported"):
        spec.build(Head("sequence", 3), (), seed=0)


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize("name", ["bert-base-uncased", "/no/such/folder"])
def test_a_model_out_of_reach_is_reported_with_the_way_out(name: str) -> None:
    spec = HuggingFaceModel(name=name)

    with pytest.raises(ValueError, match=r"no model under .*model\.name=<folder>"):
        spec.build(Head("sequence", 2), (), seed=0)
    with pytest.raises(ValueError, match=r"no tokenizer under .*model\.name=<folder>"):
        spec.input_format()


def test_a_folder_without_config_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no model under .*config\.json"):
        HuggingFaceModel(name=str(tmp_path)).build(Head("sequence", 2), (), seed=0)


def test_a_folder_without_weights_is_reported(encoder_folder: Folder) -> None:
    with pytest.raises(ValueError, match=r"could not load .*model\.pretrained=false"):
        HuggingFaceModel(name=str(encoder_folder("bert"))).build(Head("sequence", 2), (), seed=0)


def test_weights_that_cannot_be_read_are_reported(encoder_folder: Folder) -> None:
    folder = encoder_folder("bert")
    (folder / "model.safetensors").write_bytes(b"half a download")

    with pytest.raises(ValueError, match=r"could not load .*header"):
        HuggingFaceModel(name=str(folder)).build(Head("sequence", 2), (), seed=0)


def test_a_folder_without_tokenizer_is_reported(encoder_folder: Folder) -> None:
    folder = encoder_folder("bert")
    for file in folder.glob("tokenizer*"):
        file.unlink()

    with pytest.raises(ValueError, match=r"no tokenizer under .*no words"):
        HuggingFaceModel(name=str(folder)).input_format()


def test_what_blocks_have_in_common_is_not_untied(encoder_folder: Folder) -> None:
    spec = HuggingFaceModel(name=str(encoder_folder("deberta-v2")), pretrained=False, untie=True)

    with pytest.raises(ValueError, match=r"model\.untie=true: the blocks .* have deberta\.encoder\.rel_embeddings"):
        spec.build(Head("sequence", 2), (), seed=0)


def test_a_part_that_blocks_have_in_common_freezes_with_the_lowest(encoder_folder: Folder) -> None:
    spec = HuggingFaceModel(name=str(encoder_folder("deberta-v2")), pretrained=False)
    stack = spec.build(Head("sequence", 2), (), seed=0)
    common = "deberta.encoder.rel_embeddings.weight"

    def trains(first_active: int) -> list[bool]:
        layers = range(1, stack.num_blocks + 1)
        named = {index: stack[index].by_name()[common] for index in layers}
        return [any(p is named[index] for p in stack.trainable(index, first_active)) for index in layers]

    assert trains(0) == trains(1) == [True, True, True]
    assert trains(2) == [False, False, False]


def test_the_blocks_of_albert_are_one_that_freezes_as_a_whole(encoder_folder: Folder) -> None:
    spec = HuggingFaceModel(name=str(encoder_folder("albert")), pretrained=False)

    assert spec.build(Head("sequence", 2), (), seed=0).num_blocks == 1
