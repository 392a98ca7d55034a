"""Reads the command line before Hydra does: answers what Hydra would answer in its own words, or with a trace."""

from collections.abc import Sequence
from difflib import get_close_matches

from pipetransformer.config.schema import CONF
from pipetransformer.errors import UserError

SIMULATION_ONLY = ("cluster", "pipeline", "shape")
TRUE, FALSE = ("true", "on", "yes"), ("false", "off", "no", "null", "none")
SWITCHES = {  # values that users try for a group, and its option
    "cache": dict.fromkeys(TRUE, "on") | dict.fromkeys(FALSE, "off"),
    "logger": dict.fromkeys(FALSE, "none"),
    "freeze": dict.fromkeys(FALSE, "none"),
    "experiment": {},  # null is an option of its own
}
HYDRA_FLAGS = (
    "--help", "--hydra-help", "--version", "--cfg", "--resolve", "--package", "--run", "--multirun",
    "--shell-completion", "--config-path", "--config-name", "--config-dir", "--experimental-rerun", "--info",
)  # fmt: skip


def choices(group: str) -> list[str]:
    """Returns the options of a group: its files in ``conf/``, those of sub-folders included."""
    folder = CONF / group
    return sorted(str(file.relative_to(folder).with_suffix("")) for file in folder.rglob("*.yaml"))


def groups(simulation: bool = False) -> list[str]:
    """Returns the groups of the command line."""
    names = sorted(folder.name for folder in CONF.iterdir() if folder.is_dir())
    return [name for name in names if simulation or name not in SIMULATION_ONLY]


def read_arguments(arguments: Sequence[str], simulation: bool = False) -> list[str]:
    """Returns the arguments for Hydra, with ``cache=false`` and the like as the options of the group.

    Raises:
        UserError: An argument is not of the form ``name=value``, or a group has no such option.
    """
    for index, argument in enumerate(arguments):
        _check_form(argument, arguments[index + 1 : index + 2])
    return [_option(argument, simulation) for argument in arguments]


def _check_form(argument: str, following: Sequence[str]) -> None:
    name, is_given, value = argument.partition("=")
    if argument.startswith("--"):
        if name not in HYDRA_FLAGS:
            value = value if is_given else " ".join(following)
            raise UserError(f"{argument} is not an option; write {name.lstrip('-')}={value or '<value>'}")
    elif argument.startswith("="):
        raise UserError(f"{argument} stands alone; write name=value without spaces around the =")


def _option(argument: str, simulation: bool) -> str:
    group, is_given, value = argument.partition("=")
    if not is_given or not (CONF / group).is_dir() or "/" in group or not group:
        return argument
    if group in SIMULATION_ONLY and not simulation:
        raise UserError(f"{argument} describes a simulation; give it to pipetransformer-simulate")
    known = SWITCHES.get(group, {})
    if value.lower() in known:
        return f"{group}={known[value.lower()]}"
    if value.lower() in ("null", "true", "false") and group != "experiment":
        raise UserError(unknown_option(group, value))
    return argument


def unknown_option(group: str, value: str) -> str:
    """Returns one line about an option that a group does not have: the nearest one, and all there are."""
    names, last = choices(group), value.lower().rpartition("/")[2]
    by_last = {name.rpartition("/")[2]: name for name in reversed(names)}
    longer = [each for each in by_last if len(last) > 2 and last in each]
    found = get_close_matches(last, longer, n=1, cutoff=0) or get_close_matches(last, by_last, n=1)
    near = [by_last[each] for each in found]
    hint = f"did you mean {group}={near[0]}? " if near else ""
    return f"{group}={value} is unknown; {hint}there are: {', '.join(names)}"
