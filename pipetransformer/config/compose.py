"""From what Hydra composed to checked plain values. The only module besides the entry points that knows Hydra.

``schema`` comes first in the defaults list, so that Hydra refuses unknown keys and wrong types of the general options.
A group with a ``_target_`` (model, dataset, freeze, optim, logger) is checked against the dataclass that it names:
adding one takes its file and its YAML, nothing here.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar, cast

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import CompactHydraException
from hydra.utils import get_class, instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from pipetransformer.config.checks import check, check_modality
from pipetransformer.config.names import in_options
from pipetransformer.config.options import Arrangement, Cache, Config, Parallel, SimulationConfig
from pipetransformer.errors import UserError

SPEC_GROUPS = ("model", "dataset", "freeze", "optim", "logger")
WHAT_IF_GROUPS = ("cluster", "shape")
SECTIONS = {"parallel": Parallel, "cache": Cache, "pipeline": Arrangement}
C = TypeVar("C", bound=Config)


def register(schema: type[Config] = Config) -> None:
    """Makes the schema known to Hydra under the name that ``conf/config.yaml`` uses."""
    ConfigStore.instance().store(name="schema", node=_schema(schema))


def _schema(spec: type) -> DictConfig:
    """A dataclass as types and names to merge values into; frozen ones would refuse them."""
    schema = OmegaConf.structured(spec)
    OmegaConf.set_readonly(schema, False)
    for key in schema:
        if not OmegaConf.is_missing(schema, key) and isinstance(schema[key], DictConfig):
            OmegaConf.set_readonly(schema[key], False)
    return schema


def compose_what_if(conf: Path, overrides: Sequence[str] = ()) -> SimulationConfig:
    """``conf/simulate.yaml`` with overrides, from Python."""
    register(SimulationConfig)
    with initialize_config_dir(str(conf.resolve()), version_base="1.3"):
        return load(compose("simulate", list(overrides)), SimulationConfig)


def build(node: DictConfig, **runtime: Any) -> Any:
    """Instantiates a checked node; the only caller of Hydra's ``instantiate``."""
    return instantiate(node, _convert_="all", **runtime)


def load(node: DictConfig, kind: type[C] = Config) -> C:
    """Checks a composed configuration and turns it into plain values, without importing torch.

    Args:
        kind: What ``conf/config.yaml`` (or, for a :class:`SimulationConfig`, ``conf/simulate.yaml``) was composed for.

    Raises:
        UserError: A key that does not exist, a value of the wrong type, or values that do not fit together.
    """
    try:
        groups = SPEC_GROUPS + (WHAT_IF_GROUPS if issubclass(kind, SimulationConfig) else ())
        specs = {group: build(_checked(group, node[group])) for group in SPEC_GROUPS}
        check_modality(specs["model"], specs["dataset"])  # a text model's shape asks the dataset for its length
        specs |= {group: build(_checked(group, node[group])) for group in groups if group not in specs}
        others = {key: value for key, value in node.items() if key not in groups}
        general = cast("DictConfig", OmegaConf.merge(_schema(kind), others))
        values = {key: general[key] for key in general if key not in groups}
        values |= {key: build_plain(SECTIONS[key], general[key]) for key in SECTIONS if key in values}
        config = kind(**specs, **values)
        check(config)
    except ValueError as error:  # one of our own, or of a spec of the user's
        raise UserError(in_options(error)) from None
    except OmegaConfBaseException as error:
        raise UserError(str(error).split("\n")[0]) from error
    except CompactHydraException as error:
        raise UserError(in_options(error.__cause__ or error)) from None
    return config


def build_plain(cls: type, node: DictConfig) -> Any:
    return cls(**cast("Mapping[str, Any]", OmegaConf.to_container(node, resolve=True)))


def _checked(group: str, node: DictConfig) -> DictConfig:
    """Merges a group into the dataclass named by its ``_target_``, which types and names every key."""
    spec = get_class(node["_target_"])
    schema = _schema(spec)
    values = {key: value for key, value in node.items() if key != "_target_"}
    try:
        checked = OmegaConf.merge(schema, values)
    except ConfigKeyError:
        names = [spec_field.name for spec_field in dataclasses.fields(spec)]
        unknown = next(key for key in values if key not in names)
        raise UserError(_unknown(f"{group}.{unknown}", names)) from None
    except OmegaConfBaseException as error:
        raise UserError(f"{group}.{error.full_key}: {_first_line(error)}") from None
    missing = OmegaConf.missing_keys(checked)
    if missing:
        raise UserError("give a value to " + ", ".join(f"{group}.{key}" for key in sorted(missing)))
    return OmegaConf.create({"_target_": node["_target_"], **cast("dict[str, Any]", OmegaConf.to_container(checked))})


def _first_line(error: OmegaConfBaseException) -> str:
    text = str(error).splitlines()[0]
    return "it is a list, in brackets, as [1,2]" if "is not a ListConfig" in text else text


def _unknown(key: str, names: list[str]) -> str:
    """What to say of a full key whose last part is not one of the names at its place."""
    *parents, last = key.split(".")
    near = get_close_matches(last, names, n=1)
    hint = f"did you mean {'.'.join([*parents, near[0]])}?" if near else f"there are: {', '.join(names)}"
    return f"{key} does not exist; {hint}"


def explain(error: Exception) -> str:
    """One message for what the user can mend: Hydra's own, but for a key or value that does not fit."""
    cause = error.__cause__
    if not isinstance(cause, OmegaConfBaseException) or cause.full_key is None:
        return str(error)
    if isinstance(cause, ConfigKeyError | ConfigAttributeError) and isinstance(cause.parent_node, DictConfig):
        key, names = str(cause.full_key), [str(name) for name in cause.parent_node if name != "_target_"]
        is_open = key.split(".")[-2:-1] == ["options"]
        return f"{key} is not set yet; add it as +{key}=" if is_open else _unknown(key, names)
    return f"{cause.full_key}: {str(cause).splitlines()[0]}"


def as_plain(node: DictConfig) -> dict[str, Any]:
    """The resolved configuration as plain containers, for the record."""
    return cast("dict[str, Any]", OmegaConf.to_container(node, resolve=True))


def write_resolved(node: DictConfig, folder: Path) -> None:
    """Keeps the resolved configuration in the run folder."""
    (folder / "config.yaml").write_text(OmegaConf.to_yaml(node, resolve=True))
