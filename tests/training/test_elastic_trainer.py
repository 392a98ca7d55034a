"""A user's own model, data and loop train as by a plain loop, on any number of ranks."""

import operator
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import load_file
from support.by_bytes import PoolByBytes
from support.cases import tensors_equal
from support.jobs import TINY
from support.new_policy import TooMany
from support.own import (
    EPOCHS,
    VOCABULARY,
    WIDTH,
    FirstToken,
    Texts,
    Tokens,
    begin_where_a_run_was,
    best_and_last,
    close_on_a_full_disk,
    keeps_checkpoints_without_a_folder,
    logged_steps,
    model_and_data,
    refusals_of_states,
    refused,
    resume_by_the_configuration,
    resume_to_one_epoch_of_two,
    resume_with_another_rate,
    save_out_of_place,
    saved_step,
    scored_on_longer_inputs,
    scored_without_a_mask,
    steps_on_disk,
    train_and_go_elsewhere,
    train_from_a_state,
    train_own,
    train_plainly,
    train_twice,
    train_with_a_block_of_no_parameters,
    warnings_of,
    with_batch_norm,
)
from support.pool import Pool
from transformers import AutoModelForSequenceClassification

import pipetransformer as pt
from pipetransformer.data.base import Data
from pipetransformer.training.build import _check_names

ARRANGEMENTS = {
    "one process": (1, pt.Parallel()),
    "two replicas": (2, pt.Parallel(arrangement="data")),
    "two stages": (2, pt.Parallel(num_stages=2, num_microbatches=2)),
    "elastic": (2, pt.Parallel()),
    "fsdp": (2, pt.Parallel(arrangement="sharded")),
}


@pytest.fixture(scope="module")
def pool(pool: Pool) -> PoolByBytes:
    """Only where a test takes ``pool.measuring`` a run measures what it plans by, which takes longer than the rest."""
    return PoolByBytes(pool)


@pytest.fixture(scope="module")
def whole(pool: Pool) -> list[float]:
    """Losses of the encoder in one process."""
    return pool.run(1, train_from_a_state, "encoder", pt.Parallel(), 12, None)[0][0]


@pytest.mark.thinned("elastic", "fsdp")
@pytest.mark.parametrize(("world", "parallel"), ARRANGEMENTS.values(), ids=ARRANGEMENTS)
def test_an_own_model_trains_as_by_a_plain_loop(
    pool: PoolByBytes, tmp_path: Path, world: int, parallel: pt.Parallel
) -> None:
    losses, weights = train_plainly()
    for rank, seen in enumerate(pool.measuring.run(world, train_own, "sequential", tmp_path, parallel)):
        assert seen["losses"] == pytest.approx(losses, rel=0, abs=1e-10)
        assert seen["step"] == len(losses)
        assert seen["saved"].keys() == (weights.keys() if rank == 0 else set())
        for name, tensor in seen["model"].items():  # every rank's model has the trained weights
            torch.testing.assert_close(tensor, weights[name].float(), rtol=0, atol=1e-6)


