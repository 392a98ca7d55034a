"""The card of a saved model: what it was made from, how well it does, and how to make it again."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipetransformer.report.environment import library_versions, read_overrides, section_of
from pipetransformer.report.run_folder import Run, read_run
from pipetransformer.report.secrets import redact
from pipetransformer.report.sinks import Values

CARD = "README.md"
OF_FOLDERS = ("hydra", "resume", "overwrite")
"""Options and sections that say where a run was written or went on, and nothing about the model."""


def write_card(run_dir: Path, model_dir: Path, step: int | None) -> None:
    """Writes the card beside a saved model, from the record of its run.

    Args:
        run_dir: The run folder.
        model_dir: The saved model.
        step: Step of the weights; ``None``: the end of the run.

    Raises:
        UserError: The run folder is damaged.
    """
    run = read_run(run_dir)
    lines = redact("\n".join(_lines(run, read_overrides(run_dir), step)))
    (model_dir / CARD).write_text(lines + "\n", encoding="utf-8")


def _lines(run: Run, overrides: list[str] | None, step: int | None) -> Iterator[str]:
    start, config = run.start, run.config
    library = "timm" if "timm" in config["model"]["_target_"] else "transformers"
    yield from ("---", f"library_name: {library}", f"datasets: [{start['dataset']}]", "---", "")
    yield from (f"# {start['model']} on {start['dataset']}", "")
    yield f"{_training(run, step)}; {start['num_parameters']:,} parameters."
    yield from ("", "| | |", "|---|---|")
    for label, value in _rows(run, step):
        yield f"| {label} | {value} |"
    if changes := _changes(run, step):
        yield from ("", "## Freezing", "", "| step | frozen blocks | why |", "|---|---|---|")
        for change in changes:
            yield f"| {change['step']} | {change['num_frozen']} of {start['num_blocks']} | {change['reason']} |"
    yield from ("", "## Made with", "")
    if overrides is None:
        yield "A script that called `pipetransformer`; its settings are in the run's config.yaml."
    else:
        command = (each for each in overrides if section_of(each) not in OF_FOLDERS)
        yield f"    pipetransformer-train {shlex.join(command)}".rstrip()
    yield ""
    yield from (f"    {name}=={version}" for name, version in sorted(library_versions().items()))


def _training(run: Run, step: int | None) -> str:
    how = "Fine-tuned" if run.config["model"].get("pretrained") else "Trained"
    freezes = any(change["num_frozen"] for change in _changes(run, step))
    return f"{how} with {'blocks frozen from the bottom up' if freezes else 'no block frozen'}"


def _changes(run: Run, step: int | None) -> list[Values]:
    """Returns ``step``, ``num_frozen`` and ``reason`` of what was frozen from the start, and of each decision.

    A decision at the step of the weights came after them.
    """
    first = [
        {"step": 0, "num_frozen": each["after"]["num_frozen"], "reason": each["reason"]}
        for each in run.events["transition"]
        if each["step"] == 0 and each["after"]["num_frozen"]
    ]
    return [*first[-1:], *(each for each in run.events["decision"] if step is None or each["step"] < step)]


def _rows(run: Run, step: int | None) -> Iterator[tuple[str, str]]:
    config, start = run.config, run.start
    evaluations = [each for each in run.events["evaluate"] if step is None or each["step"] <= step]
    latest = {each["split"]: each for each in evaluations}
    for split, each in latest.items():
        metrics = ", ".join(f"{name} {value:.4f}" for name, value in each["metrics"].items() if value is not None)
        yield f"{split}, {each['num_samples']:,} samples", f"{metrics} at step {each['step']:,}"
    yield "data", _data(config["dataset"], start["dataset"])
    yield "step", f"{run.num_steps if step is None else step:,} of {run.num_steps:,}"
    yield "batch size, epochs, seed", f"{config['batch_size']}, {config['epochs']}, {config['seed']}"
    yield "precision", config["precision"]
    yield "freeze policy", config["freeze"]["_target_"].rpartition(".")[2]


def _data(spec: dict[str, Any], name: str) -> str:
    limits = [f"{key}={spec[key]}" for key in ("max_train_samples", "max_eval_samples") if spec.get(key) is not None]
    return " ".join([name, *limits])
