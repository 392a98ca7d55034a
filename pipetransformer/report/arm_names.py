"""Names of arms: the options in which runs that are compared differ, however their commands have written them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipetransformer.report.environment import by_option, makes_arm, option_of
from pipetransformer.report.run_folder import Run
from pipetransformer.report.text import flatten

WORLD_SIZE, END = "parallel.world_size", "~"  # an option, and a time after all others


def arm_names(runs: Sequence[Run], given: Sequence[Sequence[str] | None]) -> list[str]:
    """Returns for each run the options in which not all runs are alike, without the seed.

    The number of its processes is one of them, also where torchrun or the machine has decided it. Runs of the same
    settings have one name, that of the first of them, however their commands have written them.

    Args:
        given: The arguments of each run's command; ``None`` for a run that Python started.
    """
    settings = [_settings(run) for run in runs]
    arms = [{*filter(makes_arm, own)} for own in settings]
    told = settings if None in given else [_written(*each) for each in zip(runs, given, strict=True)]
    configs = [_values(run) for run in runs]
    alike = {each for each in set[str]().union(*told) if _is_alike(option_of(each), configs)}
    told = [own - alike for own in told]
    told = [told[arms.index(own)] for own in arms]
    common = set.intersection(*told)
    names = [" ".join(sorted(filter(makes_arm, own - common))) for own in told]
    return [name or ("default" if any(names) else "all alike") for name in names]


def _values(run: Run) -> dict[str, Any]:
    """Returns the values of a run's configuration by their options."""
    return {name.replace("/", "."): value for name, value in flatten(run.config)}


def _is_alike(option: str, configs: Sequence[Mapping[str, Any]]) -> bool:
    """Returns whether an option, a section or a group has the same values in all configurations, and has some.

    The number of processes is none of them: what a configuration has is what was asked for.
    """
    if option == WORLD_SIZE:
        return False
    own = [{name: each[name] for name in each if f"{name}.".startswith(f"{option}.")} for each in configs]
    return bool(own[0]) and all(each == own[0] for each in own)


def _written(run: Run, given: Sequence[str] | None) -> set[str]:
    """Returns the arguments of a run's command, and the number of its processes as it was."""
    options = by_option(given or ())
    known = _num_processes(run)
    own = {text.lstrip("+") for option, text in options.items() if not (known and option == WORLD_SIZE)}
    return own | known


def _num_processes(run: Run) -> set[str]:
    """Returns the number of processes of a run that has started, the last one where it went on with others."""
    return {f"{WORLD_SIZE}={run.world_size(END)}"} if run.has_started else set()


def _settings(run: Run) -> set[str]:
    known = _num_processes(run)
    values = _values(run).items()
    return {f"{name}={value}" for name, value in values if not (known and name == WORLD_SIZE)} | known
