"""The direction of a metric, which its name tells, and metrics of the user's own as plain numbers."""

from collections.abc import Mapping
from typing import Any

from pipetransformer.errors import UserError

LOWER_IS_BETTER = ("loss", "perplexity", "error", "mae", "mse", "rmse")


def sign_of(metric: str) -> int:
    """Returns 1 for a metric of which more is better, and -1 for a loss or an error, such as ``token_loss``."""
    return -1 if metric.rpartition("_")[2] in LOWER_IS_BETTER else 1


def plain_metrics(metrics: Any, where: str) -> dict[str, float]:
    """Returns metrics as plain floats, of NumPy's and torch's numbers too: summary and log are JSON.

    Args:
        metrics: What the user's code returned.
        where: Its function, for the message.

    Raises:
        UserError: They are no numbers by name.
    """
    if not isinstance(metrics, Mapping) or not metrics or not all(isinstance(name, str) for name in metrics):
        raise UserError(
            f"{where} returned {metrics!r:.80}; give a number by name, the main one first: {{'accuracy': 0.9}}"
        )
    plain = {}
    for name, value in metrics.items():
        try:
            plain[name] = float(value.item() if hasattr(value, "item") else value)
        except (TypeError, ValueError, RuntimeError) as error:  # RuntimeError: torch's, of several numbers
            raise UserError(
                f"{where} returned {name}={value!r:.80} ({type(value).__name__}); give one number"
            ) from error
    return plain
