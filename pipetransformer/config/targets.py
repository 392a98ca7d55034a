"""The classes that a configuration may name: those of this package, and those that ``targets.allow`` names.

A ``_target_`` is imported and called. A YAML file or an override of another origin could thus run anything.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from typing import Any

from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf

from pipetransformer.decorated import check_decorated
from pipetransformer.errors import UserError

TARGET, PACKAGE, HYDRA = "_target_", "pipetransformer", "hydra"


def check_targets(config: DictConfig) -> None:
    """Checks every ``_target_`` before one is imported. Those below ``hydra`` are Hydra's own.

    Raises:
        UserError: One is no class of this package and is not allowed, or stands within a spec.
    """
    plain, allowed = OmegaConf.to_container(config), OmegaConf.select(config, "targets.allow") or []
    assert isinstance(plain, dict)
    for key, target in _targets({name: value for name, value in plain.items() if name != HYDRA}):
        if key.count(".") != 1:
            raise UserError(f"{key}={target} is not run: only a group has a class, as in model.{TARGET}; leave it out")
        if not any(_is_within(target, name) for name in (PACKAGE, *allowed)):
            raise UserError(
                f"{key}={target} is not run: it is no class of {PACKAGE}; if you trust it, give "
                f"targets.allow=[{target}]"
            )


def _targets(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the full key of each ``_target_`` with its value."""
    if not isinstance(value, dict | list):
        return
    for name, each in value.items() if isinstance(value, dict) else enumerate(value):
        own = f"{key}.{name}" if key else str(name)
        if name == TARGET:
            yield own, each
        yield from _targets(each, own)


def _is_within(target: Any, name: str) -> bool:
    """Returns whether a full name is ``name`` or something in it."""
    return isinstance(target, str) and f"{target}.".startswith(f"{name}.")


def find_class(group: str, target: str) -> type:
    """Imports the dataclass that a checked ``_target_`` names.

    Raises:
        UserError: The name leads to nothing, or to something that is imported from elsewhere.
    """
    try:
        with _quiet_hydra():
            found = get_class(target)
    except Exception as error:  # Hydra's, or whatever the module raises
        raise UserError(f"{group}.{TARGET}={target} cannot be imported: {_reason(error, target)}") from error
    if not is_dataclass(found) or _is_within(target, PACKAGE) != _is_within(found.__module__, PACKAGE):
        raise UserError(f"{group}.{TARGET}={target} is no dataclass of that place; name a spec's class")
    check_decorated(found)
    return found


@contextmanager
def _quiet_hydra() -> Iterator[None]:
    """Keeps Hydra from logging an error that is raised, too."""
    log = logging.getLogger(get_class.__module__)
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _reason(error: Exception, target: str) -> str:
    """Returns in one line why a class cannot be imported, with the remedy where it shows."""
    cause = error.__cause__ or error  # Hydra's error has the reason in its second line
    line = str(cause).strip().partition("\n")[0]
    if not isinstance(cause, ModuleNotFoundError):
        return line if cause is error else f"{type(cause).__name__}: {line}"
    if cause.name == target.partition(".")[0]:
        return f"{line}; put its folder on PYTHONPATH"
    if _is_within(target, str(cause.name)):
        module, _, name = str(cause.name).rpartition(".")
        return f"{module} has no {name}; name a class of it"
    return f"{line}, which it imports; install it, or put its folder on PYTHONPATH"
