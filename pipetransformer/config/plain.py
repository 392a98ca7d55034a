"""A configuration as plain values, for the record: composed again, they give the same run."""

from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any

import yaml

from pipetransformer.config.schema import Cache, Config, Parallel, Targets
from pipetransformer.report.run_folder import CONFIG
from pipetransformer.report.secrets import redact

SECTIONS = (Parallel, Cache, Targets)  # typed by the schema itself


def as_plain(config: Config) -> dict[str, Any]:
    """Returns the configuration as containers of plain values; ``_target_`` names the class of each spec."""
    return {field.name: _plain(getattr(config, field.name)) for field in fields(config)}


def _plain(value: Any) -> Any:
    if not is_dataclass(value) or isinstance(value, type):
        return value
    kind = type(value)
    target = {} if kind in SECTIONS else {"_target_": f"{kind.__module__}.{kind.__qualname__}"}
    return target | _lists(asdict(value))


def _lists(value: Any) -> Any:
    """Returns containers that YAML writes without tags: tuples as lists."""
    if isinstance(value, dict):
        return {name: _lists(each) for name, each in value.items()}
    return [_lists(each) for each in value] if isinstance(value, list | tuple) else value


def write_config(config: Config, folder: Path) -> None:
    """Writes the configuration to the run folder, without keys and tokens."""
    (folder / CONFIG).write_text(yaml.safe_dump(redact(as_plain(config)), sort_keys=False), encoding="utf-8")
