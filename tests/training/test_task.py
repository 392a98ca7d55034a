import pytest
import torch
from torch import Tensor, nn

from pipetransformer.data.base import CLASSIFICATION, QUESTION_ANSWERING, REGRESSION
from pipetransformer.training.task import LOSSES, objective

NUM_SAMPLES, NUM_TOKENS = 4, 7


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def test_classification_is_torchs_cross_entropy() -> None:
    output, targets = drawn(NUM_SAMPLES, 3), torch.tensor([0, 2, 1, 2])
    losses = LOSSES[CLASSIFICATION](output, targets.double())  # targets travel as float64
    assert losses.shape == (NUM_SAMPLES,)
    torch.testing.assert_close(losses.mean(), nn.CrossEntropyLoss()(output, targets))


def test_regression_is_torchs_squared_error() -> None:
    output, targets = drawn(NUM_SAMPLES, 1), torch.tensor([0.0, 2.5, 5.0, 1.0])
    losses = LOSSES[REGRESSION](output, targets)
    assert losses.shape == (NUM_SAMPLES,)
    torch.testing.assert_close(losses.mean(), nn.MSELoss()(output[:, 0], targets.double()))


def answers(num_tokens: list[int]) -> Tensor:
    return torch.tensor([[0, 1, num_tokens[0]], [2, 2, num_tokens[1]], [1, 3, num_tokens[2]], [0, 0, num_tokens[3]]])


def test_question_answering_is_the_mean_over_start_and_end() -> None:
    output, targets = drawn(NUM_SAMPLES, NUM_TOKENS, 2), answers([NUM_TOKENS] * NUM_SAMPLES)
    expected = [nn.functional.cross_entropy(output[:, :, i], targets[:, i], reduction="none") for i in (0, 1)]
    torch.testing.assert_close(LOSSES[QUESTION_ANSWERING](output, targets), (expected[0] + expected[1]) / 2)


def test_what_stands_in_padding_does_not_count() -> None:
    output, targets = drawn(NUM_SAMPLES, NUM_TOKENS, 2), answers([4, 5, 6, 7])
    other = output.clone()
    other[0, 4:] = 100.0
    loss = LOSSES[QUESTION_ANSWERING]
    torch.testing.assert_close(loss(output, targets), loss(other, targets), rtol=0, atol=0)
    torch.testing.assert_close(loss(output, targets)[0], loss(output[:1, :4], targets[:1])[0])


@pytest.mark.parametrize(
    ("task", "num_outputs", "shape"),
    [(CLASSIFICATION, 3, (2, 3)), (REGRESSION, 1, (2, 1)), (QUESTION_ANSWERING, 2, (2, 5, 2))],
)
def test_the_head_of_a_task_returns_the_shape_that_its_loss_reads(
    task: str, num_outputs: int, shape: tuple[int, ...]
) -> None:
    assert objective(task, num_outputs).output_shape((2, 5, 16)) == shape
