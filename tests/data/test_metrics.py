import numpy as np
import pytest

from pipetransformer.data.metrics import compute

TRUTH = np.array([1, 1, 0, 0, 1])
GUESS = np.array([1, 0, 0, 1, 1])  # 2 true and 1 false positives, 1 true and 1 false negative


def test_classification_metrics_by_hand() -> None:
    found = compute(("accuracy", "f1", "matthews"), GUESS, TRUTH, num_classes=2)
    expected = {"accuracy": 3 / 5, "f1": 2 / 3, "matthews": (2 * 1 - 1 * 1) / np.sqrt(3 * 3 * 2 * 2)}
    assert found == pytest.approx(expected, abs=1e-6)
    assert [*found] == ["accuracy", "f1", "matthews"]


def test_correlations_by_hand() -> None:
    values, truth = np.array([1.0, 2.0, 3.0, 10.0]), np.array([2.0, 4.0, 8.0, 6.0], dtype=np.float32)
    found = compute(("pearson", "spearman"), values, truth)
    assert found == pytest.approx({"pearson": np.corrcoef(values, truth)[0, 1], "spearman": 0.8}, abs=1e-6)


def test_every_sample_must_be_predicted() -> None:
    with pytest.raises(AssertionError):
        compute(("accuracy",), GUESS[:-1], TRUTH, num_classes=2)
