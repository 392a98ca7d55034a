"""One line about what is wrong with a command line, in place of Hydra's own words."""

from collections.abc import Iterator
from difflib import get_close_matches

from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException

from pipetransformer.config.arguments import unknown_option

RENAMED = {"parallel.checkpoint": "parallel.recompute", "parallel.num_chunks": "parallel.stages_per_rank"}
OPEN = ("options",)  # keys below take any name


def explain(error: Exception) -> str:
    """Returns one line about an error of Hydra, of OmegaConf or of our own."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, value = error.missing_cfg_file.partition("/")
        return unknown_option(group, value)
    if isinstance(error, OverrideParseException):
        return _unreadable(str(error.override))
    cause = error.__cause__
    if isinstance(cause, OmegaConfBaseException) and cause.full_key is not None:
        return explain_key(cause)
    text = first_line(error)
    if isinstance(error, ConfigCompositionException) and text.startswith("Ambiguous value for argument '"):
        argument = text.split("'")[1]
        name, _, values = argument.partition("=")
        return f"{argument} gives several values; a list is written {name}=[{values}], and -m starts a run for each"
    return text if isinstance(error, HydraException) else str(error)


def _unreadable(argument: str) -> str:
    name, is_given, value = argument.partition("=")
    if not is_given:
        return f"{argument} has no value; write {argument}=<value>"
    return f"{argument} cannot be read; quote the value, and all of it once more for the shell: '{name}=\"{value}\"'"


def explain_key(error: OmegaConfBaseException) -> str:
    """Returns one line about a key that does not exist, or whose value has another type."""
    key, parent = str(error.full_key), error.parent_node
    if isinstance(error, MissingMandatoryValue):
        return f"give a value to {key}"
    if isinstance(error, ConfigKeyError | ConfigAttributeError) and isinstance(parent, DictConfig):
        if key.split(".")[-2:-1] == [*OPEN]:
            return f"{key} is not set yet; add it as +{key}="
        names = [str(name) for name in parent if name != "_target_"]
        return unknown_key(key, names, list(_elsewhere(key, parent)))
    return f"{key}: {first_line(error)}"


def _elsewhere(key: str, root: DictConfig) -> Iterator[str]:
    """Yields the keys of the sections that end with the same name."""
    for section in root:
        node = None if root._is_missing() else root._get_node(section)
        if isinstance(node, DictConfig) and not node._is_none() and key in node:
            yield f"{section}.{key}"


def unknown_key(key: str, names: list[str], elsewhere: list[str] | None = None) -> str:
    """Returns one line about a full key whose last part is not one of the names at its place."""
    if key in RENAMED:
        return f"{key} is now called {RENAMED[key]}"
    *parents, last = key.split(".")
    near = elsewhere or [".".join([*parents, name]) for name in get_close_matches(last, names, n=1)]
    hint = f"did you mean {' or '.join(near)}?" if near else f"valid options: {', '.join(names)}"
    return f"{key} does not exist; {hint}"


def first_line(error: Exception) -> str:
    """Returns the first line of an error's text; says how a list is written where one was expected."""
    text = str(error).strip().partition("\n")[0]
    return "expected a list such as [1,2]" if "is not a ListConfig" in text else text
