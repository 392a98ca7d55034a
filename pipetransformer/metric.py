"""The direction of a metric, which its name tells, and metrics of the user's own as plain numbers."""

import re
from collections.abc import Mapping
from typing import Any

from pipetransformer.errors import UserError

LOWER_IS_BETTER = {
    "loss", "losses", "perplexity", "ppl", "entropy", "nll", "error", "errors", "mae", "mse", "rmse", "mape", "brier",
    "wer", "cer",
}  # fmt: skip


def sign_of(metric: str) -> int:
    """Returns 1 for a metric of which more is better, and -1 for a loss or an error.

    A word of the name tells, as in ``token_loss``, ``error_rate`` or ``valRMSE``. A name that begins with ``neg_``
    tells that the sign is turned around already.
    """
    words = [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", metric)]
    return -1 if words[:1] != ["neg"] and LOWER_IS_BETTER.intersection(words) else 1


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
