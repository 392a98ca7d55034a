"""The command, the machine and the library versions that the numbers of a run depend on."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from pipetransformer.errors import UserError
from pipetransformer.report.event_log import read_json, write_json

ENVIRONMENT, OVERRIDES = "env.json", "overrides.json"
PACKAGE = "pipetransformer"
NO_ARM = ("seed", "hydra", "logger", "resume", "overwrite", "verbose", "log_every_s", "log_every_steps", "trace")
"""Options and sections of which runs that are compared as alike may have different values."""


def environment() -> dict[str, Any]:
    """Returns what the numbers of a run depend on besides its settings, for ``env.json``."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "num_cpus": os.cpu_count(),
        "packages": library_versions(),
        "git_commit": _git_commit(),
        "command": [sys.executable, *sys.argv],
    }


@cache  # 50 files of metadata are read, and every checkpoint asks
def library_versions() -> dict[str, str]:
    """Returns the versions of this package and of what it requires and is installed, by their own metadata."""
    try:
        required = metadata.requires(PACKAGE) or []
    except metadata.PackageNotFoundError:  # a checkout that was not installed
        return {}
    names = [PACKAGE, *(re.split(r"[^\w.-]", line)[0] for line in required if "extra ==" not in line)]
    found = {name: version_of(name) for name in names}
    return {name: version for name, version in found.items() if version is not None}


def version_of(name: str) -> str | None:
    """Returns the version of a package; ``None`` where it is not installed, as one that runs from its folder."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:  # a run that does without it, such as one without a logger, goes on
        return None


def _git_commit() -> str | None:
    command = ["git", "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def write_overrides(folder: Path, overrides: Sequence[str]) -> None:
    """Writes the arguments of the command line, which a resumed run is composed of."""
    write_json(folder / OVERRIDES, {"overrides": list(overrides)})


def read_overrides(folder: Path) -> list[str] | None:
    """Returns the arguments of the command line that started a run; ``None`` for one that Python started."""
    path = folder / OVERRIDES
    if not path.is_file():
        return None
    overrides = read_json(path).get("overrides")
    if not (isinstance(overrides, list) and all(isinstance(one, str) for one in overrides)):
        raise UserError(f"{path} is damaged: it is no list of arguments")
    return overrides


def by_option(overrides: Iterable[str]) -> dict[str, str]:
    """Returns the arguments of a command by their options; of those for one option the last, which counts."""
    return {option_of(each): each for each in overrides}


def option_of(override: str) -> str:
    """Returns the option, or the group, of an argument as Hydra writes them, such as ``+experiment=tiny``."""
    return override.partition("=")[0].lstrip("+~")


def section_of(override: str) -> str:
    """Returns the section, or the option of none, of an argument."""
    return option_of(override).partition(".")[0]


def makes_arm(override: str) -> bool:
    """Returns False for an option that changes neither what a run learns nor how fast, and for the seed."""
    return section_of(override) not in NO_ARM
