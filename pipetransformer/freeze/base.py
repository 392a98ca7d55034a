"""The interface of a freeze policy: signals in, a decision out."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

from pipetransformer.errors import UserError


@dataclass(frozen=True)
class Signals:
    """Measurements between two decisions, equal on every rank.

    Attributes:
        decision: Decisions before this one.
        num_blocks: Blocks of the model, ``L``.
        num_frozen: Blocks frozen so far, ``n(T-1)``.
        gradient_norms: For each block the norm of its gradient over the global batch, before clipping, averaged over
            the steps since the last decision. Zero for frozen blocks.
    """

    decision: int
    num_blocks: int
    num_frozen: int
    gradient_norms: tuple[float, ...]


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


State = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class FreezePolicy(ABC):
    """A rule that turns signals into a frozen prefix. Pure: state goes in and comes out.

    Attributes:
        interval: Fraction of the run's optimizer steps between two decisions; ``None`` decides once per epoch.
        guard: Largest fall of the main metric after a freeze; a larger one is answered as ``guard.freeze`` says.
            ``None``: any fall is taken.
    """

    interval: float | None = None
    guard: float | None = None

    def __post_init__(self) -> None:
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

    @property
    def never_freezes(self) -> bool:
        """True when no signals need to be measured."""
        return False

    @property
    def frozen_at_start(self) -> int:
        """Blocks that are frozen before the first step."""
        return 0

    def check(self, num_blocks: int) -> None:
        """Raises an error where the policy asks for more blocks than the model has."""
        if self.frozen_at_start > num_blocks:
            raise UserError(f"freeze.at_start={self.frozen_at_start} is more than the {num_blocks} blocks of the model")

    def initial_state(self) -> State:
        return {}

    @abstractmethod
    def decide(self, signals: Signals, state: State) -> tuple[Decision, State]:
        """Returns the decision and the state for the next one."""
