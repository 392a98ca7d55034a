"""The command line around Hydra: arguments before it reads them, and one line about each mistake.

Hydra would answer in its own words, or with a trace.
"""

import re
from collections.abc import Iterator, Sequence
from difflib import get_close_matches

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, Node
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    InterpolationKeyError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)

from pipetransformer.config.names import OF_OTHER_TOOLS
from pipetransformer.config.schema import CONF
from pipetransformer.errors import UserError

RENAMED = {
    "parallel.checkpoint": "parallel.recompute",
    "parallel.num_chunks": "parallel.stages_per_rank",
    "eval_every_epochs": "evaluate.every_epochs",
}
OPEN = ("options",)  # keys below take any name, which the library checks; Hydra asks for a plus
SIMULATION_ONLY = ("cluster", "pipeline", "shape")
TRUE, FALSE = ("true", "on", "yes"), ("false", "off", "no", "null", "none")
SWITCHES = {  # values that users try for a group, and its option
    "cache": dict.fromkeys(TRUE, "on") | dict.fromkeys(FALSE, "off"),
    "checkpoint": dict.fromkeys(TRUE, "on") | dict.fromkeys(FALSE, "off"),
    "logger": dict.fromkeys(FALSE, "none"),
    "freeze": dict.fromkeys(FALSE, "none"),
}
FLAGS = {"-v": "verbose=true", "--verbose": "verbose=true"}
HYDRA_FLAGS = (
    "--help", "--hydra-help", "--version", "--cfg", "--resolve", "--package", "--run", "--multirun",
    "--shell-completion", "--config-path", "--config-name", "--config-dir", "--experimental-rerun", "--info",
)  # fmt: skip

WRONG_TYPE = re.compile(r"(?:could not be converted to|is not a valid) (Integer|Float|bool)")
TYPES = {"Integer": ("a whole number",), "Float": ("a number",), "bool": ("true", "false")}
"""OmegaConf's words for a value of another type, and what users call the types."""
VALUED = (
    "--cfg", "-c", "--package", "-p", "--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd",
    "--experimental-rerun", "--info",
)  # fmt: skip
"""Flags of Hydra that take the next argument as their value, if it is one."""


def choices(group: str) -> list[str]:
    """Returns the options of a group: its files in ``conf/``, those of sub-folders included."""
    folder = CONF / group
    return sorted(str(file.relative_to(folder).with_suffix("")) for file in folder.rglob("*.yaml"))


def groups(simulation: bool = False) -> list[str]:
    """Returns the groups of the command line."""
    names = sorted(folder.name for folder in CONF.iterdir() if folder.is_dir())
    return [name for name in names if simulation or name not in SIMULATION_ONLY]


def read_arguments(arguments: Sequence[str], simulation: bool = False) -> list[str]:
    """Returns the arguments for Hydra: flags first, then options, ``-v`` and ``cache=false`` as what they stand for.

    Fields of a class of the user's own are added where its file lacks them; their names are checked with the class.

    Raises:
        UserError: An argument is not of the form ``name=value``, or a group has no such option.
    """
    for index, argument in enumerate(arguments):
        _check_form(argument, arguments[index + 1 : index + 2])
    flags, options = list[str](), list[str]()  # after an option and a flag Hydra reads no further option
    for last, argument in zip(["", *arguments], arguments, strict=False):
        is_flag = argument.startswith("-") and argument not in FLAGS
        is_value = last in VALUED and not is_flag and "=" not in argument
        (flags if is_flag or is_value else options).append(argument)
    options = [FLAGS.get(argument) or _option(argument, simulation) for argument in options]
    return [*flags, *with_own_fields(options)]


def with_own_fields(options: Sequence[str], beside: Sequence[str] = ()) -> list[str]:
    """Returns options as Hydra takes them where they are of a group of the user's own.

    Args:
        beside: Others that choose groups, as those of the run that is resumed.
    """
    own = tuple(f"{group}." for group in _own_groups([*beside, *options]))
    return [f"++{each}" if each.startswith(own) else each for each in options]


def _own_groups(options: Sequence[str]) -> set[str]:
    """Returns the groups with a file or class of the user's own, whose file may leave out fields of the class."""
    given = {name: value for name, _, value in (option.partition("=") for option in options)}
    known = groups(simulation=True)
    files = {group for group in known if group in given and given[group] not in choices(group)}
    return files | {group for group in known if f"{group}._target_" in given}


def _check_form(argument: str, following: Sequence[str]) -> None:
    name, is_given, value = argument.partition("=")
    if argument.startswith("--"):
        if name not in HYDRA_FLAGS and argument not in FLAGS:
            value, key = value if is_given else " ".join(following), name.lstrip("-").replace("-", "_")
            told = OF_OTHER_TOOLS.get(key, f"write {name.lstrip('-')}={value or '<value>'}")
            raise UserError(f"{argument} is not an option; {told}")
    elif argument.startswith("="):
        raise UserError(f"{argument} stands alone; write name=value without spaces around the =")


