import numpy as np
import pytest
import torch
from sklearn import metrics
from torch import Tensor, nn

from pipetransformer.data.tasks import (
    Task,
    compute_metrics,
    cross_entropy,
    image_classification,
    multi_label_classification,
    question_answering,
    regression,
    span_cross_entropy,
    squared_error,
    text_classification,
)

TRUTH = np.array([1, 1, 0, 0, 1])
GUESS = np.array([1, 0, 0, 1, 1])  # 2 true and 1 false positives, 1 true and 1 false negative


def test_classification_metrics_by_hand() -> None:
    found = compute_metrics(("accuracy", "f1", "matthews"), GUESS, TRUTH)
    expected = {"accuracy": 3 / 5, "f1": 2 / 3, "matthews": (2 * 1 - 1 * 1) / np.sqrt(3 * 3 * 2 * 2)}
    assert found == pytest.approx(expected, abs=1e-6)
    assert [*found] == ["accuracy", "f1", "matthews"]


@pytest.mark.parametrize("ones", [721, 20, 10, 1])
@pytest.mark.parametrize("total", [20, 1043])
@pytest.mark.parametrize("predicted", [0, 1])
def test_one_class_for_everything_has_no_correlation_with_the_truth(ones: int, total: int, predicted: int) -> None:
    truth = (np.arange(total) < ones).astype(np.int64)
    found = compute_metrics(("matthews",), np.full(total, predicted), truth)
    assert found == {"matthews": 0.0}


def test_correlations_by_hand() -> None:
    values, truth = np.array([1.0, 2.0, 3.0, 10.0]), np.array([2.0, 4.0, 8.0, 6.0], dtype=np.float32)
    found = compute_metrics(("pearson", "spearman"), values, truth)
    assert found == pytest.approx({"pearson": np.corrcoef(values, truth)[0, 1], "spearman": 0.8}, abs=1e-6)


@pytest.mark.parametrize("constant", [0, 1])
def test_what_is_constant_correlates_with_nothing(constant: int) -> None:
    pair = [np.array([1.0, 2.0, 3.0]), np.array([1.0, 4.0, 2.0])]
    pair[constant] = np.full(3, 2.5)
    assert compute_metrics(("pearson", "spearman"), *pair) == {"pearson": 0.0, "spearman": 0.0}


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_values_that_are_not_finite_have_no_score(broken: float) -> None:
    found = compute_metrics(
        ("pearson", "spearman", "mse", "mae"), np.array([1.0, broken, 2.0]), np.array([1.0, 2.0, 3.0])
    )
    assert len(found) == 4
    assert all(np.isnan(value) for value in found.values())


def test_every_sample_must_be_predicted() -> None:
    with pytest.raises(AssertionError):
        compute_metrics(("accuracy",), GUESS[:-1], TRUTH)


NUM_SAMPLES, NUM_TOKENS = 4, 7


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def test_classification_is_torchs_cross_entropy() -> None:
    output, targets = drawn(NUM_SAMPLES, 3), torch.tensor([0, 2, 1, 2])
    losses = cross_entropy(output, targets.double())  # targets travel as float64
    assert losses.shape == (NUM_SAMPLES,)
    torch.testing.assert_close(losses.mean(), nn.CrossEntropyLoss()(output, targets))


def test_regression_is_torchs_squared_error() -> None:
    output, targets = drawn(NUM_SAMPLES, 1), torch.tensor([0.0, 2.5, 5.0, 1.0])
    losses = squared_error(output, targets)
    assert losses.shape == (NUM_SAMPLES,)
    torch.testing.assert_close(losses.mean(), nn.MSELoss()(output[:, 0], targets.double()))


def answers(num_tokens: list[int]) -> Tensor:
    return torch.tensor([[0, 1, num_tokens[0]], [2, 2, num_tokens[1]], [1, 3, num_tokens[2]], [0, 0, num_tokens[3]]])


def test_question_answering_is_the_mean_over_start_and_end() -> None:
    output, targets = drawn(NUM_SAMPLES, NUM_TOKENS, 2), answers([NUM_TOKENS] * NUM_SAMPLES)
    expected = [nn.functional.cross_entropy(output[:, :, i], targets[:, i], reduction="none") for i in (0, 1)]
    torch.testing.assert_close(span_cross_entropy(output, targets), (expected[0] + expected[1]) / 2)


def test_what_stands_in_padding_does_not_count() -> None:
    output, targets = drawn(NUM_SAMPLES, NUM_TOKENS, 2), answers([4, 5, 6, 7])
    other = output.clone()
    other[0, 4:] = 100.0
    loss = span_cross_entropy
    torch.testing.assert_close(loss(output, targets), loss(other, targets), rtol=0, atol=0)
    torch.testing.assert_close(loss(output, targets)[0], loss(output[:1, :4], targets[:1])[0])


@pytest.mark.parametrize(
    ("task", "shape"),
    [
        (text_classification(3), (2, 3)),
        (image_classification(4), (2, 4)),
        (multi_label_classification(3), (2, 3)),
        (regression(), (2, 1)),
        (question_answering(), (2, 5, 2)),
    ],
)
def test_the_head_of_a_task_returns_the_shape_that_its_loss_reads(task: Task, shape: tuple[int, ...]) -> None:
    assert task.output_shape((2, 5, 16)) == shape
    assert shape[-1] == task.head.num_outputs