@pytest.mark.thinned("two stages")
@pytest.mark.parametrize("name", ["one process", "two stages", "fsdp"])
def test_a_layer_stack_has_its_trained_weights_on_every_rank_and_trains_again(pool: Pool, name: str) -> None:
    ((losses, outputs),) = pool.run(1, train_twice, "sequential", pt.Parallel())
    world, parallel = ARRANGEMENTS[name]
    for own_losses, own_outputs in pool.run(world, train_twice, "stack", parallel):
        assert own_losses == pytest.approx(losses, rel=0, abs=1e-6)  # the model has float32 weights in between
        torch.testing.assert_close(own_outputs, outputs, rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft asks for it
def test_adapters_are_merged_into_an_own_model_by_every_rank(pool: Pool, tmp_path: Path) -> None:
    options = {"peft": pt.Lora(r=2)}
    before = {name: tensor.clone() for name, tensor in model_and_data("transformers")[0].state_dict().items()}
    (alone,) = pool.run(1, train_own, "transformers", tmp_path / "one", pt.Parallel(), options)
    for seen in pool.run(2, train_own, "transformers", tmp_path / "two", ARRANGEMENTS["two stages"][1], options):
        assert seen["losses"] == pytest.approx(alone["losses"], rel=0, abs=1e-10)
        assert seen["model"].keys() == before.keys()
        for name, tensor in seen["model"].items():
            torch.testing.assert_close(tensor, alone["model"][name], rtol=0, atol=1e-6)
            has_moved = name.endswith(("query.weight", "value.weight")) or "pooler" in name or "classifier" in name
            assert torch.equal(tensor, before[name]) != has_moved, name
    assert (tmp_path / "two" / "saved" / "adapter_model.safetensors").is_file()


@pytest.mark.thinned("6-fsdp")
@pytest.mark.parametrize(
    ("step", "first", "second"),
    [
        (3, "elastic", "one process"), (6, "fsdp", "two replicas"), (9, "two stages", "elastic"),
    ],
)  # fmt: skip
def test_a_state_goes_on_in_another_world(pool: Pool, step: int, first: str, second: str, whole: list[float]) -> None:
    losses, state = pool.run(
        *ARRANGEMENTS[first][:1], train_from_a_state, "encoder", ARRANGEMENTS[first][1], step, None
    )[0]
    assert state["train"]["num_frozen"] == (step - 1) // 4
    world, parallel = ARRANGEMENTS[second]
    for more, end in pool.run(world, train_from_a_state, "encoder", parallel, 12, state):
        assert losses + more == pytest.approx(whole, rel=0, abs=1e-10)
        assert end["train"]["step"] == 12


@pytest.mark.thinned("elastic")
@pytest.mark.parametrize("name", ["elastic", "fsdp"])
def test_a_trainer_goes_back_to_an_earlier_state(pool: Pool, name: str, whole: list[float]) -> None:
    world, parallel = ARRANGEMENTS[name]
    _, state = pool.run(world, train_from_a_state, "encoder", parallel, 3, None)[0]
    for losses, _ in pool.run(world, train_from_a_state, "encoder", parallel, 7, state, True):
        assert losses == pytest.approx(whole[3:10], rel=0, abs=1e-10)


def test_a_state_of_another_run_is_refused_on_every_rank_in_a_line(pool: Pool) -> None:
    for said in pool.run(2, refusals_of_states):
        assert [re.split(r"; |, \D", line)[0] for line in said] == [
            "the state lacks 0.weight",
            f"the state has 0.weight of shape ({2 * VOCABULARY}, {WIDTH}) where the model's is ({VOCABULARY}, {WIDTH})",
            "the state lacks optimizer",
            "the state has 7 steps per epoch",
        ]


@pytest.mark.parametrize(("goes_back", "expected"), [(False, 4), (True, None)])
def test_what_ranks_asked_for_is_dropped_where_a_trainer_goes_back(
    pool: Pool, tmp_path: Path, goes_back: bool, expected: int | None
) -> None:
    assert pool.run(1, saved_step, tmp_path, goes_back) == [expected]


def test_checkpoints_of_steps_that_were_left_are_removed(pool: Pool, tmp_path: Path) -> None:
    """A run that is resumed would go on from the newest one, and retention would count them."""
    assert pool.run(1, steps_on_disk, tmp_path) == [([4, 6], [2])]


@pytest.mark.parametrize(
    ("is_stopped", "leave_at", "num_steps"), [(False, None, 4), (True, None, 3), (False, 2, 2)],
    ids=["to its end", "stopped", "left"],
)  # fmt: skip
def test_the_last_step_is_in_the_log_where_nothing_is_saved_after_it(
    pool: Pool, tmp_path: Path, is_stopped: bool, leave_at: int | None, num_steps: int
) -> None:
    assert pool.run(1, logged_steps, tmp_path, is_stopped, leave_at) == [([*range(1, num_steps + 1)], num_steps)]


def test_what_has_no_place_or_comes_too_late_is_refused(pool: Pool, tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.touch()
    errors = [
        "give the trainer a run_dir to write checkpoints to",
        f"{file} is a file; give a folder for the model",
        "folder is None; give the path of a folder",
        "the trainer is closed; evaluate inside its with block, or before close()",
        *(
            f"the trainer is closed; {what} inside its with block, or before close()"
            for what in ("save", "state_dict", "load_state_dict", "save_checkpoint", "take steps")
        ),
    ]
    assert pool.run(2, save_out_of_place, file) == [errors] * 2


def test_checkpoints_of_an_earlier_run_are_not_taken_for_those_of_a_new_one(pool: Pool, tmp_path: Path) -> None:
    for errors, has_trace in pool.run(2, begin_where_a_run_was, tmp_path):
        assert len(errors) == 1
        assert "has checkpoints of an earlier run" in errors[0]
        assert "give resume=True to go on with it, or another run_dir" in errors[0]
        assert not has_trace, "it was of a plan of an earlier run"


def test_a_run_is_not_resumed_to_fewer_epochs_than_it_has_trained(pool: Pool, tmp_path: Path) -> None:
    (answer,) = pool.run(1, resume_to_one_epoch_of_two, tmp_path)
    assert re.search(r"^epochs=1 ends before step \d+ in epoch 2, .*; give epochs=2 or more$", answer), answer


def test_a_configuration_names_the_run_that_is_gone_on_with(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(1, resume_by_the_configuration, tmp_path) == [1]


def test_a_run_stays_in_its_folder_where_the_script_goes_to_another_one(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(1, train_and_go_elsewhere, tmp_path) == [["run/metrics.jsonl", "run/summary.json"]]


def test_a_trainer_goes_on_with_another_rate_where_it_is_allowed(pool: Pool, tmp_path: Path) -> None:
    ((_, error),) = pool.run(1, resume_with_another_rate, tmp_path / "refused", [])
    assert "(optim.lr: 0.1 -> 0.05)" in error
    assert pool.run(1, resume_with_another_rate, tmp_path / "allowed", ["optim.lr"]) == [(1, "")]


@pytest.mark.thinned("two stages", "chunks")
@pytest.mark.parametrize(
    ("world", "parallel"),
    [(2, pt.Parallel(num_stages=2, num_microbatches=2)), (3, pt.Parallel(num_stages=3, num_microbatches=3)),
     (1, pt.Parallel(device_chunk_gib=1e-4))],
    ids=["two stages", "three stages", "chunks"],
)  # fmt: skip
def test_a_block_without_parameters_moves_and_is_lent_as_others_are(
    world: int, parallel: pt.Parallel, pool: Pool
) -> None:
    (expected,) = pool.run(1, train_with_a_block_of_no_parameters, pt.Parallel())
    for losses in pool.run(world, train_with_a_block_of_no_parameters, parallel):
        assert losses == pytest.approx(expected, rel=0, abs=1e-10)


def test_a_configuration_without_a_run_folder_keeps_no_checkpoints(pool: Pool) -> None:
    assert pool.run(2, keeps_checkpoints_without_a_folder, TINY) == [False, False]


@pytest.mark.parametrize(("kind", "saves"), [("sequential", False), ("sequential", True), ("alias", False)])
def test_the_best_weights_are_saved_and_given_back_where_that_is_asked_for(
    pool: Pool, tmp_path: Path, kind: str, saves: bool
) -> None:
    ((best, last, saved, given),) = pool.run(1, best_and_last, tmp_path, kind, saves)
    for name, tensor in best.items():
        assert torch.equal(saved[name], tensor)
        torch.testing.assert_close(given[name], tensor, rtol=0, atol=0)
    assert any(not torch.equal(last[name], tensor) for name, tensor in best.items())


def test_a_summary_that_cannot_be_written_leaves_nothing_open(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(1, close_on_a_full_disk, tmp_path) == [("no space", True)]


@pytest.mark.parametrize(
    ("world", "parallel"), [ARRANGEMENTS["two replicas"], ARRANGEMENTS["two stages"], ARRANGEMENTS["fsdp"]]
)
def test_parameters_that_a_model_does_not_use_stay_as_they_are(
    pool: Pool, tmp_path: Path, world: int, parallel: pt.Parallel
) -> None:
    losses, _ = train_plainly()
    seen = pool.run(world, train_own, "idle", tmp_path, parallel)[0]
    assert seen["losses"] == pytest.approx(losses, rel=0, abs=1e-10)
    assert torch.equal(seen["model"]["2.idle.weight"], model_and_data("idle")[0][2].idle.weight)


@pytest.mark.parametrize(
    ("kind", "name", "world", "parallel"),
    [
        ("idle", "2.idle.weight", 1, pt.Parallel(device_chunk_gib=2.5e-6)),
        ("idle transformers", "idle.weight", 2, pt.Parallel(tp=2)),
    ],
    ids=["chunks", "mesh"],
)
def test_a_parameter_that_a_model_does_not_use_does_not_decay(
    kind: str, name: str, world: int, parallel: pt.Parallel, pool: Pool, tmp_path: Path
) -> None:
    """It has no gradient, which is another thing than one of zeros."""
    options = {"optimizer": pt.AdamW(lr=1e-2, schedule="constant", weight_decay=0.5, eps=1e-6)}
    seen, plain = (
        pool.run(size, train_own, kind, tmp_path / str(number), each, options)[0]["model"]
        for number, (size, each) in enumerate([(world, parallel), (1, pt.Parallel())])
    )
    assert torch.equal(seen[name], dict(model_and_data(kind)[0].named_parameters())[name])
    tensors_equal(seen, plain, tolerance=0 if world == 1 else 1e-6)


def test_without_its_optimizer_state_a_run_goes_another_way(pool: Pool, whole: list[float]) -> None:
    _, state = pool.run(1, train_from_a_state, "encoder", pt.Parallel(), 6, None)[0]
    losses, _ = pool.run(1, train_from_a_state, "encoder", pt.Parallel(), 12, state | {"optimizer": {}})[0]
    assert losses != pytest.approx(whole[6:], rel=0, abs=1e-10)


@pytest.mark.thinned("two stages")
@pytest.mark.parametrize("name", ["two replicas", "two stages"])
def test_dropout_in_torchs_own_blocks_is_the_same_at_every_topology(pool: Pool, tmp_path: Path, name: str) -> None:
    world, parallel = ARRANGEMENTS[name]
    expected = pool.run(1, train_own, "encoder", tmp_path / "one", pt.Parallel())[0]["losses"]
    found = pool.run(world, train_own, "encoder", tmp_path / "more", parallel)[0]["losses"]
    assert found == pytest.approx(expected, rel=0, abs=1e-10)


@pytest.mark.thinned("timm", "decoder")
@pytest.mark.parametrize("kind", ["timm", "transformers", "decoder"])
def test_a_library_loads_what_was_saved_of_its_model(pool: Pool, tmp_path: Path, kind: str) -> None:
    seen: dict[str, Any] = pool.run(2, train_own, kind, tmp_path, pt.Parallel())[0]
    if kind == "timm":
        loaded = timm.create_model(f"local-dir:{tmp_path / 'saved'}", pretrained=True)
    else:
        loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved")
    before = model_and_data(kind)[0].state_dict()
    assert any(not torch.equal(seen["model"][name], tensor) for name, tensor in before.items())
    for name, tensor in loaded.state_dict().items():
        torch.testing.assert_close(tensor, seen["model"][name], rtol=0, atol=1e-7)
    assert set(seen["metrics"]) == {"accuracy", "loss"}


@pytest.mark.thinned(1)
@pytest.mark.parametrize("kind", ["dataset", "dataset of tensors"])
def test_a_dataset_of_the_datasets_library_trains_as_its_rows_do(pool: Pool, tmp_path: Path, kind: str) -> None:
    expected = pool.run(1, train_own, "transformers", tmp_path / "rows", pt.Parallel())[0]
    found = pool.run(2, train_own, kind, tmp_path / "dataset", pt.Parallel(arrangement="data"))[0]
    assert found["losses"] == pytest.approx(expected["losses"], rel=0, abs=1e-10)
    assert found["metrics"] == pytest.approx(expected["metrics"], rel=0, abs=1e-10)


def test_a_decoder_finds_the_last_token_of_a_text_without_a_mask_as_it_does_itself(pool: Pool) -> None:
    found, expected = pool.run(1, scored_without_a_mask)[0]
    assert found == pytest.approx(expected, rel=1e-5)


def test_an_own_model_is_scored_on_inputs_of_another_shape_where_it_takes_them(pool: Pool) -> None:
    assert pool.run(2, scored_on_longer_inputs) == [{"loss"}, {"loss"}]


def test_a_head_that_freezes_with_the_embedding_is_told_once(pool: Pool, tmp_path: Path) -> None:
    (warning,) = pool.run(1, warnings_of, "language model", tmp_path / "tied")[0]
    assert warning.startswith(
        "lm_head.weight of layer 4 is transformer.wte.weight of layer 0, and stops training with it here; "
    )
    assert "model.untie=true" in warning
    assert pool.run(1, warnings_of, "decoder", tmp_path / "free") == [[]]


def test_a_hook_that_nobody_would_call_is_refused() -> None:
    with pytest.raises(pt.UserError, match=r"^Counts\.on_step_end is no hook; there are on_step, .*, on_evaluate$"):
        type("Counts", (pt.Callback,), {"on_step_end": lambda self: None})


def test_callbacks_are_called_on_every_rank(pool: Pool, tmp_path: Path) -> None:
    for seen in pool.run(2, train_own, "sequential", tmp_path, pt.Parallel(), {"evaluate": pt.Evaluation()}):
        assert [seen["calls"].count(name) for name in ("step", "decision", "transition")] == [12, 2, 2]
        assert seen["calls"].count("evaluate dev") == EPOCHS + 1


def test_a_run_folder_gets_events_and_summary(pool: Pool, tmp_path: Path) -> None:
    pool.run(1, train_own, "sequential", tmp_path, pt.Parallel(), {"run_dir": tmp_path / "run"})
    assert {path.name for path in (tmp_path / "run").iterdir()} >= {"metrics.jsonl", "summary.json"}
    assert load_file(tmp_path / "saved" / "model.safetensors")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train": []}, "the data set train is empty"),
        ({"train": [1, 2, 3, 4, 5, 6, 7, 8]}, r"sample 0 is a int; a sample is a pair \(input, target\)"),
        ({"batch_size": 29}, "batch_size=29 is larger than the 28 training samples"),
        (
            {"evaluation": {"dev": iter([])}},
            r"^the data set dev is a list_iterator without a length or without indices",
        ),
        (
            {
                "model": torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3))),
                "train": [(torch.zeros(3, 4), 0)] * 8,
                "evaluation": {"dev": [(torch.zeros(3, 5), 0)]},
            },
            r"^samples of .* have shape \(3, 5\) and .* \(3, 4\), and the model .* \(RuntimeError: .*one shape$",
        ),
        (
            {
                "model": model_and_data("transformers")[0],
                "train": [{"input_ids": [1, 2], "inputs_embeds": [0, 0], "labels": 0}] * 8,
            },
            "the data set train has inputs_embeds, which BertForSequenceClassification takes and its layers do not",
        ),
        (
            {"train": Texts()},
            r"^layer 5 \(5, Head\) sees the padding .* texts of train have 2 to 5 tokens; give texts of",
        ),
        (
            {"evaluation": {"dev": Texts()}},
            r"^layer 5 .*, and texts of dev have 2 to 5 tokens; give texts of one length",
        ),
        ({"loss": torch.nn.CrossEntropyLoss()}, r"the loss has shape \(\) for .* samples; .* reduction=\"none\""),
        ({"model": torch.nn.Linear(2, 2)}, "a Linear cannot be trained layer by layer; supported are timm's"),
        ({"model": with_batch_norm()}, r"^1 \(BatchNorm1d\) changes its buffer running_mean"),
        ({"parallel": pt.Parallel(world_size=3)}, "world_size=3, and there are 1 processes"),
        ({"epochs": 0}, "epochs=0 must be above 0"),
        ({"seed": 2**63}, "^seed=9223372036854775808 is more than the largest one, 9223372036854775807$"),
        ({"run_dir": "/proc/run"}, r"^the run folder /proc/run cannot be made \(.*\); give another run_dir$"),
        ({"loss": operator.is_}, "^the loss is a value of type bool; return a tensor with one number per sample$"),
        (
            {"optimizer": torch.optim.SGD([torch.zeros(1)], lr=1e-3)},
            r"^optimizer is of type torch\.optim\.sgd\.SGD; give an optimizer .*, such as pt\.AdamW\(lr=",
        ),
        ({"optimizer": pt.AdamW}, r"^optimizer is the class AdamW; give .* such as pt\.AdamW\("),
        ({"freeze": "pipetransformer"}, r"^freeze is 'pipetransformer' \(str\); give .* pt\.PaperRule\(\), or None"),
        ({"evaluation": Tokens()}, r'^evaluation is of type .*Tokens; give data sets by name, as {"dev": dataset}'),
        ({"metrics": "accuracy"}, r"^metrics is 'accuracy' \(str\); give a function, metrics\(predictions, targets\)"),
        ({"loss": torch.nn.CrossEntropyLoss}, "^loss is the class CrossEntropyLoss; give a function"),
        ({"model": "bert"}, r"^model is 'bert' \(str\); give the model itself"),
        ({"batch_size": True}, r"^batch_size is True \(bool\); give a whole number"),
        ({"epochs": 1.5}, r"^epochs is 1\.5 \(float\); give a whole number"),
        ({"cache": False}, r"^cache is False \(bool\); give Cache\(\.\.\.\), or None"),
        ({"cache": pt.Cache(memory_gib="2")}, r"^cache\.memory_gib is '2' \(str\); give a number$"),
        ({"evaluate": {}}, r"^evaluate is of type dict; give Evaluation\("),
        ({"callbacks": pt.Callback()}, r"^callbacks is of type .*Callback; give a list of them"),
        ({"callbacks": [pt.Callback(), pt.Callback]}, r"^callbacks\[1\] is the class Callback; give an object"),
        (
            {"evaluation": {"dev": Tokens()}, "evaluate": pt.Evaluation(save="best")},
            r"^evaluate\.save=best goes back to a checkpoint, and .* give run_dir, or take evaluate\.save=last$",
        ),
        ({"guard": pt.Guard(not_finite="roll_back")}, r"^guard\.not_finite=roll_back goes .*; give run_dir, or take "),
        (
            {"guard": pt.Guard(exploding="roll_back", max_norm_ratio=2.0)},
            r"^guard\.exploding=roll_back goes .*; give run_dir, or take guard\.exploding=skip$",
        ),
        (
            {"evaluation": {"dev": Tokens()}, "evaluate": pt.Evaluation(), "freeze": pt.PaperRule(guard=0.01)},
            r"^guard\.freeze=roll_back goes .*; give run_dir, or take guard\.freeze=unfreeze$",
        ),
        ({"run_dir": 3}, r"^run_dir is 3 \(int\); give the path of a folder, or None"),
        ({"resume": "run"}, r"^resume is 'run' \(str\); give True or False, and the folder as run_dir"),
        ({"resume_allow": "epochs"}, r"^resume_allow is 'epochs' \(str\); give a list of options"),
        ({"resume_allow": ["epochs"]}, "^resume_allow names what may differ .*; give `resume=True`"),
        (
            {"freeze": TooMany(interval=0.5), "epochs": 2},
            r"^at freeze decision 0 TooMany\.decide returned num_frozen=99",
        ),
        ({"precision": torch.bfloat16}, r"^precision=torch\.bfloat16 is unknown; choose one of float32"),
    ],
)
def test_what_does_not_fit_is_told_in_a_line(pool: Pool, options: dict[str, Any], message: str) -> None:
    (answer,) = pool.run(1, refused, options)
    assert "\n" not in answer
    assert re.search(message, answer), answer


