"""Data sets of a script: pairs and dictionaries, tokens of any length, and what is refused."""

from collections.abc import Iterator, Sequence
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import IterableDataset

from pipetransformer.data.map_style import MapStyleSplit, Metrics
from pipetransformer.errors import StaleStore, UserError


def loss(output: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(output, target, reduction="none")


def split(rows: Sequence[Any]) -> MapStyleSplit:
    return MapStyleSplit("train", rows, loss)


TEXTS = [
    {"input_ids": [1, 2, 3], "attention_mask": [1, 1, 1], "labels": 0},
    {"input_ids": [4, 5, 0], "attention_mask": [1, 1, 0], "labels": 1},
]
IMAGES = [(torch.full((3, 2, 2), float(i)), i % 2) for i in range(3)]


def test_tokens_are_padded_and_masked_and_padding_that_they_bring_is_cut() -> None:
    texts = split(TEXTS)
    assert texts.lengths is not None
    assert texts.lengths.tolist() == [3, 2]
    assert texts.inputs([1, 0], 4).tolist() == [[4, 5, 0, 0], [1, 2, 3, 0]]
    mask = texts.context([1, 0], 4)["attention_mask"]
    assert mask.dtype == torch.bool
    assert mask.tolist() == [[True, True, False, False], [True, True, True, False]]
    assert texts.targets([1, 0]).tolist() == [1, 0]


@pytest.mark.parametrize(
    "rows",
    [
        [{"input_ids": [1, 2, 3], "labels": [0, 1, 1]}, {"input_ids": [4, 5], "labels": [0, 1]}],
        [(torch.tensor([1, 2, 3]), torch.tensor([0, 1, 1])), (torch.tensor([4, 5]), torch.tensor([0, 1]))],
        [row | {"labels": [0, 1, 1]} for row in TEXTS],
    ],
    ids=["dictionaries", "pairs", "padded"],
)
def test_targets_of_tokens_are_refused_where_texts_differ_in_length(rows: list[Any]) -> None:
    message = "each sample of train has a target for each token, and sample 0 has 3 tokens and sample 1 2; bring"
    with pytest.raises(UserError, match=message):
        split(rows)


def test_targets_of_padding_are_refused_where_all_texts_have_one_length_without_it() -> None:
    row = {"input_ids": [1, 2, 0], "attention_mask": [1, 1, 0], "labels": [0, 1, -100]}
    with pytest.raises(UserError, match="sample 0 has 3 targets and 2 tokens before its padding; bring all to one"):
        split([row, row])


def test_targets_of_tokens_are_read_where_all_texts_have_one_length() -> None:
    blocks = split([{"input_ids": [1, 2, 3], "labels": [0, 1, n]} for n in range(2)])
    assert blocks.targets([1, 0], 3).tolist() == [[0, 1, 1], [0, 1, 0]]


def test_targets_of_several_shapes_are_refused() -> None:
    images = split([(torch.zeros(3, 2, 2), [1] * (2 + n)) for n in range(2)])
    with pytest.raises(UserError, match=r"samples 0 and 1 of train have shapes \(2,\) and \(3,\); bring all"):
        images.targets([1])


@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 3)])
def test_a_loss_gets_targets_in_the_shape_of_the_data_set_in_training_and_in_evaluation(shape: tuple[int, ...]) -> None:
    seen = []

    def squared(output: Tensor, target: Tensor) -> Tensor:
        seen.append(tuple(target.shape))
        return (output - target).square().reshape(len(output), -1).mean(1)

    images = MapStyleSplit(
        "train", [(image, torch.full(shape, float(i))) for i, (image, _) in enumerate(IMAGES)], squared
    )
    packed = (
        images.targets([2, 0]).reshape(2, -1).double().squeeze(1)
    )  # as a step hands them on, see Batch.loss_targets
    assert images.loss(torch.zeros(2, *shape), packed).tolist() == [4, 0]
    assert images.predict(torch.zeros(2, *shape), [2, 0], None)[:, 0].tolist() == [4, 0]
    assert seen == [(2, *shape), (2, *shape)]


