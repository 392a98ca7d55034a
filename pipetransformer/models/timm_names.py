"""Names that timm knows, read from its source: importing timm imports torch."""

from __future__ import annotations

import re
from difflib import get_close_matches
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from pipetransformer.errors import UserError

_VISION_TRANSFORMERS = ("vit_", "deit")


def check_name(name: str) -> None:
    """Raises :class:`UserError` with the nearest names where timm has no architecture ``name`` or ``name.tag``."""
    architecture = name.partition(".")[0]
    if re.search(rf"^def {re.escape(architecture)}\(|^    '{re.escape(architecture)}':", _source(), re.MULTILINE):
        return
    names = [known for known in architectures() if known.startswith(_VISION_TRANSFORMERS)]
    near = get_close_matches(architecture, names, n=3, cutoff=0.6)
    raise UserError(
        f"timm has no model.name={name}; "
        + (f"did you mean {' or '.join(near)}?" if near else "give a name that timm lists, owner/name or a folder")
    )


def architectures() -> list[str]:
    """Returns the functions by which timm makes models."""
    return re.findall(r"^@register_model\s+def (\w+)\(", _source(), re.MULTILINE)


def repository(name: str) -> str | None:
    """Returns where timm's own weights of ``name`` or ``name.tag`` are on the hub, or None where timm does not say."""
    entry = rf"^    '({re.escape(name)}(?:\.\w+)?)\*?': _cfg\((.*?)\),$"
    tagged = re.search(entry, _source(), re.MULTILINE | re.DOTALL)
    return f"timm/{tagged[1]}" if tagged and "hf_hub_id='timm/'" in tagged[2] else None


@cache
def _source() -> str:
    spec = find_spec("timm")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    folder = Path(spec.submodule_search_locations[0]) / "models"
    return "\n".join(file.read_text(encoding="utf-8") for file in sorted(folder.glob("*.py")))