AWKWARD = [
    [0, 2, 1, 2],
    [1, 1, 1, 1],  # the others never occur
    [2],
]


@pytest.mark.parametrize("classes", AWKWARD)
@pytest.mark.parametrize("weights", [(), (0.5, 2.0, 1.25)])
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_weighted_and_smoothed_losses_of_a_global_batch_are_torchs(
    classes: list[int], weights: tuple[float, ...], smoothing: float
) -> None:
    output, targets = drawn(len(classes), 3), torch.tensor(classes)
    task = text_classification(3, class_weights=weights, label_smoothing=smoothing)
    divisor = sum(weights[each] for each in classes) if weights else len(classes)
    weight = torch.tensor(weights, dtype=torch.float64) if weights else None
    expected = nn.functional.cross_entropy(output, targets, weight=weight, label_smoothing=smoothing)
    found = task.loss(output, targets.double()).sum() / divisor
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "targets", [[[1, 0, 1], [0, 0, 0], [1, 1, 1], [0, 1, 0]], [[0, 0, 0]], [[1, 0, 0]] * 3], ids=["any", "none", "same"]
)
def test_the_multi_label_loss_is_that_of_transformers(targets: list[list[int]]) -> None:
    from transformers import BertConfig
    from transformers.loss.loss_utils import ForSequenceClassificationLoss

    output, wanted = drawn(len(targets), 3), torch.tensor(targets)
    config = BertConfig(problem_type="multi_label_classification", num_labels=3)
    expected = ForSequenceClassificationLoss(wanted.double(), output, config)
    losses = multi_label_classification(3).loss(output, wanted.double())
    assert losses.shape == (len(targets),)
    torch.testing.assert_close(losses.mean(), expected, rtol=0, atol=1e-12)


def test_a_class_is_predicted_where_its_probability_is_above_one_half() -> None:
    predicted = multi_label_classification(3).predict(torch.tensor([[0.1, -0.1, 0.0], [5.0, 5.0, 5.0]]))
    assert predicted.tolist() == [[1, 0, 0], [1, 1, 1]]


SETS = np.array([[1, 0, 1], [0, 0, 0], [1, 1, 0], [1, 0, 0]])


@pytest.mark.parametrize("guess", [SETS, 1 - SETS, np.zeros_like(SETS), np.ones_like(SETS), SETS[::-1]], ids=range(5))
@pytest.mark.parametrize("rows", [slice(None), slice(1, 2), slice(0, 1)], ids=["all", "empty set", "one sample"])
def test_multi_label_metrics_are_scikit_learns(guess: np.ndarray, rows: slice) -> None:
    truth, guess = SETS[rows], guess[rows]
    found = multi_label_classification(3).score(guess, truth)
    true_positives, wrong = (truth & guess).sum(), (truth != guess).sum()
    micro = 2 * true_positives / (2 * true_positives + wrong) if true_positives else 0.0
    by_class = [metrics.f1_score(truth[:, i], guess[:, i], zero_division=0.0) for i in range(3)]
    expected = {
        "micro_f1": micro,
        "macro_f1": np.mean(by_class),
        "subset_accuracy": (truth == guess).all(1).mean(),
    }
    assert found == pytest.approx(expected)
    assert next(iter(found)) == "micro_f1"


def test_the_scores_of_one_class_that_a_sample_has_or_not_are_those_of_that_class() -> None:
    truth, guess = np.array([[1], [0], [1], [0], [0]]), np.array([[1], [1], [0], [0], [0]])
    found = multi_label_classification(1).score(guess, truth)
    assert found == pytest.approx({"micro_f1": 0.5, "macro_f1": 0.5, "subset_accuracy": 0.6})


@pytest.mark.parametrize("guess", [[0, 1, 2, 2], [1, 1, 1, 1], [2, 0, 1, 0]], ids=["right", "one class", "wrong"])
def test_metrics_of_classes_are_scikit_learns_where_one_never_occurs(guess: list[int]) -> None:
    truth = np.array([0, 1, 2, 2])  # of 4 classes
    found = text_classification(4, metrics=("accuracy", "macro_f1", "micro_f1", "matthews")).score(
        np.array(guess), truth
    )
    expected = {
        "accuracy": np.mean(truth == guess),
        "macro_f1": metrics.f1_score(truth, guess, average="macro", zero_division=0.0),
        "micro_f1": np.mean(truth == guess),
        "matthews": metrics.matthews_corrcoef(truth, guess),
    }
    assert found == pytest.approx(expected)


@pytest.mark.parametrize("truth", [[1.0, 2.0, 4.0], [3.0, 3.0, 3.0], [2.0]], ids=["any", "constant", "one"])
def test_errors_of_values_are_scikit_learns(truth: list[float]) -> None:
    guess = [1.5, 2.0, 0.0][: len(truth)]
    found = regression(("pearson", "mse", "mae")).score(np.array(guess), np.array(truth))
    assert found["mse"] == pytest.approx(metrics.mean_squared_error(truth, guess))
    assert found["mae"] == pytest.approx(metrics.mean_absolute_error(truth, guess))
    if len({*truth}) == 1:
        assert found["pearson"] == 0.0
