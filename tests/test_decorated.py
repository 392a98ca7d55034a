"""A policy of one's own whose options would be lost in silence is refused, in a script and on the command line."""

import copy
import pickle
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from support.jobs import loaded

import pipetransformer as pt
from pipetransformer.config.kinds import check_config
from pipetransformer.freeze.base import Decision, FreezePolicy, Signals, State

PLAIN = """
from pipetransformer.freeze.none import NoFreezing

class Plain(NoFreezing):
    ratio: float = 2.0
"""


class Keeps(FreezePolicy):
    """Has no options of its own."""

    UNITS: ClassVar[tuple[str, ...]] = ()
    _seen: int = 0

    def decide(self, signals: Signals, state: State) -> tuple[Decision, State]:
        return Decision(signals.num_frozen, "own", "a reason"), state


class Undecorated(Keeps):
    ratio: float = 0.5


class OtherDefault(Keeps):
    interval = 0.1


@dataclass(frozen=True, kw_only=True)
class Untyped(Keeps):
    interval = 0.1


@dataclass(frozen=True, kw_only=True)
class OnUndecorated(Undecorated):
    power: float = 2.0


@dataclass(frozen=True, kw_only=True)
class Good(Keeps):
    interval: float | None = 0.1
    ratio: float = 0.5


@pytest.mark.parametrize(
    ("policy", "options", "message"),
    [
        (Undecorated, {}, "Undecorated.ratio is no option, because Undecorated is no dataclass of its own; put @"),
        (Undecorated, {"ratio": 0.3}, "Undecorated.ratio is no option, because Undecorated is no dataclass of its own"),
        (OtherDefault, {}, "OtherDefault.interval is no option, because OtherDefault is no dataclass of its own; put"),
        (OnUndecorated, {}, "Undecorated.ratio is no option, because Undecorated is no dataclass of its own; put @"),
        (Untyped, {}, "Untyped.interval has no type, so that its value is not the default of the option; write inter"),
    ],
)
def test_an_option_that_would_be_lost_is_told_in_a_line(policy: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(pt.UserError, match=f"^{re.escape(message)}"):
        policy(**options)


def test_a_script_is_told_of_any_class_in_its_configuration() -> None:
    class Few(pt.Digits):
        max_train_samples = 8

    config = replace(loaded(), dataset=Few())
    with pytest.raises(pt.UserError, match=r"^Few\.max_train_samples is no option, because Few is no dataclass"):
        check_config(config)


def test_the_command_line_tells_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plain_policy.py").write_text(PLAIN)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        pt.UserError, match=r"^Plain\.ratio is no option, because Plain is no dataclass of its own; put"
    ):
        loaded("freeze._target_=plain_policy.Plain", "targets.allow=[plain_policy]", "+freeze.ratio=3")


def test_options_of_a_dataclass_and_classes_without_any_are_taken() -> None:
    assert Keeps(interval=0.2).interval == 0.2
    policy = replace(Good(), ratio=0.3)
    assert (policy.interval, policy.ratio) == (0.1, 0.3)
    assert copy.deepcopy(policy) == pickle.loads(pickle.dumps(policy)) == policy
