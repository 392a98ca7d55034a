"""Metrics by name, computed by torchmetrics over all samples at once."""

from __future__ import annotations

import numpy as np


def compute(
    names: tuple[str, ...], predictions: np.ndarray, targets: np.ndarray, num_classes: int = 1
) -> dict[str, float]:
    """Computes the named metrics in order.

    Args:
        names: Of ``accuracy``, ``f1`` (of class 1), ``matthews``, ``pearson``, ``spearman``.
        predictions: Classes or values, shape (N,).
        targets: The same for the truth, shape (N,).
        num_classes: Number of classes; without meaning for the two correlations.
    """
    import torch
    from torchmetrics.functional import classification, regression

    assert predictions.shape == targets.shape, (predictions.shape, targets.shape)
    pair = torch.from_numpy(predictions), torch.from_numpy(targets)
    values = pair[0].double(), pair[1].double()
    functions = {
        "accuracy": lambda: classification.multiclass_accuracy(*pair, num_classes, average="micro"),
        "f1": lambda: classification.binary_f1_score(*pair),
        "matthews": lambda: classification.multiclass_matthews_corrcoef(*pair, num_classes),
        "pearson": lambda: regression.pearson_corrcoef(*values),
        "spearman": lambda: regression.spearman_corrcoef(*values),
    }
    return {name: float(functions[name]()) for name in names}
