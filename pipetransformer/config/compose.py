"""Turns a configuration that Hydra composed into checked plain values.

``schema`` comes first in the defaults list, so that Hydra refuses unknown keys and wrong types of the general options.
A group with a ``_target_`` (model, dataset, freeze, optim, peft, logger) is checked against the dataclass that it
names: adding one takes its file and its YAML, nothing here.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import CompactHydraException
from hydra.utils import instantiate
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException
from yaml import YAMLError

from pipetransformer.config.arguments import (
    explain,
    explain_key,
    first_line,
    read_arguments,
    unknown_key,
    wrong_value,
)
from pipetransformer.config.names import in_options
from pipetransformer.config.schema import CONF, SECTIONS, Config, SimulationConfig
from pipetransformer.config.targets import check_targets, find_class
from pipetransformer.config.validate import check_modality, validate
from pipetransformer.errors import UserError
from pipetransformer.parent_process import start_time

SPEC_GROUPS = ("model", "dataset", "freeze", "optim", "peft", "logger")
SIMULATION_GROUPS = ("cluster", "shape")
C = TypeVar("C", bound=Config)


def register(schema: type[Config] = Config) -> None:
    """Registers the schema and the time of the start with Hydra under the names that ``conf/config.yaml`` uses."""
    OmegaConf.register_new_resolver("start", lambda form: f"{start_time():{form}}", use_cache=True, replace=True)
    ConfigStore.instance().store(name="schema", node=_schema(_general(schema)))


@cache
def _general(kind: type[Config]) -> type:
    """Returns the schema that Hydra merges options into. Groups hold any value; :func:`_checked` types them."""
    groups = {*SPEC_GROUPS, *SIMULATION_GROUPS}
    members = [
        (each.name, Any, dataclasses.field(default=MISSING)) if each.name in groups else _as_member(each)
        for each in dataclasses.fields(kind)
    ]
    return dataclasses.make_dataclass(kind.__name__, members)


def _as_member(each: dataclasses.Field[Any]) -> tuple[str, Any, Any]:
    if each.default_factory is not dataclasses.MISSING:
        return each.name, each.type, dataclasses.field(default_factory=each.default_factory)
    default = MISSING if each.default is dataclasses.MISSING else each.default
    return each.name, each.type, dataclasses.field(default=default)


@cache
def _schema(spec: type) -> DictConfig:
    """Returns a dataclass as types and names to merge values into, which OmegaConf refuses for frozen ones.

    All callers get the same one: it is merged into copies and not changed.
    """
    schema = OmegaConf.structured(spec)
    OmegaConf.set_readonly(schema, False)
    for key in schema:
        if not OmegaConf.is_missing(schema, key) and isinstance(schema[key], DictConfig):
            OmegaConf.set_readonly(schema[key], False)
    return schema


def compose_training(overrides: Sequence[str] = ()) -> Config:
    """Returns ``conf/config.yaml`` with overrides: the configuration of ``python train.py <overrides>``."""
    return load(_compose("config", overrides, Config))


def compose_simulation(overrides: Sequence[str] = ()) -> SimulationConfig:
    """Returns ``conf/simulate.yaml`` with overrides."""
    return load(_compose("simulate", overrides, SimulationConfig), SimulationConfig)


def _compose(name: str, overrides: Sequence[str], kind: type[Config]) -> DictConfig:
    register(kind)
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose(name, read_arguments(overrides, simulation=kind is SimulationConfig))


def build(node: DictConfig, **runtime: Any) -> Any:
    """Instantiates a checked node; the only caller of Hydra's ``instantiate``."""
    return instantiate(node, _convert_="all", _recursive_=False, **runtime)


