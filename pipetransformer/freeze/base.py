"""The interface of a freeze policy: signals in, a decision out."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from numbers import Integral
from typing import Any, Self

from pipetransformer.decorated import check_decorated
from pipetransformer.errors import UserError
from pipetransformer.kinds import check_kinds, kinds_of

ON_UNFREEZE = ("keep", "reset")


@dataclass(frozen=True)
class Signals:
    """Measurements between two decisions, equal on every rank.

    Attributes:
        decision: Decisions before this one.
        num_blocks: Blocks of the model, ``L``.
        num_frozen: Blocks frozen so far, ``n(T-1)``.
        measured: Each signal that the policy asks for by name, and always ``gradient_norm``. All but ``step_share``
            have one number per block, shape (L,), that of a frozen block being 0. The collectors in ``runtime/signals``
            say what each is.
        progress: Fraction of the run's optimizer steps that are done.
        rate: Learning rate of the next step.
    """

    decision: int
    num_blocks: int
    num_frozen: int
    measured: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    progress: float = 0.0
    rate: float = 1.0

    def __getitem__(self, name: str) -> tuple[float, ...]:
        """Returns a signal that the policy asks for.

        Raises:
            UserError: It does not ask for that one.
        """
        if name not in self.measured:
            raise UserError(
                f"the policy reads the signal {name!r} and does not ask for it; there are {', '.join(self.measured)}; "
                "let its property signals return the name of each one that it reads"
            )
        return self.measured[name]

    def check_finite(self, name: str) -> None:
        """Raises an error where an active block's signal is no finite number.

        Raises:
            UserError: With the block and its number.
        """
        for block in range(self.num_frozen, self.num_blocks):
            if not isfinite(self[name][block]):
                raise UserError(
                    f"the {name.replace('_', ' ')} of block {block + 1} is {self[name][block]} at freeze decision "
                    f"{self.decision}: training has diverged; lower the learning rate (optim.lr=)"
                )


@dataclass(frozen=True)
class Decision:
    """The frozen prefix from now on, with the reason.

    Attributes:
        num_frozen: The new frozen prefix, ``n(T)``.
        bound: The term of the rule that decided, one word for the log.
        reason: One sentence with the numbers.
        terms: Every term of the rule by name.
    """

    num_frozen: int
    bound: str
    reason: str
    terms: dict[str, float] = field(default_factory=dict)


State = dict[str, Any]
"""Memory of a policy: plain values that JSON can hold without loss."""


@dataclass(frozen=True, kw_only=True)
class FreezePolicy(ABC):
    """A rule that turns signals into a frozen prefix. Pure: state goes in and comes out.

    Attributes:
        interval: Fraction of the run's optimizer steps between two decisions; ``None`` decides once per epoch.
        guard: Largest fall of the main metric after a freeze; a larger one is answered as ``guard.freeze`` says.
            ``None`` accepts any fall.
        on_unfreeze: Optimizer state of a block that trains again: ``keep`` gives it the one that it froze with, which
            waits in host memory; ``reset`` starts anew.
        target_fraction: Mean frozen fraction of the blocks over the run, to which the decisions are scaled.
        target_seconds: Predicted seconds of training, to which they are scaled instead.
    """

    interval: float | None = None
    guard: float | None = None
    on_unfreeze: str = "keep"
    target_fraction: float | None = None
    target_seconds: float | None = None

    def __new__(cls, *_: Any, **__: Any) -> Self:
        check_decorated(cls)  # before an option that is no field is an unexpected argument
        return super().__new__(cls)

    def __post_init__(self) -> None:
        check_kinds(vars(self), kinds_of(type(self)), "freeze.")
        if self.interval is not None and not 0 < self.interval <= 1:
            raise UserError(
                f"freeze.interval={self.interval} is not a fraction of the run; give a number above 0 and at most 1, "
                "or null to decide once per epoch"
            )
        if self.guard is not None and not self.guard >= 0:
            raise UserError(
                f"freeze.guard={self.guard} is below 0; give the largest fall of the main metric that is taken, as "
                "0.01, or null for any"
            )
        if self.on_unfreeze not in ON_UNFREEZE:
            raise UserError(f"freeze.on_unfreeze={self.on_unfreeze} is unknown; choose one of {', '.join(ON_UNFREEZE)}")
        self._check_targets()

    def _check_targets(self) -> None:
        fraction, seconds = self.target_fraction, self.target_seconds
        if fraction is not None and seconds is not None:
            raise UserError(
                f"freeze.target_fraction={fraction} and freeze.target_seconds={seconds} are two targets; give one"
            )
        if fraction is not None and not 0 <= fraction < 1:
            raise UserError(
                f"freeze.target_fraction={fraction} is not a mean frozen fraction; give 0 or more and less than 1"
            )
        if seconds is not None and not seconds > 0:
            raise UserError(f"freeze.target_seconds={seconds} must be above 0: the seconds of training, as predicted")

    @property
    def never_freezes(self) -> bool:
        """True when no signals need to be measured."""
        return False

    @property
    def may_unfreeze(self) -> bool:
        """True when a decision may be smaller than the one before."""
        return False

    @property
    def signals(self) -> tuple[str, ...]:
        """Names of the signals that :meth:`decide` reads; no others are measured."""
        return ()

    @property
    def is_static(self) -> bool:
        """True when nothing is decided after the start, so that the frozen prefix stays."""
        return self.never_freezes

    @property
    def decisions_needed(self) -> int:
        """Decisions after which a block can be frozen by one of them, at the earliest."""
        return 1

    @property
    def frozen_at_start(self) -> int:
        """Blocks that are frozen before the first step."""
        return 0

    @property
    def has_own_rates(self) -> bool:
        """True when blocks have learning rates of their own, see :meth:`rate_factors`."""
        return False

    def rate_factors(self, progress: float, num_blocks: int) -> tuple[float, ...]:
        """Returns the factor of each block's learning rate at a fraction of the run, shape (L,)."""
        return (1.0,) * num_blocks

    def check(self, num_blocks: int) -> None:
        """Raises an error where the policy asks for what a model of so many blocks does not have."""
        name, at_start = type(self).__name__, self.frozen_at_start
        if isinstance(self.signals, str):
            raise UserError(
                f"{name}.signals is the string {self.signals!r}; give a tuple of names: ({self.signals!r},)"
            )
        if not isinstance(self.signals, tuple | list) or not all(isinstance(each, str) for each in self.signals):
            raise UserError(f"{name}.signals is {self.signals!r}; give a tuple of names, or () for none")
        if isinstance(at_start, bool) or not isinstance(at_start, Integral) or at_start < 0:
            raise UserError(f"{name}.frozen_at_start is {at_start!r}; give a whole number of blocks, 0 or more")
        if self.frozen_at_start > num_blocks:
            raise UserError(f"freeze.at_start={self.frozen_at_start} is more than the {num_blocks} blocks of the model")

    def shortfall(self, step_shares: Sequence[float]) -> str | None:
        """Returns why the policy cannot give what it is asked for, which is told at the start; ``None`` where it can.

        Args:
            step_shares: The work of a step with 0 to L blocks frozen over that with none, shape (L + 1,).
        """
        return None

    def initial_state(self) -> State:
        return {}

    @abstractmethod
    def decide(self, signals: Signals, state: State) -> tuple[Decision, State]:
        """Returns the decision and the state for the next one."""