@pytest.mark.parametrize(("outputs", "targets"), [((), ()), ((1,), (1,)), ((3,), ()), ((2, 3), (3,)), ((2, 3), (2, 3))])
def test_metrics_get_predictions_in_the_shape_of_the_outputs(
    outputs: tuple[int, ...], targets: tuple[int, ...]
) -> None:
    def metrics(predictions: np.ndarray, truth: np.ndarray) -> dict[str, float]:
        shapes = predictions.shape, truth.shape
        return {"as given": float(shapes == ((3, *outputs), (3, *targets))), "last": float(predictions[-1].sum())}

    rows = [(image, torch.zeros(targets)) for image, _ in IMAGES]
    dev = MapStyleSplit("dev", rows, lambda output, _: output.reshape(len(output), -1).sum(1), metrics)
    values = torch.arange(3.0).reshape(3, *[1] * len(outputs)).expand(3, *outputs)
    scored = dev.score(dev.predict(values, [0, 1, 2], None).numpy())
    assert scored["as given"] == 1
    assert scored["last"] == 2 * np.prod(outputs)


def test_images_are_stacked() -> None:
    images = split(IMAGES)
    assert images.input_shape == (3, 2, 2)
    assert images.lengths is None
    assert torch.equal(images.inputs([2, 0], None), torch.stack([IMAGES[2][0], IMAGES[0][0]]))


def test_scores_are_accuracy_and_loss_over_all_samples() -> None:
    outputs = torch.tensor([[2.0, 0.0], [0.0, 3.0], [0.0, 1.0]])
    images = split(IMAGES)
    predicted = images.predict(outputs, [0, 1, 2], None).numpy()
    expected = cross_entropy(outputs.double(), torch.tensor([0, 1, 0])).item()
    assert images.score(predicted) == pytest.approx({"accuracy": 2 / 3, "loss": expected}, abs=1e-6)


def test_a_single_output_is_no_class() -> None:
    def metrics(predictions: np.ndarray, targets: np.ndarray) -> dict[str, float]:
        return {"mean": float(predictions.mean()), "whole": float(targets.dtype == np.int64)}

    def own(output: Tensor, target: Tensor) -> Tensor:
        return (output.squeeze(1) - target).square()

    single = torch.tensor([[2.0], [0.5], [1.0]])
    for chosen, expected in ((None, {"loss"}), (metrics, {"loss", "mean", "whole"})):
        ratings = MapStyleSplit("dev", IMAGES, own, chosen)
        scored = ratings.score(ratings.predict(single, [0, 1, 2], None).numpy())
        assert scored.keys() == expected
    assert (scored["mean"], scored["whole"]) == (pytest.approx(3.5 / 3), 1)


def same(predictions: np.ndarray, targets: np.ndarray) -> dict[str, float]:
    return {"same": float((predictions == targets).sum())}


def named(predictions: np.ndarray, targets: np.ndarray) -> dict[str, float]:
    names = np.array(["cat", "dog"])  # looked up by classes
    return {"same": float((names[predictions] == names[targets]).sum())}


@pytest.mark.parametrize("metrics", [same, named])
def test_own_metrics_get_predictions_and_targets_in_order(metrics: Metrics) -> None:
    images = MapStyleSplit("dev", IMAGES, loss, metrics)
    outputs = torch.eye(2)[[0, 1, 0]]
    assert images.score(images.predict(outputs, [0, 1, 2], None).numpy())["same"] == 3


