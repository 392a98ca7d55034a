"""Refuses files of a model that could run code or lead out of its folder. No torch."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from pipetransformer.errors import UserError

AUTO_MAP = "auto_map"  # where transformers finds the code of a model that it does not have
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".tar")
SAFE = ".safetensors"
CONVERT = "python -m pipetransformer.models.to_safetensors"


def check_code(name: str, file: str, settings: Mapping[str, Any], is_trusted: bool) -> None:
    """Raises :class:`UserError` where a settings file asks for code of its own, unless that is trusted."""
    if settings.get(AUTO_MAP) and not is_trusted:
        raise UserError(
            f"model.name={name} is not loaded: its {file} has {AUTO_MAP}, which runs Python code that comes with the "
            "model; choose one that transformers has itself, or read that code and give model.trust_remote_code=true"
        )


def refuse_pickle(name: str, file: str) -> UserError:
    """Returns the error for weights that there are only as a pickle."""
    folder = Path(name) if Path(name).is_dir() else None
    if folder is None:
        place = shlex.quote(PurePosixPath(name.partition("@")[0]).name or "model")
        fetch = f"hf download {shlex.quote(name.partition(':')[2] or name)} --local-dir {place} && "
        then = f", then model.name={place}"
    else:
        place, fetch, then = shlex.quote(str(folder)), "", ""
    return UserError(
        f"model.name={name} is not loaded: its weights are only in {file}, a pickle, which can run code when it is "
        f"read; convert it once by: {fetch}{CONVERT} {place}{then}; or, if you trust it, give model.allow_pickle=true"
    )


def check_index(name: str, file: Path) -> None:
    """Raises :class:`UserError` where an index of weights names anything but safetensors files of its own folder."""
    for shard in sorted({*map(str, json.loads(file.read_text(encoding="utf-8"))["weight_map"].values())}):
        check_inside(name, file.name, shard)
        if not shard.endswith(SAFE):
            raise UserError(f"model.name={name} is not loaded: its {file.name} names {shard}, which is no {SAFE} file")


def check_inside(name: str, file: str, path: str) -> None:
    """Raises :class:`UserError` where a path that a file of the model names leads out of its folder."""
    parts = PurePosixPath(path.replace("\\", "/"))
    if parts.is_absolute() or ".." in parts.parts or "\0" in path:
        raise UserError(
            f"model.name={name} is not loaded: its {file} names {path!r}, which is outside the model's folder; correct "
            "the name or fetch the model again"
        )


def read_settings(file: Path) -> dict[str, Any]:
    """Reads a JSON object; empty where there is none, which the model's library then tells in its own words."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
