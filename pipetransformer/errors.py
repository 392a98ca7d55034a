"""Errors that the user can fix. Each says the value, the reason and the remedy, in one line.

Rooms that know no options name their own fields, each in backticks: ``"`num_stages`=3 is more than ..."``. The text of
an error drops the backticks; :func:`pipetransformer.config.names.in_options` puts the name of the option there.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

INTERRUPTED = 130  # exit code after Ctrl-C
_FIELD = re.compile(r"`([a-z_]+)`")


class UserError(ValueError):
    """A value, file or resource that the user can change. Shown without a stack trace."""

    def __str__(self) -> str:
        return name_fields(self.message, {})

    @property
    def message(self) -> str:
        """The text with its fields in backticks."""
        return str(self.args[-1]) if self.args else ""


class InfeasiblePlan(UserError):
    """No plan meets the memory budget or what the user fixed."""


class TooLargePlan(InfeasiblePlan):
    """No plan that has all weights on the devices fits their memory."""


class StepRefused(UserError, ArithmeticError):
    """The loss or the gradient of a global batch cannot be used. No weight was changed.

    Attributes:
        result: The :class:`~pipetransformer.runtime.result.StepResult`.
    """

    def __init__(self, message: str, result: Any = None) -> None:
        super().__init__(message)
        self.result = result


class NotFinite(StepRefused):
    """The loss or the gradient is not finite."""


class Exploding(StepRefused):
    """The norm of the gradient is above the limit."""


class Diverged(UserError, ArithmeticError):
    """A loss or a gradient cannot be used. The weights are those of the step before."""


class FreezeHurts(UserError):
    """The main metric fell after a freeze, and the run is to end there."""


class NotSaved(UserError):
    """The trained model could not be written to any disk. The summary of the run has been."""


class DamagedCheckpoint(UserError):
    """A checkpoint, or a file of it, is not what was written."""


class LoopLeft(Exception):
    """A long loop was left before its end, on every rank, because a signal asks for the end of the run."""


class Stopped(KeyboardInterrupt):
    """The run was asked to stop, and did so between two steps.

    Attributes:
        requeue: A scheduler asked, which starts the same command again; otherwise the user did.
        saved_in: The run folder with a checkpoint from which the run can be resumed; ``None`` where there is none.
    """

    def __init__(self, requeue: bool, saved_in: Path | None = None) -> None:
        super().__init__()
        self.requeue, self.saved_in = requeue, saved_in

    @property
    def exit_code(self) -> int:
        """75 asks to be started again (``EX_TEMPFAIL``); 130 is Ctrl-C."""
        return 75 if self.requeue else INTERRUPTED


class RankLost(UserError):
    """Ranks were killed: the machine took them, not an error of the run.

    Attributes:
        num_lost: Ranks that were killed first.
    """

    def __init__(self, message: str, num_lost: int = 0) -> None:
        super().__init__(message)
        self.num_lost = num_lost


class RankHangs(UserError):
    """Ranks did not answer in time, while others waited for them."""


class RankFailed(RuntimeError):
    """A rank ended with an error that is none of :class:`UserError`.

    Attributes:
        line: The error without its trace.
    """

    def __init__(self, message: str, line: str) -> None:
        super().__init__(message)
        self.line = line


class CacheLost(UserError):
    """A store of the cache failed while a rank read features. The run can go on from a checkpoint without the cache."""


class Unwritable(UserError, OSError):
    """The folder of the cache's stores cannot be written."""


class StaleStore(UserError):
    """A store holds, or may hold, other features than those that are asked for."""


class StoreInUse(UserError):
    """Another run has locked the store.

    Attributes:
        holders: Name, use and features of each run that has it.
    """

    def __init__(self, message: str, holders: Sequence[tuple[str, str, str]] = ()) -> None:
        super().__init__(message)
        self.holders = tuple(holders)


class StoreFailed(OSError, UserError):  # in this order, so that OSError takes the errno
    """A store of the cache cannot be made, read or written. Takes an ``errno`` and the message."""

    __str__ = UserError.__str__


class FillFailed(UserError):
    """A level cannot be stored; the level before may be lost."""


class FeatureOverflow(UserError, OverflowError):
    """A feature is too large for the format in which the cache stores it."""


def name_fields(message: str, names: Mapping[str, str]) -> str:
    """Replaces each field in backticks by its name in ``names``, or by the field itself."""
    return _FIELD.sub(lambda field: names.get(field[1], field[1]), message)


def without_number(error: OSError) -> str:
    """Returns the file and the reason of an error of the operating system; a write tells no file."""
    reason = error.strerror or str(error)
    return reason if error.filename is None else f"{error.filename}: {reason}"
