"""The kinds of values that a script gives for arguments and options, checked before one of them is used.

Without it a value of another kind would end in a trace of whatever uses it first. The command line types its options
itself.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from numbers import Integral, Real
from os import PathLike
from types import NoneType, UnionType
from typing import Any, Self, get_args, get_origin

from pipetransformer.config.schema import SECTIONS, Config, SimulationConfig, as_plain
from pipetransformer.data.base import DatasetSpec
from pipetransformer.decorated import check_decorated
from pipetransformer.errors import UserError
from pipetransformer.freeze.base import FreezePolicy
from pipetransformer.models.adapters import AdapterSpec
from pipetransformer.models.base import ModelSpec
from pipetransformer.optim.base import OptimizerSpec
from pipetransformer.report.reporter import LoggerSpec

WIDER: dict[Any, tuple[Any, ...]] = {int: (Integral,), float: (Real,), str: (str, PathLike), list: (list, tuple)}
"""Substitutes of a type: numbers of numpy, paths, tuples."""
WORDS = {
    int: "a whole number", float: "a number", bool: "True or False", str: "a string", list: "a list", NoneType: "None"
}  # fmt: skip
SHOWN = 60  # characters of a value that is no object


@dataclass(frozen=True)
class Kind:
    """The values that an argument takes.

    Attributes:
        types: Their types. ``bool`` counts as no number, and a class never stands for its instance.
        give: The remedy in words.
    """

    types: tuple[Any, ...]
    give: str

    @classmethod
    def of(cls, annotation: Any) -> Self:
        """Returns the kind of a type, of a list of something, or of several types as in ``int | None``."""
        choices = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
        types = tuple(get_origin(each) or each for each in choices)
        return cls(types, " or ".join(WORDS.get(each, f"{each.__name__}(...)") for each in types))

    @property
    def or_none(self) -> "Kind":
        """The same kind, or ``None``."""
        return Kind((*self.types, NoneType), f"{self.give}, or None")

    def holds(self, value: Any) -> bool:
        """Returns whether a value is of this kind."""
        if isinstance(value, bool):
            return bool in self.types
        return not isinstance(value, type) and any(isinstance(value, WIDER.get(each, each)) for each in self.types)


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
    """Returns the kinds of the fields of a dataclass, without those that take any value, or a word of a few."""
    found = {each.name: each.type for each in fields(spec) if each.type not in (Any, str)}
    return {name: SPECS[name] if isinstance(kind, str) else Kind.of(kind) for name, kind in found.items()}


OPTIONS = {name: _of_fields(spec) for name, spec in SECTIONS.items()}
CONFIG, SIMULATION = _of_fields(Config), _of_fields(SimulationConfig)
RUN = {"config": Kind((Config,), "pt.Config(...)"), "run_dir": Kind((str, PathLike), "the path of a folder").or_none}
SIMULATED = {"config": Kind((SimulationConfig,), "SimulationConfig(...)")}
"""Arguments of :func:`~pipetransformer.simulate.run.simulate`."""


def check_kinds(given: Mapping[str, Any], kinds: Mapping[str, Kind], section: str = "") -> None:
    """Refuses a value of another kind than its argument takes.

    Args:
        given: Values by the names of their arguments; one that has no kind may be anything.
        section: Of a configuration, whose name the arguments begin with.

    Raises:
        UserError: With the argument, the value and the remedy.
    """
    for name, kind in kinds.items():
        if name in given and not kind.holds(given[name]):
            raise UserError(f"{section}{name} is {_in_words(given[name])}; give {kind.give}")


def check_config(config: Config) -> None:
    """Refuses a configuration one of whose fields holds a value of another kind, or loses options of its class.

    Raises:
        UserError: With the option, the value and the remedy.
    """
    check_kinds({"config": config}, RUN)
    check_kinds(vars(config), SIMULATION if isinstance(config, SimulationConfig) else CONFIG)
    for name in OPTIONS.keys() & vars(config).keys():
        check_kinds(vars(getattr(config, name)), OPTIONS[name], f"{name}.")
    for spec in vars(config).values():
        if is_dataclass(spec) and not isinstance(spec, type):
            check_decorated(type(spec))


def check_plain(config: Config) -> None:
    """Refuses a configuration with a value that ``config.yaml`` cannot hold, such as a function.

    Raises:
        UserError: With the option and the remedy.
    """
    for name, value in _leaves(as_plain(config), ""):
        if type(value) not in (NoneType, bool, int, float, str):
            raise UserError(
                f"{name} is {_in_words(value)}, which config.yaml of the run cannot hold; give numbers, strings, and "
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


def _in_words(value: Any) -> str:
    """Returns a value that is short as it is written, and of any other its type."""
    kind = type(value)
    if isinstance(value, type):
        return f"the class {value.__qualname__}"
    if value is None:
        return "None"
    if isinstance(value, bool | int | float | str):
        return f"{repr(value)[:SHOWN]} ({kind.__name__})"
    return (
        f"of type {kind.__qualname__}"
        if kind.__module__ == "builtins"
        else f"of type {kind.__module__}.{kind.__qualname__}"
    )
