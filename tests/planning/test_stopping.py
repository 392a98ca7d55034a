"""When a run ends early, and by which metric."""

import json
import math

import pytest

from pipetransformer.config.sections import Evaluation
from pipetransformer.errors import UserError
from pipetransformer.metric import sign_of
from pipetransformer.planning.stopping import Patience, check_metric, wanted_metric


def ends_at(options: Evaluation, name: str, values: list[float]) -> tuple[int | None, str]:
    """The number of the evaluation at which a run ends, and why; the memory goes through JSON after each."""
    patience = Patience()
    for number, value in enumerate(values, start=1):
        patience = Patience.from_dict(json.loads(json.dumps(patience.state_dict())))
        patience.count(options, name, value)
        if patience.reason:
            return number, patience.reason
    return None, ""


@pytest.mark.parametrize(
    ("options", "name", "values", "expected"),
    [
        (
            Evaluation(patience=2),
            "accuracy",
            [0.5, 0.9, 0.8, 0.9, 1.0],
            (4, "no higher accuracy than 0.9 for 2 evaluations"),
        ),
        (Evaluation(patience=2), "accuracy", [0.5, 0.4, 0.6, 0.5, 0.7], (None, "")),
        (Evaluation(patience=1), "loss", [0.5, 0.4, 0.45], (3, "no lower loss than 0.4 for 1 evaluation")),
        (
            Evaluation(patience=2, min_delta=0.2),
            "f1",
            [0.5, 0.6, 0.69, 0.9],
            (3, "no higher f1 than 0.5 by more than 0.2 for 2 evaluations"),
        ),
        (Evaluation(patience=2, min_delta=0.2), "f1", [0.5, 0.6, 0.71, 0.8, 0.95], (None, "")),
        (
            Evaluation(patience=1, min_delta=0.01),
            "accuracy",
            [0.8, 0.81],  # which is more than 0.01 in floating-point numbers
            (2, "no higher accuracy than 0.8 by more than 0.01 for 1 evaluation"),
        ),
        (Evaluation(), "accuracy", [0.5] * 50, (None, "")),
        (Evaluation(patience=1), "loss", [math.nan, 0.5, 0.4], (None, "")),
        (Evaluation(patience=2), "loss", [math.nan] * 9, (3, "no lower loss than nan for 2 evaluations")),
        (Evaluation(patience=2), "loss", [0.5, math.nan, math.nan], (3, "no lower loss than 0.5 for 2 evaluations")),
    ],
)
def test_a_run_ends_after_so_many_evaluations_without_a_new_best(
    options: Evaluation, name: str, values: list[float], expected: tuple[int | None, str]
) -> None:
    assert ends_at(options, name, values) == expected


def test_a_loss_is_better_where_it_is_lower() -> None:
    more = (
        "accuracy", "f1", "glossary", "neg_mean_squared_error", "R2", "val_neg_log_loss", "log_likelihood", "bleu",
        "negative_rmse",
    )  # fmt: skip
    less = (
        "loss", "token_loss", "perplexity", "error_rate", "MAE", "val_RMSE", "valLoss", "mean_squared_error", "nll",
        "logloss", "eval_logloss", "crossentropy", "rmsle", "negative_log_likelihood", "negLogLikelihood",
        "bits_per_byte", "hinge", "cross_entropy",
    )  # fmt: skip
    assert [sign_of(name) for name in (*more, *less)] == [1] * len(more) + [-1] * len(less)


def test_the_main_metric_is_that_of_the_first_split_unless_another_is_named() -> None:
    splits = ["matched", "mismatched"]
    assert wanted_metric(None, splits) == ("matched", None)
    assert wanted_metric("f1", splits) == ("matched", "f1")
    assert wanted_metric("mismatched/f1", splits) == ("mismatched", "f1")
    with pytest.raises(UserError, match=r"evaluate\.metric=test/f1: there is no split test; choose of matched, mis"):
        wanted_metric("test/f1", splits)
    check_metric(None, "matched", ["accuracy"])
    with pytest.raises(UserError, match=r"evaluate\.metric=f2: matched is not scored by f2; choose of accuracy, f1"):
        check_metric("f2", "matched", ["accuracy", "f1"])
