"""The kinds of values that a script gives for arguments and options, checked before one of them is used.

Without it a value of another kind would end in a trace of whatever uses it first. The command line types its options
itself.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from numbers import Integral, Real
from os import PathLike
from types import NoneType, UnionType
from typing import Any, Self, Union, get_args, get_origin, get_type_hints

from pipetransformer.errors import UserError

SEQUENCES = (list, tuple)
WIDER: dict[Any, tuple[Any, ...]] = {
    int: (Integral,), float: (Real,), str: (str, PathLike), list: SEQUENCES, tuple: SEQUENCES
}  # fmt: skip
"""Substitutes of a type: numbers of numpy, paths, tuples."""
WORDS = {
    int: "a whole number", float: "a number", bool: "True or False", str: "a string", list: "a list", NoneType: "None"
}  # fmt: skip
SHOWN = 60  # characters of a value that is no object


@dataclass(frozen=True)
class Kind:
    """The values that an argument takes.

    Attributes:
        types: Their types. ``bool`` counts as no number, and a class never stands for its instance.
        give: The remedy in words.
    """

    types: tuple[Any, ...]
    give: str

    @classmethod
    def of(cls, annotation: Any) -> Self:
        """Returns the kind of a type, of a list of something, or of several types as in ``int | None``."""
        is_union = isinstance(annotation, UnionType) or get_origin(annotation) is Union
        choices = get_args(annotation) if is_union else (annotation,)
        types = tuple(get_origin(each) or each for each in choices)
        return cls(types, " or ".join(WORDS.get(each, f"{getattr(each, '__name__', each)}(...)") for each in types))

    @property
    def or_none(self) -> "Kind":
        """The same kind, or ``None``."""
        return Kind((*self.types, NoneType), f"{self.give}, or None")

    def holds(self, value: Any) -> bool:
        """Returns whether a value is of this kind."""
        if isinstance(value, bool):
            return bool in self.types
        return not isinstance(value, type) and any(isinstance(value, WIDER.get(each, each)) for each in self.types)


@cache
def kinds_of(spec: type) -> Mapping[str, Kind]:
    """Returns the kinds of the options of a specification, without those that take any value, or a word of a few.

    Types that cannot be told, as ``Literal`` or a name that only the type checker knows, are left out.

    Args:
        spec: A dataclass.
    """
    try:
        hints = get_type_hints(spec)
    except (NameError, TypeError):
        return {}
    found = {each.name: Kind.of(hints[each.name]) for each in fields(spec) if hints[each.name] not in (Any, str)}
    return {name: kind for name, kind in found.items() if all(isinstance(each, type) for each in kind.types)}


def check_kinds(given: Mapping[str, Any], kinds: Mapping[str, Kind], section: str = "") -> None:
    """Refuses a value of another kind than its argument takes.

    Args:
        given: Values by the names of their arguments; one that has no kind may be anything.
        section: Of a configuration, whose name the arguments begin with.

    Raises:
        UserError: With the argument, the value and the remedy.
    """
    for name, kind in kinds.items():
        if name in given and not kind.holds(given[name]):
            raise UserError(f"{section}{name} is {in_words(given[name])}; give {kind.give}")


def in_words(value: Any) -> str:
    """Returns a value that is short as it is written, and of any other its type."""
    kind = type(value)
    if isinstance(value, type):
        return f"the class {value.__qualname__}"
    if value is None:
        return "None"
    if isinstance(value, bool | int | float | str):
        return f"{repr(value)[:SHOWN]} ({kind.__name__})"
    return (
        f"of type {kind.__qualname__}"
        if kind.__module__ == "builtins"
        else f"of type {kind.__module__}.{kind.__qualname__}"
    )