def test_texts_of_different_lengths_are_taken_where_no_layer_sees_padding(pool: Pool) -> None:
    model = torch.nn.Sequential(*model_and_data("sequential")[0][:-1], FirstToken())
    assert pool.run(1, refused, {"model": model, "train": Texts(), "evaluation": {"dev": Texts()}}) == [""]


def test_numbers_of_numpy_are_taken(pool: Pool) -> None:
    numbers = {"batch_size": np.int64(8), "epochs": np.int32(1), "seed": np.uint8(3)}
    assert pool.run(1, refused, numbers) == [""]


def test_inputs_of_numpy_are_taken_in_the_type_of_the_weights(pool: Pool) -> None:
    model = torch.nn.Sequential(*model_and_data("sequential")[0][1:])
    train, dev = ([(np.full((n, WIDTH), index / 8), index % 2) for index in range(8)] for n in (3, 5))
    assert pool.run(1, refused, {"model": model, "train": train, "evaluation": {"dev": dev}}) == [""]


def test_two_splits_of_one_name_are_refused() -> None:
    rows: Any = SimpleNamespace(name="train")
    other: Any = SimpleNamespace(name="dev")
    unused: Any = None
    _check_names(Data(rows, (other,), unused))
    with pytest.raises(pt.UserError, match="two splits are called train; give the one to evaluate another name, as"):
        _check_names(Data(rows, (other, rows), unused))
