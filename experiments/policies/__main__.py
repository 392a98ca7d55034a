"""Trains with every freeze policy, one run after the other: ``python -m experiments.policies <folder> <options>``.

``<options>`` are those of ``train.py``: model, data, epochs. A run that is complete in the folder is not repeated, so
that the same command goes on where it was stopped.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.record import markdown, publish
from pipetransformer.report.run_folder import SUMMARY

ARMS: dict[str, tuple[str, ...]] = {
    "none": (),
    "pipetransformer": (),
    "alpha": (),
    "linear": (),
    "random": (),
    "schedule": ("freeze.num_frozen=[2,4]",),
    "prefix": ("freeze.num_blocks=2",),
    "freezeout": (),
    "autofreeze": (),
    "threshold": (),
    "cka": (),
    "egeria": (),
    "budget": (),
}
"""Each policy, with the knobs that it leaves to the user; all others are defaults."""
HEADER = ("policy", "frozen blocks from step", "mean frozen", "accuracy", "training", "CPU", "signals")


def train(arm: str, folder: Path, options: Sequence[str]) -> None:
    """Runs one arm as a user would, unless it is complete."""
    run_dir = folder / arm
    if is_complete(run_dir):
        return
    command = [sys.executable, "train.py", f"freeze={arm}", *ARMS[arm], *options, f"hydra.run.dir={run_dir}"]
    subprocess.run([*command, "overwrite=true", "logger=none"], check=True, stdout=subprocess.DEVNULL)


def is_complete(run_dir: Path) -> bool:
    """Returns whether a run has come to its end here."""
    summary = run_dir / SUMMARY
    return summary.is_file() and json.loads(summary.read_text(encoding="utf-8"))["status"] == "completed"


def figures(arm: str, run_dir: Path) -> dict[str, Any]:
    """Returns what a run shows of its policy."""
    summary = json.loads((run_dir / SUMMARY).read_text(encoding="utf-8"))
    signals = summary.get("signals", {})
    return {
        "policy": arm,
        "options": list(ARMS[arm]),
        "prefixes": [[plan["step"], plan["num_frozen"]] for plan in summary["plans"]],
        "mean_frozen_fraction": summary["mean_frozen_fraction"],
        "metric": summary["metric"]["value"],
        "train_seconds": summary["train_seconds"],
        "cpu_seconds": summary["cpu_seconds"],
        "signal_seconds": signals,
        "signal_share": sum(signals.values()) / summary["step_seconds"],
    }


def table(results: Sequence[dict[str, Any]]) -> str:
    """Returns the arms as a table."""
    return markdown(HEADER, (_row(result) for result in results))


def _row(result: dict[str, Any]) -> tuple[str, ...]:
    changes = [f"{frozen} from {step:,}" for step, frozen in result["prefixes"] if frozen or step]
    return (
        f"`{result['policy']}`",
        ", ".join(changes) or "none",
        f"{result['mean_frozen_fraction']:.0%}",
        f"{result['metric']:.4f}",
        f"{result['train_seconds']:.0f} s",
        f"{result['cpu_seconds']:.0f} s",
        f"{result['signal_share']:.2%}",
    )


def main(folder: Path, options: Sequence[str], into: Path | None = None) -> None:
    """Trains all arms and shows the table."""
    for arm in ARMS:
        train(arm, folder, options)
        print(_row(figures(arm, folder / arm)), flush=True)
    results = [figures(arm, folder / arm) for arm in ARMS]
    publish(table(results), results, into)


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute(), sys.argv[2:], Path(__file__).parent)
