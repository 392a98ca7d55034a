"""Hides keys and tokens in everything that a run writes or prints: one function for all writers."""

import os
import re
from functools import lru_cache
from typing import Any, TypeVar

HIDDEN = "***"
MIN_LENGTH = 8  # characters of a value in the environment that is searched for
_WORDS = r"api_?key|secret|passwo?r?d|credentials?|(?:access|auth|bearer|hf|hub|hugging_?face|wandb)_?token"
_VARIABLE = r"(?-i:[A-Z0-9_]+_(?:KEY|TOKEN|SECRET|PASSWORD))"  # of the environment; pad_token is none
_NAME = rf"(?:\w*_)?(?:{_WORDS})|{_VARIABLE}|(?<![\w-])token"
_NAMED = re.compile(  # name=value or name: value, but not a flag or number such as class_token=false
    rf"(?P<name>\b(?:{_NAME})[\"']?\s*[=:]\s*)(?!(?:true|false|null|none|[\d.]+)\b)"
    r"""(?:"[^"]*"|'[^']*'|[^\s,;&"'}\])]+)""",
    re.IGNORECASE,
)
_WHOLE_NAME = re.compile(rf"(?:{_NAME})\Z", re.IGNORECASE)
_USER_IN_URL = re.compile(r"(?P<name>\b[a-z][a-z0-9+.-]*://)[^/\s@\"']+@", re.IGNORECASE)
_SHAPES = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|wandb_v\d_\w{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|sk-[\w-]{20,})"
)
_IN_ENVIRONMENT = re.compile(r"(?:^|_)(?:API_?KEY|KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)(?:_|$)", re.IGNORECASE)
T = TypeVar("T")


def redact(value: T) -> T:
    """Returns plain values with keys and tokens replaced by :data:`HIDDEN`.

    Hidden are the values of environment variables such as WANDB_API_KEY and HF_TOKEN wherever they occur, values of
    names such as ``api_key``, the user in a URL (``https://user:token@host``), and what has the shape of a token.

    Args:
        value: A text, a number, or containers of these.
    """
    return _redact(value, _known())


def redact_event(values: dict[str, Any]) -> dict[str, Any]:
    """Returns :func:`redact` of values under names of our own, at no cost where all are numbers: once per step."""
    if all(value is None or isinstance(value, int | float) for value in values.values()):
        return values
    return redact(values)


def _redact(value: T, known: tuple[str, ...]) -> T:
    new: object = value
    if isinstance(value, str):
        new = _redact_text(value, known)
    elif isinstance(value, dict):
        new = {_redact(name, known): _redact_named(name, each, known) for name, each in value.items()}
    elif isinstance(value, list | tuple):
        new = type(value)([_redact(each, known) for each in value])
    return new  # type: ignore[return-value]


def _redact_named(name: object, value: object, known: tuple[str, ...]) -> object:
    is_secret = isinstance(value, str) and value and _WHOLE_NAME.match(str(name))
    return HIDDEN if is_secret else _redact(value, known)


@lru_cache(maxsize=4096)  # the same few names stand in the record of every step
def _redact_text(text: str, known: tuple[str, ...]) -> str:
    for secret in known:
        text = text.replace(secret, HIDDEN)
    text = _NAMED.sub(rf"\g<name>{HIDDEN}", text)
    return _SHAPES.sub(HIDDEN, _USER_IN_URL.sub(rf"\g<name>{HIDDEN}@", text))


def _known() -> tuple[str, ...]:
    """Returns the secrets of the environment, longer ones first: one may be part of another."""
    found = {each for name, each in os.environ.items() if _holds_secret(name) and len(each) >= MIN_LENGTH}
    return tuple(sorted(found, key=len, reverse=True))


@lru_cache(maxsize=1024)
def _holds_secret(variable: str) -> bool:
    return _IN_ENVIRONMENT.search(variable) is not None
