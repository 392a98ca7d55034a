"""Metrics of the user's own code are plain numbers, or are refused with the function that returned them."""

import json
import re
from typing import Any

import numpy as np
import pytest
import torch

from pipetransformer.data.map_style import MapStyleSplit
from pipetransformer.errors import UserError
from pipetransformer.metric import plain_metrics


def test_numbers_of_numpy_and_torch_are_floats_that_json_takes() -> None:
    found = plain_metrics({"f1": np.float32(0.5), "loss": torch.tensor(2.0), "n": 3, "whole": np.array([4])}, "f")
    assert json.loads(json.dumps(found)) == {"f1": 0.5, "loss": 2.0, "n": 3.0, "whole": 4.0}
    assert list(found) == ["f1", "loss", "n", "whole"], "the main one first"


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        (None, "Own.score returned None; give a number by name, the main one first: {'accuracy': 0.9}"),
        (0.5, "Own.score returned 0.5; give a number by name"),
        ({}, "Own.score returned {}; give a number by name"),
        ({1: 0.5}, "Own.score returned {1: 0.5}; give a number by name"),
        ({"f1": None}, "Own.score returned f1=None (NoneType); give one number"),
        ({"f1": "good"}, "Own.score returned f1='good' (str); give one number"),
        ({"f1": np.ones(2)}, "Own.score returned f1=array([1., 1.]) (ndarray); give one number"),
        ({"f1": torch.ones(2)}, "Own.score returned f1=tensor([1., 1.]) (Tensor); give one number"),
    ],
)
def test_what_is_no_number_by_name_is_refused(metrics: Any, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        plain_metrics(metrics, "Own.score")


def test_metrics_of_a_script_that_return_nothing_are_told() -> None:
    rows = [(torch.zeros(2), 0), (torch.ones(2), 1)]

    def metrics(predictions: np.ndarray, targets: np.ndarray) -> Any:
        return None

    dev = MapStyleSplit("dev", rows, lambda output, _: output.sum(1), metrics)
    predictions = dev.predict(torch.zeros(2, 2), [0, 1], None).numpy()
    with pytest.raises(UserError, match="metrics returned None; give a number by name"):
        dev.score(predictions)


def test_a_loss_of_the_scripts_own_metrics_is_not_replaced() -> None:
    rows = [(torch.zeros(2), 0), (torch.ones(2), 1)]
    dev = MapStyleSplit("dev", rows, lambda output, _: output.sum(1), lambda *_: {"loss": 9.0, "f1": 0.5})
    assert dev.score(dev.predict(torch.zeros(2, 2), [0, 1], None).numpy()) == {"loss": 9.0, "f1": 0.5}
