"""The commands ``pipetransformer-export``, ``-evaluate`` and ``-predict``, for the folder of a run."""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING

from pipetransformer.config.arguments import explain, unknown_key
from pipetransformer.config.compose import read_config
from pipetransformer.config.schema import Config
from pipetransformer.errors import INTERRUPTED, UserError, without_number
from pipetransformer.report.environment import option_of
from pipetransformer.report.rows import row_writer
from pipetransformer.report.run_folder import CONFIG
from pipetransformer.report.secrets import redact

EXPORT_HELP = """\
Writes the model of a run, or of one of its checkpoints, as timm or transformers load it, with a model card.

  pipetransformer-export run=outputs/2026-01-31/12-00-00
  pipetransformer-export run=<folder> step=1200 out=my-model

  run=<folder>    the run folder
  step=<number>   step of a checkpoint; by default that of the saved model, or the newest one that is whole
  out=<folder>    where to, an empty or new folder; by default <run folder>/export
  merge=true      add the adapters of peft=lora to the weights; by default they are written in peft's format
  The data of the run need not be there."""
EVALUATE_HELP = """\
Scores the model of a run, or of one of its checkpoints, in one process; prints the metrics and writes metrics.json.

  pipetransformer-evaluate run=outputs/2026-01-31/12-00-00
  pipetransformer-evaluate run=<folder> dataset.path=<other data> predictions=true

  run=<folder>       the run folder
  step=<number>      step of a checkpoint; by default that of the saved model, or the newest one that is whole
  split=<names>      splits to score, separated by commas; by default those that the run evaluates
  predictions=true   write <split>.jsonl: for each sample a line with its id, prediction and target, where classes have
                     names also as prediction_label and target_label
  out=<folder>       where to; by default <run folder>/evaluation
  Further options are the run's: dataset.path=..., dataset.max_eval_samples=..., batch_size=...
  All of a file dataset.path= is scored, where it is other data than the run's, by its content, and all of what
  dataset.eval_split= or dataset.eval_path= names."""

PREDICT_HELP = """\
Predicts samples without labels by the model of a run, or of one of its checkpoints, in one process.

  pipetransformer-predict run=outputs/2026-01-31/12-00-00 input=reviews.csv output=predicted.csv
  pipetransformer-predict run=<folder> input=<folder with pictures> output=predicted.jsonl

  run=<folder>    the run folder
  input=<path>    texts: a .csv, .tsv or .jsonl file with the columns of the run's data, or a .txt file with a text in
                  each line; questions: these with columns question and context, or SQuAD's .json; pictures: a folder,
                  a file, a .txt list of files, or where the run's data is a table one with its column of pictures
  output=<file>   a new .csv or .jsonl file: for each sample its class with the probability of each, its value or its
                  answer; row counts from 0, in a .txt file all lines, of which blank ones have no prediction, and
                  pictures that no table lists have their file in its place
  step=<number>   step of a checkpoint; by default that of the saved model, or the newest one that is whole
  Further options are the run's: batch_size=..., dataset.max_length=..."""

if TYPE_CHECKING:
    from pipetransformer.data.base import DatasetSpec

OF_THE_RUN = {each.name for each in fields(Config)}
OF_MODELS = ("model", "peft", "precision", "targets")
OF_SAMPLES = (*OF_MODELS, "dataset", "batch_size", "loader", "parallel.device", "parallel.timeout_s", "seed")
"""Options and sections of a run on which its model depends, and those on which reading and scoring samples do too."""
OF_LABELLED = (
    "dataset.path", "dataset.hub", "dataset.hub_name", "dataset.train_split", "dataset.eval_split", "dataset.eval_path",
    "dataset.eval_fraction", "dataset.validation_fraction", "dataset.max_train_samples", "dataset.max_eval_samples",
)  # fmt: skip
"""Options that say which samples are scored; those that are predicted are given by ``input``."""


@dataclass
class Options:
    """Options of the commands, as given."""

    run: str = ""
    step: str = ""
    out: str = ""
    split: str = ""
    predictions: str = "false"
    input: str = ""
    output: str = ""
    merge: str = "false"
    overrides: list[str] = field(default_factory=list)


def export() -> None:
    """Runs ``pipetransformer-export``."""
    _run(EXPORT_HELP, ("run", "step", "out", "merge"), _export)


def evaluate() -> None:
    """Runs ``pipetransformer-evaluate``."""
    _run(EVALUATE_HELP, ("run", "step", "out", "split", "predictions"), _evaluate)


def predict() -> None:
    """Runs ``pipetransformer-predict``."""
    _run(PREDICT_HELP, ("run", "step", "input", "output"), _predict)


def _run(text: str, names: Sequence[str], do: Callable[[Options], None]) -> None:
    if {"-h", "--help"} & {*sys.argv}:
        sys.exit(print(text))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        do(_options(sys.argv[1:], names))
    except UserError as error:
        sys.exit(redact(explain(error)))
    except OSError as error:
        sys.exit(redact(f"{without_number(error)}; name another place by out= or output="))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def _options(arguments: Sequence[str], names: Sequence[str]) -> Options:
    options = Options()
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if not equals:
            raise UserError(f"write options as {names[0]}=<value>, not {argument}; --help lists them")
        if name in names:
            setattr(options, name, value)
        elif "." not in name and name not in OF_THE_RUN:
            raise UserError(unknown_key(name, names))
        else:
            options.overrides.append(argument)
    if not options.run:
        raise UserError("give the folder of a run by run=<folder>")
    if not (Path(options.run) / CONFIG).is_file():
        raise UserError(f"run={options.run} is no run folder: it has no {CONFIG}; give the folder of one run")
    if options.step and not options.step.isdecimal():
        raise UserError(f"step={options.step} is no number of a step")
    for name in ("predictions", "merge"):
        if getattr(options, name) not in ("true", "false"):
            raise UserError(f"{name}={getattr(options, name)} is neither true nor false")
    return options