def load(node: DictConfig, kind: type[C] = Config, with_data: bool = True) -> C:
    """Checks a composed configuration and turns it into plain values, without importing torch.

    Args:
        kind: :class:`Config` for ``conf/config.yaml``, :class:`SimulationConfig` for ``conf/simulate.yaml``.
        with_data: The data has to be there.

    Raises:
        UserError: A key that does not exist, a value of the wrong type, or values that do not fit together.
    """
    try:
        check_targets(node)
        groups = SPEC_GROUPS + (SIMULATION_GROUPS if issubclass(kind, SimulationConfig) else ())
        given = [group for group in groups if group in node]  # an older run may lack one that has a default
        specs = {group: build(_checked(group, node[group])) for group in given if group in SPEC_GROUPS}
        check_modality(specs["model"], specs["dataset"])  # a text model's shape asks the dataset for its length
        specs |= {group: build(_checked(group, node[group])) for group in given if group not in specs}
        others = {key: value for key, value in node.items() if key not in groups}
        general = cast("DictConfig", OmegaConf.merge(_schema(_general(kind)), others))
        values = {key: general[key] for key in general if key not in groups}
        values |= {key: build_plain(SECTIONS[key], general[key]) for key in SECTIONS if key in values}
        config = kind(**specs, **values)
        validate(config, with_data)
    except OmegaConfBaseException as error:  # some are a ValueError too
        raise UserError(explain_key(error) if error.full_key else first_line(error)) from error
    except ValueError as error:  # one of our own, or of a spec of the user's
        raise UserError(in_options(error)) from None
    except CompactHydraException as error:
        raise UserError(in_options(error.__cause__ or error)) from None
    return config


def read_config(file: Path, overrides: Sequence[str] = (), with_data: bool = True) -> Config:
    """Reads the settings of a run, which :func:`~pipetransformer.config.schema.write_config` wrote.

    Args:
        file: ``config.yaml`` of the run folder.
        overrides: Other values for some of its options, as ``dataset.path=...``.
        with_data: The data of the run has to be there.

    Raises:
        UserError: The file is damaged, or an option does not exist.
    """
    try:
        node = cast("DictConfig", OmegaConf.load(file))
    except (OmegaConfBaseException, YAMLError, ValueError) as error:
        raise UserError(f"{file} cannot be read: {first_line(error)}") from None
    _override(node, overrides)
    return load(node, with_data=with_data)


def _override(node: DictConfig, arguments: Sequence[str]) -> None:
    """Gives options of a run other values, read as those of its own command line."""
    try:
        overrides = OverridesParser.create().parse_overrides(list(arguments))
    except CompactHydraException as error:
        raise UserError(explain(error)) from None
    for each in overrides:
        name = each.key_or_group
        if name in SPEC_GROUPS or name in SECTIONS:
            raise UserError(_whole(name, node))
        if each.is_sweep_override() or each.is_delete():
            raise UserError(f"{each.input_line} gives no single value; write {name}=<value>")
        OmegaConf.update(node, name, each.value(), force_add=True)


def _whole(group: str, node: DictConfig) -> str:
    """Returns one line about a group that was given in place of one of its options."""
    options = [f"{group}.{key}" for key in node.get(group) or () if key != "_target_"]
    return f"a run's {group} cannot be exchanged; " + (f"give {options[0]}=..." if options else "leave it out")


def build_plain(cls: type, node: DictConfig) -> Any:
    return cls(**cast("Mapping[str, Any]", OmegaConf.to_container(node, resolve=True)))


def _checked(group: str, node: DictConfig) -> DictConfig:
    """Merges a group into the dataclass named by its ``_target_``, which types and names every key."""
    if not isinstance(node, DictConfig) or "_target_" not in node:
        raise UserError(
            f"a config file gives {group} as {str(node)!r:.60}, which names no class; choose {group}=<name> on the "
            f"command line, or in its defaults list as '- override /{group}: <name>'"
        )
    spec = find_class(group, node["_target_"])
    schema = _schema(spec)
    values = {key: value for key, value in node.items() if key != "_target_"}
    try:
        checked = OmegaConf.merge(schema, values)
    except ConfigKeyError:
        names = [spec_field.name for spec_field in dataclasses.fields(spec)]
        unknown = next(key for key in values if key not in names)
        raise UserError(unknown_key(f"{group}.{unknown}", names)) from None
    except OmegaConfBaseException as error:
        raise UserError(wrong_value(f"{group}.{error.full_key}", error)) from None
    missing = OmegaConf.missing_keys(checked)
    if missing:
        keys = ", ".join(f"{group}.{key}" for key in sorted(missing))
        raise UserError(f"give a value to {keys}")
    return OmegaConf.create({"_target_": node["_target_"], **cast("dict[str, Any]", OmegaConf.to_container(checked))})
