"""The kinds of values that the options of a run take, and what its files can hold."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from os import PathLike
from types import NoneType
from typing import Any

from pipetransformer.config.schema import Config, SimulationConfig, as_plain
from pipetransformer.data.base import DatasetSpec
from pipetransformer.decorated import check_decorated
from pipetransformer.errors import UserError
from pipetransformer.freeze.base import FreezePolicy
from pipetransformer.kinds import Kind, check_kinds, in_words, kinds_of
from pipetransformer.models.adapters import AdapterSpec
from pipetransformer.models.base import ModelSpec
from pipetransformer.optim.base import OptimizerSpec
from pipetransformer.report.reporter import LoggerSpec

SPECS = {
    "model": Kind((ModelSpec,), "a specification, such as pt.TimmModel(name=...)"),
    "dataset": Kind((DatasetSpec,), "a specification, such as pt.Digits()"),
    "freeze": Kind((FreezePolicy,), "a freeze policy, such as pt.PaperRule()"),
    "optim": Kind((OptimizerSpec,), "an optimizer of pipetransformer, such as pt.AdamW(lr=2e-5)"),
    "peft": Kind((AdapterSpec,), "adapters, such as pt.Lora(r=8)"),
    "logger": Kind((LoggerSpec,), "a logger, such as pt.WandbLogger()"),
}
"""Fields of a configuration whose classes the schema names for the type checker alone."""


def _of_fields(spec: type) -> dict[str, Kind]:
    """Returns the kinds of a configuration's fields, as :func:`~pipetransformer.kinds.kinds_of` does of others'."""
    found = {each.name: each.type for each in fields(spec) if each.type not in (Any, str)}
    return {name: SPECS[name] if isinstance(kind, str) else Kind.of(kind) for name, kind in found.items()}


CONFIG, SIMULATION = _of_fields(Config), _of_fields(SimulationConfig)
RUN = {"config": Kind((Config,), "pt.Config(...)"), "run_dir": Kind((str, PathLike), "the path of a folder").or_none}
SIMULATED = {"config": Kind((SimulationConfig,), "SimulationConfig(...)")}
"""Arguments of :func:`~pipetransformer.simulate.run.simulate`."""


def check_config(config: Config) -> None:
    """Refuses a configuration one of whose fields holds a value of another kind, or loses options of its class.

    Raises:
        UserError: With the option, the value and the remedy.
    """
    check_kinds({"config": config}, RUN)
    check_kinds(vars(config), SIMULATION if isinstance(config, SimulationConfig) else CONFIG)
    for name, spec in vars(config).items():  # sections and specifications
        if is_dataclass(spec) and not isinstance(spec, type):
            check_decorated(type(spec))
            check_kinds(vars(spec), kinds_of(type(spec)), f"{name}.")


def check_plain(config: Config) -> None:
    """Refuses a configuration with a value that ``config.yaml`` cannot hold, such as a function.

    Raises:
        UserError: With the option and the remedy.
    """
    for name, value in _leaves(as_plain(config), ""):
        if type(value) not in (NoneType, bool, int, float, str):
            raise UserError(
                f"{name} is {in_words(value)}, which config.yaml of the run cannot hold; give numbers, strings, and "
                "lists and dictionaries of them, or hand a model or data of your own to pt.ElasticTrainer(...)"
            )


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yields what containers hold, with its full name."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _leaves(each, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list):
        for index, each in enumerate(value):
            yield from _leaves(each, f"{name}[{index}]")
    else:
        yield name, value
