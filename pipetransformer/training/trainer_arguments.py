"""Arguments of :class:`~pipetransformer.training.elastic_trainer.ElasticTrainer` that cannot be, told in a line."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from pipetransformer.config.kinds import CONFIG, RUN, check_config
from pipetransformer.config.schema import Config
from pipetransformer.data.map_samples import further_names, readable
from pipetransformer.data.map_style import Loss, MapStyleSplit
from pipetransformer.errors import UserError
from pipetransformer.kinds import Kind, check_kinds
from pipetransformer.models.checks import beside_weights, trial
from pipetransformer.models.instance import ModelInstance
from pipetransformer.training.trainer import Callback

OPTIONAL = ("freeze", "peft", "parallel", "cache", "loader", "evaluate", "checkpoint", "guard")
ARGUMENTS = (
    {
        "model": Kind((nn.Module,), "the model itself, such as timm.create_model(...) or an nn.Sequential"),
        "loss": Kind((Callable,), 'a function of the loss of each sample, as nn.CrossEntropyLoss(reduction="none")'),
        "evaluation": Kind((Mapping,), 'data sets by name, as {"dev": dataset}').or_none,
        "metrics": Kind((Callable,), "a function, metrics(predictions, targets) -> {name: value}").or_none,
        "optimizer": CONFIG["optim"],
        "callbacks": Kind((Sequence,), "a list of them, as [MyCallback()]"),
        "resume": Kind((bool,), "True or False, and the folder as run_dir"),
        "resume_allow": Kind((list, tuple), 'a list of options, as ["optim.lr"]'),
        "run_dir": RUN["run_dir"],
    }
    | {name: CONFIG[name] for name in ("batch_size", "epochs", "seed", "compile")}
    | {name: CONFIG[name].or_none for name in OPTIONAL}
)
"""The kinds of the arguments, without words such as ``precision``, which are looked up among their choices."""
CALLBACK = Kind((Callback,), "an object of a subclass of pt.Callback")


def check_arguments(given: Mapping[str, Any]) -> None:
    """Refuses arguments of another kind than the trainer takes, and those that need one that is not given.

    Args:
        given: All arguments by name.

    Raises:
        UserError: With the argument and the remedy.
    """
    check_kinds(given, ARGUMENTS)
    check_callbacks(given["callbacks"])
    if given["resume_allow"] and not given["resume"]:
        raise UserError("`resume_allow` names what may differ from an earlier run; give `resume=True` to go on with it")
    freeze, evaluate, evaluation = given["freeze"], given["evaluate"], given["evaluation"]
    if given["run_dir"] is None and (given["checkpoint"] is not None or given["resume"]):
        raise UserError("`checkpoint` and `resume` need a folder; give `run_dir`")
    if freeze is not None and freeze.guard is not None and not (evaluation and evaluate):
        raise UserError("`freeze.guard` judges by evaluations; give `evaluation` and `evaluate`")
    if evaluate is not None and evaluate.patience is not None and not evaluation:
        raise UserError("`evaluate` has `patience`, and there is nothing to evaluate; give `evaluation`")


def check_without_folder(config: Config) -> None:
    """Refuses options that need a checkpoint for a run that has no folder, and so none.

    Raises:
        UserError: With the option, and what to give in its place.
    """
    check_config(config)
    guard, rolls_back = config.guard, "roll_back"
    for option, remedy, is_so in (
        ("evaluate.save=best", "evaluate.save=last", config.evaluate.save == "best"),
        ("guard.not_finite=roll_back", "guard.not_finite=skip", guard.not_finite == rolls_back),
        (
            "guard.exploding=roll_back", "guard.exploding=skip",
            guard.exploding == rolls_back and guard.max_norm_ratio is not None,
        ),
        (
            "guard.freeze=roll_back", "guard.freeze=unfreeze",
            guard.freeze == rolls_back and config.freeze.guard is not None,
        ),
    ):  # fmt: skip
        if is_so:
            raise UserError(
                f"{option} goes back to a checkpoint, and a run without a folder has none; give `run_dir`, or take "
                f"{remedy}"
            )


def check_callbacks(callbacks: Sequence[Callback]) -> None:
    """Refuses hooks that are not callbacks.

    Raises:
        UserError: With the place of the first one.
    """
    check_kinds({"callbacks": callbacks}, ARGUMENTS)
    for index, callback in enumerate(callbacks):
        name = f"callbacks[{index}]"
        check_kinds({name: callback}, {name: CALLBACK})


def check_samples(spec: ModelInstance, train: Any, evaluation: Mapping[str, Any], loss: Loss) -> None:
    """Runs the model on two training samples, and on one of each data set to evaluate that has another shape.

    Raises:
        UserError: A data set cannot be read, or the model does not take its samples.
    """
    rows = readable("train", train)
    samples = MapStyleSplit("train", [rows[i % len(rows)] for i in range(2)] if len(rows) else [], loss)
    ids, num_tokens = [0, 1], None if samples.lengths is None else int(samples.lengths.max())
    spec.check_on(samples.inputs(ids, num_tokens), samples.context(ids, num_tokens))
    spec.check_names("train", further_names(train))
    for name, dataset in evaluation.items():
        rows = readable(name, dataset)
        spec.check_names(name, further_names(dataset))
        if len(rows):
            _check_shape(spec.model, MapStyleSplit(name, [rows[0]], loss), samples)


@torch.no_grad()
def _check_shape(model: nn.Module, split: MapStyleSplit, train: MapStyleSplit) -> None:
    """Tries a model on a sample to evaluate that has another shape than those to train on.

    Raises:
        UserError: The model does not take it.
    """
    if split.input_shape == train.input_shape:
        return
    inputs, _ = beside_weights(model, split.inputs([0], None))
    with trial(model, training=False):
        try:
            model(inputs)
        except Exception as error:  # whatever the model raises
            raise UserError(
                f"samples of the {split.name} split have shape {split.input_shape} and those of the training data "
                f"{train.input_shape}, and the model does not take both ({type(error).__name__}: {error}); bring all "
                "to one shape"
            ) from error