@pytest.mark.parametrize("metrics", [None, same])
@pytest.mark.parametrize("width", [1, 2])
def test_an_evaluation_reads_each_sample_once(width: int, metrics: Metrics | None) -> None:
    read: list[int] = []

    class Counted(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            read.append(index)
            return super().__getitem__(index)

    images = MapStyleSplit("dev", Counted(IMAGES), lambda output, target: output[:, 0] - target, metrics)
    read.clear()
    predicted = [images.predict(torch.zeros(len(ids), width), ids, None).numpy() for ids in ([1, 2], [0])]
    images.score(np.concatenate(predicted)[[2, 0, 1]])
    assert read == [1, 2, 0]


def test_the_identity_is_that_of_the_inputs() -> None:
    same = [(image.clone(), 1 - label) for image, label in IMAGES]
    other = [*IMAGES[:2], (IMAGES[2][0] + 1e-6, 0)]
    assert split(IMAGES).identity() == split(same).identity(), "targets have no part in it"
    assert split(IMAGES).identity() != split(other).identity()
    unmasked = [TEXTS[0], TEXTS[1] | {"attention_mask": [1, 1, 1]}]
    assert split(TEXTS).identity() != split(unmasked).identity()


def test_a_transform_that_draws_is_noticed() -> None:
    class Drawn(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            return torch.rand(3, 2, 2), 0

    assert split(Drawn([0, 1])).draws_at_random
    assert not split(IMAGES).draws_at_random
    assert not split([(torch.tensor([[1.0, torch.nan]]), 0)]).draws_at_random, "what is missing is missing each time"

    class Seldom(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            return torch.rand(1) * (index == 40), 0

    assert split(Seldom(range(64))).draws_at_random, "also where few samples show it"


def test_data_that_draw_at_random_have_one_identity() -> None:
    class Drawn(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            return torch.rand(3, 2, 2), 0

    assert split(Drawn([0, 1])).quick_identity() == split(Drawn([0, 1])).quick_identity()
    assert split(Drawn([0, 1])).quick_identity() != split(Drawn([0, 1, 2])).quick_identity()


class Noisy(list[Any]):
    """Values with noise from global generators."""

    def __getitem__(self, index: Any) -> Any:
        return torch.full((3, 2, 2), super().__getitem__(index)) + torch.rand(1) * np.random.rand(), 0  # noqa: NPY002


def test_data_that_draw_at_random_are_told_from_others_of_their_shape_and_nobodys_draws_change() -> None:
    before = torch.get_rng_state()
    data = split(Noisy([1.0, 2.0]))
    assert data.draws_at_random
    torch.set_rng_state(before)
    assert data.identity() == split(Noisy([1.0, 2.0])).identity()
    assert data.identity() != split(Noisy([1.0, 3.0])).identity()
    torch.set_rng_state(before)
    data.identity()
    assert torch.equal(torch.get_rng_state(), before)


def test_data_that_draw_by_generators_of_their_own_have_no_identity() -> None:
    generator = np.random.default_rng(0)

    class Drawn(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            return torch.from_numpy(generator.random((3, 2, 2))), 0

    with pytest.raises(StaleStore, match="train are drawn by generators of their own"):
        split(Drawn([0, 1])).identity()


def test_targets_that_are_cut_to_whole_numbers_are_refused() -> None:
    with pytest.raises(UserError, match=r"target of sample 0 of train is a whole number \(torch.int64\), and others"):
        split([(torch.zeros(2, 2), 0), (torch.zeros(2, 2), 0.5)]).targets([0, 1])


def test_inputs_of_16_bits_have_an_identity_and_a_score() -> None:
    rows = [(torch.full((2, 2), float(i), dtype=torch.bfloat16), torch.tensor(i, dtype=torch.bfloat16)) for i in (0, 1)]
    data = MapStyleSplit("dev", rows, lambda output, target: (output.squeeze(1) - target).square())
    assert data.identity() != split([rows[1], rows[0]]).identity()
    assert data.score(data.predict(torch.zeros(2, 1), [0, 1], None).numpy()) == {"loss": 0.5}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "the data set train is empty"),
        ([3], "sample 0 is a int"),
        ([{"input_ids": [1], "pixel_values": [2], "labels": 0}], "give exactly one of input_ids"),
        ([{"input_ids": [1]}], "give exactly one of labels"),
        ([(Image.new("RGB", (2, 2)), 0)], "sample 0 has an input of type Image and a target of type int .*ToTensor"),
        ([(torch.zeros(2, 2), "cat")], "sample 0 has an input of type Tensor and a target of type str"),
        ([{"image": torch.zeros(2, 2), "label": None}], "and a target of type NoneType .*; give tensors, arrays or"),
        ([{"input_ids": [1, 2], "token_type_ids": [0], "labels": 0}], r"token_type_ids of sample 0 has shape \(1,\)"),
        ([{"input_ids": [], "labels": 0}], "sample 0 has no token in its input; leave it out of the data set"),
        ([TEXTS[0], {"input_ids": [], "attention_mask": [], "labels": 0}], "sample 1 has no token in its input"),
        ([{"input_ids": [1, 2], "text": "it is", "labels": 0}], "text of sample 0 is a str; leave it out"),
        (
            [TEXTS[0], TEXTS[1] | {"position_ids": [0, 1, 2]}],
            "of the samples 0 and 1 of train one has position_ids and",
        ),
        (
            [TEXTS[0] | {"position_ids": [0, 1, 0]}],
            "position_ids of sample 0 begin anew at token 2, and its attention_",
        ),
    ],
)
def test_what_is_no_sample_is_refused(rows: list[Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        split(rows)


@pytest.mark.parametrize(
    "row", [{}, {"attention_mask": [0, 1, 1], "position_ids": [1, 0, 1]}, {"position_ids": [0, 0, 1]}]
)
def test_positions_that_the_mask_does_not_contradict_are_kept(row: dict[str, list[int]]) -> None:
    given = {"input_ids": [1, 2, 3], "position_ids": [2, 3, 4], "labels": 0} | row
    assert split([given]).context([0], 3)["position_ids"].tolist() == [given["position_ids"]]


def test_images_of_other_shapes_are_refused_by_number() -> None:
    images = split([*IMAGES, (torch.zeros(3, 4, 4), 0)])
    with pytest.raises(UserError, match=r"sample 3 of train has shape \(3, 4, 4\) and sample 0 \(3, 2, 2\)"):
        images.inputs([0, 3], None)


def test_an_error_of_the_loss_tells_the_shapes_that_it_was_given() -> None:
    """It comes from below torch, which names neither output nor target."""
    own = split([(torch.zeros(2), number) for number in (0, 1)])
    with pytest.raises((ValueError, RuntimeError)) as raised:
        own.loss(torch.zeros(2, 3, 5), torch.tensor([0.0, 1.0]))
    (note,) = raised.value.__notes__
    assert "given an output (2, 3, 5) and targets (2,) of torch.int64" in note


def test_a_loss_that_is_a_mean_is_refused() -> None:
    images = MapStyleSplit("train", IMAGES, torch.nn.CrossEntropyLoss())
    with pytest.raises(UserError, match=r"the loss has shape \(\) for 3 samples"):
        images.loss(torch.zeros(3, 2), torch.zeros(3))


COLUMNS = {
    "text": ["it is", "a", "of it"],
    "idx": [0, 1, 2],
    "input_ids": [[1, 2, 3], [4, 0, 0], [5, 6, 0]],
    "token_type_ids": [[0, 0, 1], [0, 0, 0], [0, 1, 0]],
    "attention_mask": [[1, 1, 1], [1, 0, 0], [1, 1, 0]],
    "labels": [0, 1, 1],
}


@pytest.mark.parametrize("kind", [None, "torch", "numpy"])
@pytest.mark.parametrize("some", [False, True], ids=["all columns", "columns of the format"])
def test_a_dataset_is_read_whatever_its_format(kind: str | None, some: bool) -> None:
    rows = datasets.Dataset.from_dict(COLUMNS)
    rows.set_format(kind, columns=["input_ids", "token_type_ids", "attention_mask", "labels"] if some else None)
    texts = split(rows)
    assert texts.lengths is not None
    assert texts.lengths.tolist() == [3, 1, 2]
    assert texts.inputs([2, 1], 4).tolist() == [[5, 6, 0, 0], [4, 0, 0, 0]]
    context = texts.context([2, 1], 4)
    assert {*context} == {"attention_mask", "token_type_ids"}, "as transformers' trainer, other columns are left out"
    assert context["token_type_ids"].tolist() == [[0, 1, 0, 0], [0, 0, 0, 0]]
    assert texts.targets([2, 0]).tolist() == [1, 0]
    plain = [{name: COLUMNS[name][row] for name in (*context, "input_ids", "labels")} for row in range(3)]
    assert texts.identity() == split(plain).identity()


def test_a_dataset_with_a_transform_is_read_through_it() -> None:
    def transform(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
        return {"image": [torch.full((3, 2, 2), float(n)) for n in rows["n"]], "label": rows["label"]}

    rows = datasets.Dataset.from_dict({"n": [1, 2], "image": [0, 0], "label": [0, 1]}).with_transform(transform)
    images = split(rows)
    assert images.input_shape == (3, 2, 2)
    assert images.inputs([1], None).unique().tolist() == [2.0]
    assert not images.draws_at_random


def test_batches_are_read_at_once_where_the_data_set_can() -> None:
    class Batched(list[Any]):
        read: list[list[int]] = []  # noqa: RUF012 - one data set

        def __getitems__(self, ids: list[int]) -> list[Any]:
            self.read.append(ids)
            return [self[i] for i in ids]

    images = split(Batched(IMAGES))
    images.inputs([2, 0], None)
    images.targets([2, 0])
    assert Batched.read == [[0], [2, 0]]


class Stream(IterableDataset[Any]):
    """As long as its source, and read in its order alone."""

    def __len__(self) -> int:
        return len(IMAGES)

    def __iter__(self) -> Iterator[Any]:
        return iter(IMAGES)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (Stream(), "the data set train is a Stream without a length or without indices; give a map-style one"),
        (datasets.DatasetDict({"train": datasets.Dataset.from_dict(COLUMNS)}), "holds several: train; give one"),
        (datasets.Dataset.from_dict(COLUMNS).to_iterable_dataset(), "IterableDataset without a length"),
        (datasets.Dataset.from_dict({"text": ["a"], "label": [0]}), "sample 0 has the keys text, label; give exactly"),
        (datasets.Dataset.from_dict(COLUMNS | {"label": [0, 1, 1]}), "exactly one of labels, label, target"),
    ],
    ids=["stream", "several", "iterable", "not tokenised", "two labels"],
)
def test_other_datasets_are_refused(rows: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        split(rows)