def without_effect(overrides: Sequence[str], known: Sequence[str], beside: Sequence[str] = ()) -> list[str]:
    """Returns the options of a run that a command does not read.

    Args:
        overrides: As given.
        known: Options and sections that it reads.
        beside: Options of those sections that it does not.
    """
    names = {each: option_of(each) for each in overrides}
    return [each for each, name in names.items() if name in beside or not {name, name.partition(".")[0]} & {*known}]


def _warn(unread: Sequence[str], command: str) -> None:
    if unread:
        have, them = ("has", "it") if len(unread) == 1 else ("have", "them")
        told = f"warning: {', '.join(unread)} {have} no effect on pipetransformer-{command}; drop {them}"
        print(redact(told), file=sys.stderr)


def _export(options: Options) -> None:
    from pipetransformer.training.saved_run import export, open_model

    run_dir = Path(options.run)
    folder = Path(options.out or run_dir / "export")
    config = read_config(run_dir / CONFIG, options.overrides, with_data=False)
    unused = ["merge=true"] if options.merge == "true" and not config.has_adapters else []
    _warn([*without_effect(options.overrides, OF_MODELS), *unused], "export")
    saved = open_model(run_dir, config, _step(options))
    export(saved, run_dir, folder, options.merge == "true")
    print(f"{_named(saved.step)} is in {folder}")


def _evaluate(options: Options) -> None:
    from pipetransformer.training.saved_run import is_own_data, open_saved
    from pipetransformer.training.saved_scores import score

    run_dir = Path(options.run)
    folder = Path(options.out or run_dir / "evaluation")
    names = [name for name in options.split.split(",") if name]
    config, is_other = settings_to_score(run_dir / CONFIG, options.overrides)
    _warn(without_effect(options.overrides, OF_SAMPLES), "evaluate")
    if is_other and is_own_data(run_dir, own := read_config(run_dir / CONFIG, options.overrides)):
        print(f"{own.dataset.path} is the data of the run, whose own split is scored")
        config, is_other = own, False
    saved = open_saved(run_dir, config, _step(options))
    if is_other and not names:
        refuse_a_part(config, saved.data.evaluation[0].name)
    for split, metrics in score(saved, names, folder, options.predictions == "true").items():
        shown = ", ".join(f"{name} {value:.6g}" for name, value in metrics.items() if name != "num_samples")
        print(f"{split}: {shown} ({metrics['num_samples']:,} samples), {_named(saved.step)}")
    print(f"written to {folder}")


def settings_to_score(file: Path, overrides: Sequence[str]) -> tuple[Config, bool]:
    """Reads the settings of a run for scores, perhaps of other data or of a split or file that is named, all of it.

    Returns:
        The settings, and whether it is other data of which nobody says what to evaluate on.
    """
    own, given = (read_config(file, each, with_data=False).dataset for each in ((), overrides))
    said = {name: value for name, _, value in (each.partition("=") for each in overrides)}
    named = [said[name] for name in ("dataset.eval_path", "dataset.eval_split") if name in said]
    is_other = _place(own) != _place(given) and not named
    whole: dict[str, str] = {}
    if is_other or any(name != "null" for name in named):
        whole |= {"max_eval_samples": "null", "validation_fraction": "0"}
    if is_other:
        # weights are of the loss, and other data need not have all classes
        whole |= dict.fromkeys(("max_train_samples", "eval_split", "class_weights"), "null")
        is_file = given.path is not None and Path(given.path).is_file()
        whole["eval_path"] = "${dataset.path}" if is_file else "null"
    options = {f"dataset.{name}": value for name, value in whole.items() if hasattr(given, name)}
    added = (f"{name}={value}" for name, value in options.items() if name not in said)
    return read_config(file, [*overrides, *added]), is_other


def _place(dataset: "DatasetSpec") -> Path | str | None:
    """Returns where data is read, on the disk or on the hub."""
    if dataset.path is not None:
        return Path(dataset.path).resolve()
    return getattr(dataset, "hub", None) or getattr(dataset, "hub_name", None)


def refuse_a_part(config: Config, split: str) -> None:
    """Raises UserError where other data has no split to evaluate on, so that scores were of a part held out of it.

    Args:
        config: Of :func:`settings_to_score`.
        split: Name of the split that would be scored.
    """
    from pipetransformer.data.tables.spec import HELD_OUT

    if split.startswith(HELD_OUT) and getattr(config.dataset, "eval_path", None) is None:
        raise UserError(
            f"{config.dataset.name} has no split to evaluate on, and only a part of it would be scored; give "
            f"split=train,{split} for all of it"
        )


def _predict(options: Options) -> None:
    for name in ("input", "output"):
        if not getattr(options, name):
            raise UserError(f"give {name}=<file>; --help says what it holds")
    row_writer(Path(options.output))  # refuses a wrong one before torch is imported
    from pipetransformer.training.saved_scores import predict

    run_dir = Path(options.run)
    config = read_config(run_dir / CONFIG, options.overrides, with_data=False)
    _warn(without_effect(options.overrides, OF_SAMPLES, OF_LABELLED), "predict")
    num_rows, step = predict(run_dir, config, Path(options.input), Path(options.output), _step(options))
    print(f"{num_rows:,} prediction{'s' * (num_rows != 1)} by {_named(step)}: {options.output}")


def _step(options: Options) -> int | None:
    return int(options.step) if options.step else None


def _named(step: int | None) -> str:
    return "the saved model" if step is None else f"the model of step {step:,}"
