"""The options behind the fields that errors of other rooms name."""

from collections.abc import Mapping
from dataclasses import fields

from pipetransformer.config.sections import Cache, Parallel
from pipetransformer.errors import UserError, name_fields


def of_section(section: str, spec: type) -> dict[str, str]:
    """Maps the fields of a section of the configuration to its options."""
    return {field.name: f"{section}.{field.name}" for field in fields(spec)}


OPTIONS = of_section("parallel", Parallel) | of_section("cache", Cache) | {"num_devices": "parallel.world_size"}


def in_options(error: BaseException | str, names: Mapping[str, str] = OPTIONS) -> str:
    """Returns the message of an error with options in place of fields.

    Args:
        error: An error, or its message with fields in backticks; text without them stays as it is.
        names: The option of each field.
    """
    message = error.message if isinstance(error, UserError) else str(error)
    return name_fields(message, names)
