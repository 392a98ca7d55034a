"""A description beside a store, for people: who made it and when, its level, and the named parts of its samples.

No run reads features by it: the fingerprint and the keys decide. A file that is damaged or missing says nothing.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

ABOUT, UNFINISHED_ABOUT = "about.json", "about.json.tmp"
DATASET, MODEL = "dataset", "model.name"  # the parts that tell whether a store can be an older state of another
MAX_SHOWN = 60  # characters of a value in a message


@dataclass(frozen=True, kw_only=True)
class About:
    """A store in words.

    Attributes:
        owner: Run folder of the run that filled it last.
        made: When, in seconds since 1970.
        level: Block whose output it holds.
        key: Key of the level, in hexadecimal digits.
        num_stored: Samples that it held then.
        num_samples: Samples of the split.
        parts: All that the samples depend on, by names that a user knows: files, tokenizer, options, revision. A value
            is the option's, or a digest of the content.
    """

    owner: str
    made: float
    level: int
    key: str
    num_stored: int
    num_samples: int
    parts: Mapping[str, str] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Replaces the file of a store at once, so that a reader sees all of it or the one before."""
        unfinished = folder / UNFINISHED_ABOUT
        unfinished.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")
        unfinished.replace(folder / ABOUT)


def read_about(folder: Path) -> About | None:
    """Reads the file of a store; ``None`` where it is missing or damaged."""
    try:
        found = About(**json.loads((folder / ABOUT).read_text(encoding="utf-8")))
        texts = (found.owner, found.key, *found.parts, *found.parts.values())
        numbers = (found.level, found.num_stored, found.num_samples)
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return None
    is_whole = all(type(one) is str for one in texts) and all(type(one) is int for one in numbers)
    return found if is_whole and isinstance(found.made, int | float) else None


def origin(parts: Mapping[str, str]) -> tuple[str | None, str]:
    """Returns the dataset and the model, of whatever revision."""
    return parts.get(DATASET), parts.get(MODEL, "").partition("@")[0]


def changed_parts(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Names the parts that differ: a file or the tokenizer as edited, an option with both values."""
    return [
        _change(name, before.get(name), now.get(name))
        for name in sorted({*before, *now})
        if before.get(name) != now.get(name)
    ]


def _change(name: str, before: str | None, now: str | None) -> str:
    if name.startswith("file ") or name == "tokenizer":
        label = name.removeprefix("file ") if name != "tokenizer" else "the tokenizer"
        return f"{label} was {'added' if before is None else 'removed' if now is None else 'edited'}"
    return f"{name}={_shown(before)}, here {_shown(now)}"


def _shown(value: str | None) -> str:
    text = "null" if value is None else value
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."