def _option(argument: str, simulation: bool) -> str:
    group, is_given, value = argument.partition("=")
    if group == "resume":  # a section of the schema
        return f"resume.run={value}"
    if is_given and not {*OPEN}.isdisjoint(group.split(".")[1:]) and group[0] not in "+~":
        return f"++{argument}"
    if not is_given or not (CONF / group).is_dir() or "/" in group or not group:
        return argument
    if group in SIMULATION_ONLY and not simulation:
        raise UserError(f"{argument} describes a simulation; give it to pipetransformer-simulate")
    if group == "logger" and value.startswith("["):
        value = "_".join(sorted({name.strip(" '\"") for name in value.strip("[]").split(",")}, reverse=True))
        argument = f"{group}={value}"
    if group == "experiment" and value.lower() == "null":  # as it is by default, which Hydra cannot be told so
        return "~experiment"
    known = SWITCHES.get(group, {})
    if value.lower() in known:
        return f"{group}={known[value.lower()]}"
    if value.lower() in ("null", "true", "false"):
        raise UserError(unknown_option(group, value))
    return argument


def unquoted(value: str) -> str:
    """Returns the text of an argument's value as Hydra reads it; one that its grammar does not allow as it stands."""
    try:
        read = OverridesParser.create().parse_override(f"value={value}").value()
    except HydraException:
        return value
    return read.replace("\\${", "${") if isinstance(read, str) else value


def quoted(text: str) -> str:
    """Returns a text as the value of an argument that Hydra reads as this text; plain words stay as they are."""
    if re.fullmatch(r"[A-Za-z0-9_./-]*", text):
        return text
    literal = text.replace("${", "\\${")
    return "'" + re.sub(r"(\\*)('|$)", lambda found: found[1] * 2 + found[2].replace("'", "\\'"), literal) + "'"


def unknown_option(group: str, value: str) -> str:
    """Returns one line about an option that a group does not have: the nearest one, and all there are."""
    names, last = choices(group), value.lower().rpartition("/")[2]
    by_last = {name.rpartition("/")[2]: name for name in reversed(names)}
    longer = [each for each in by_last if len(last) > 2 and last in each]
    found = get_close_matches(last, longer, n=1, cutoff=0) or get_close_matches(last, by_last, n=1)
    near = [by_last[each] for each in found]
    hint = f"did you mean {group}={near[0]}? " if near else ""
    return f"{group}={value} is unknown; {hint}there are: {', '.join(names)}"


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


def unwritable(error: OSError) -> str:
    """Returns one line about a run folder that Hydra cannot make, or that cannot be written."""
    if error.filename is None:  # of no file: semaphores of processes
        return f"the system refuses what a run needs ({error}); its processes share semaphores, which lie in /dev/shm"
    return f"the run folder cannot be written ({error}); name another one by hydra.run.dir= or hydra.sweep.dir="


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
    if isinstance(error, InterpolationKeyError):
        missing = first_line(error).split("'")[1]
        return f"{key} is that of {missing}, which the chosen options do not have; give a number, as {key}=128"
    if isinstance(error, ConfigKeyError | ConfigAttributeError) and isinstance(parent, DictConfig):
        names = [str(name) for name in parent if name != "_target_"]
        return unknown_key(key, names, list(_elsewhere(key, parent)))
    return wrong_value(key, error)


def wrong_value(name: str, error: OmegaConfBaseException) -> str:
    """Returns one line about an option whose value has another type, with the values that it takes."""
    text = first_line(error)
    if text.endswith("is not Optional"):
        return f"{name}=null is not possible; give a value"
    found = WRONG_TYPE.search(text)
    if found is None:
        return f"{name}: {text}"
    may_be_null = isinstance(error.child_node, Node) and error.child_node._is_optional()
    *others, last = (*TYPES[found[1]], *(["null"] if may_be_null else []))
    wanted = f"{', '.join(others)} or {last}" if others else last
    return f"{name}={error.value} must be {wanted}"


def _elsewhere(key: str, root: DictConfig) -> Iterator[str]:
    """Yields the keys of the sections that end with the same name."""
    for section in root:
        node = None if root._is_missing() else root._get_node(section)
        if isinstance(node, DictConfig) and not node._is_none() and key in node:
            yield f"{section}.{key}"


def unknown_key(key: str, names: Sequence[str], elsewhere: list[str] | None = None) -> str:
    """Returns one line about a full key whose last part is not one of the names at its place."""
    if key in RENAMED:
        return f"{key} is now called {RENAMED[key]}"
    *parents, last = key.split(".")
    if last in OF_OTHER_TOOLS and not elsewhere:
        return f"{key} does not exist; {OF_OTHER_TOOLS[last]}"
    near = elsewhere or [".".join([*parents, name]) for name in get_close_matches(last, names, n=1)]
    if near:
        return f"{key} does not exist; did you mean {' or '.join(near)}?"
    if theirs := get_close_matches(last, OF_OTHER_TOOLS, n=1, cutoff=0.85):
        return f"{key} does not exist; {OF_OTHER_TOOLS[theirs[0]]}"
    having = _options_with(parents[0], last) if len(parents) == 1 else []
    hints = [f"{' or '.join(having)} has it"] if having else []
    hints += [f"valid options: {', '.join(names)}"] if names else []
    return "; ".join([f"{key} does not exist", *hints])


def _options_with(group: str, name: str) -> list[str]:
    """Returns the first options of a group that have a setting of this name, such as ``freeze=schedule``."""
    indent = "  " if group == "dataset" else ""  # a recipe also has settings outside its group
    has_it = re.compile(rf"^{indent}{re.escape(name)}:", re.MULTILINE)
    files = {option: CONF / group / f"{option}.yaml" for option in choices(group)}
    return [f"{group}={option}" for option, file in files.items() if has_it.search(file.read_text())][:2]


def first_line(error: Exception) -> str:
    """Returns the first line of an error's text; says how a list is written where one was expected."""
    text = str(error).strip().partition("\n")[0]
    return "expected a list such as [1,2]" if "is not a ListConfig" in text else text
