"""Options of a user's own class are the fields of a dataclass: those that it would lose in silence are refused."""

from dataclasses import fields

from pipetransformer.errors import UserError

_OWN = "__dataclass_params__"  # of a class that has the decorator itself


def check_decorated(spec: type) -> None:
    """Refuses a dataclass with an option that is no field, or whose default is not taken.

    A subclass without a decorator of its own has the fields of its base alone, and an assignment without a type
    changes the class but not the field.

    Args:
        spec: A dataclass, or a subclass of one.

    Raises:
        UserError: With the class, the option and the remedy.
    """
    names = {each.name for each in fields(spec)}
    for each in spec.__mro__:
        if not any(_OWN in vars(base) for base in each.__mro__):  # no dataclass, as object and mixins
            continue
        typed = _typed(each)
        assigned = [name for name in names & vars(each).keys() if not hasattr(vars(each)[name], "__get__")]
        if _OWN not in vars(each) and (lost := [*typed, *assigned]):
            raise UserError(
                f"{each.__name__}.{lost[0]} is no option, because {each.__name__} is no dataclass of its own; put "
                "@dataclass(frozen=True, kw_only=True) above the class, and a type behind each option"
            )
        for name in assigned:
            if name not in typed:
                raise UserError(
                    f"{each.__name__}.{name} has no type, so that its value is not the default of the option; write "
                    f"{name}: <type> = {vars(each)[name]!r}"
                )


def _typed(spec: type) -> list[str]:
    """Returns the public names that a class itself annotates, without those of the class alone."""
    found = vars(spec).get("__annotations__", {})
    return [name for name in found if not name.startswith("_") and "ClassVar" not in str(found[name])]
