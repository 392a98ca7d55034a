from pipetransformer.freeze.base import Signals
from pipetransformer.freeze.none import NoFreezing


def test_nothing_freezes_whatever_the_gradients() -> None:
    decision, state = NoFreezing().decide(Signals(5, 3, 0, {"gradient_norm": (0.0, 0.0, 0.0)}), {})
    assert (decision.num_frozen, state) == (0, {})


def test_no_signals_need_to_be_measured() -> None:
    assert NoFreezing().never_freezes
