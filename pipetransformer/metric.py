"""The direction of a metric, which its name tells, and metrics of the user's own as plain numbers."""

import re
from collections.abc import Mapping
from typing import Any

from pipetransformer.errors import UserError

LOWER_IS_BETTER = {
    "losses", "perplexity", "ppl", "nll", "error", "errors", "mae", "mse", "rmse", "msle", "rmsle", "mape", "smape",
    "brier", "hinge", "bpb", "bpc", "bits", "wer", "cer",
}  # fmt: skip
ENDINGS = ("loss", "entropy")  # of a word, as in logloss
NEGATED = {"neg", "negative"}


def sign_of(metric: str) -> int:
    """Returns 1 for a metric of which more is better, and -1 for a loss or an error.

    A word of the name tells, as in ``token_loss``, ``error_rate``, ``logloss`` or ``valRMSE``. With the word ``neg`` or
    ``negative`` the sign is turned around already, as in scikit-learn's ``neg_log_loss``; a likelihood is a loss then.
    """
    words = [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", metric)]
    if "likelihood" in words:
        return -1 if NEGATED.intersection(words) else 1
    is_loss = bool(LOWER_IS_BETTER.intersection(words)) or any(word.endswith(ENDINGS) for word in words)
    return -1 if is_loss and not NEGATED.intersection(words) else 1


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
