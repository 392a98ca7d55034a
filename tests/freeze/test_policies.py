"""What every policy promises; a new policy is a YAML file and is found here by itself."""

import json
from pathlib import Path
from typing import cast

import pytest
from hydra.utils import get_class, instantiate
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf

from pipetransformer.config.compose import CONF
from pipetransformer.freeze.base import FreezePolicy, Signals

FILES = sorted((CONF / "freeze").glob("*.yaml"))
NUM_BLOCKS = 6
GIVEN = {"schedule": {"num_frozen": [2, 4]}, "prefix": {"num_blocks": 2}}


@pytest.fixture(params=FILES, ids=lambda file: file.stem)
def file(request: pytest.FixtureRequest) -> Path:
    return request.param


def load(file: Path) -> DictConfig:
    """The options of a policy, with those given that its file leaves to the user."""
    node = OmegaConf.load(file)
    assert isinstance(node, DictConfig)
    return cast("DictConfig", OmegaConf.merge(node, GIVEN.get(file.stem, {})))


def policy_of(file: Path) -> FreezePolicy:
    return instantiate(load(file), _convert_="all")


def test_the_file_names_every_field_of_its_policy_and_no_other(file: Path) -> None:
    node = load(file)
    schema = OmegaConf.structured(get_class(node["_target_"]))
    assert {key for key in node if key != "_target_"} == set(schema)
    OmegaConf.merge(schema, {key: node[key] for key in schema})


def test_every_key_is_explained(file: Path) -> None:
    assert all("#" in line for line in file.read_text().splitlines() if not line.startswith("_target_"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_a_prefix_stays_within_the_model_and_equal_signals_give_equal_decisions(
    path: Path, data: st.DataObject
) -> None:
    policy = policy_of(path)
    num_frozen, state, num_decisions = policy.frozen_at_start, policy.initial_state(), data.draw(st.integers(0, 8))
    for count in range(num_decisions):
        signals = Signals(
            count, NUM_BLOCKS, num_frozen, drawn_signals(policy, data), (count + 1) / 10, data.draw(st.floats(1e-6, 1))
        )
        decision, new_state = policy.decide(signals, state)
        assert (decision, new_state) == policy.decide(signals, json.loads(json.dumps(state)))
        assert (0 if policy.may_unfreeze else num_frozen) <= decision.num_frozen <= NUM_BLOCKS
        assert decision.bound
        assert decision.reason
        num_frozen, state = decision.num_frozen, new_state
    assert not (policy.never_freezes and num_frozen)


def drawn_signals(policy: FreezePolicy, data: st.DataObject) -> dict[str, tuple[float, ...]]:
    """Any numbers for the signals that a policy asks for."""
    numbers = st.lists(st.floats(0, 10), min_size=NUM_BLOCKS, max_size=NUM_BLOCKS).map(tuple)
    drawn = {name: data.draw(numbers) for name in dict.fromkeys((*policy.signals, "gradient_norm"))}
    if "step_share" in drawn:  # of a step with n blocks frozen
        drawn["step_share"] = tuple((NUM_BLOCKS + 1 - n) / (NUM_BLOCKS + 1) for n in range(NUM_BLOCKS + 1))
    return drawn
