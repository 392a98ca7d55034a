"""The direction of a metric, which its name tells."""

LOWER_IS_BETTER = ("loss", "perplexity", "error", "mae", "mse", "rmse")


def sign_of(metric: str) -> int:
    """Returns 1 for a metric of which more is better, and -1 for a loss or an error, such as ``token_loss``."""
    return -1 if metric.rpartition("_")[2] in LOWER_IS_BETTER else 1
