"""Trainings by ElasticTrainer in a world that is open, and the same by a plain loop."""

import copy
import json
import logging
import math
import os
from collections.abc import Callable, Sequence
from contextlib import chdir, suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import datasets
import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
)

import pipetransformer as pt
from pipetransformer.autodp.sampler import batch_ids, epoch_order, num_batches
from pipetransformer.checkpoint.manifest import read_manifest
from pipetransformer.errors import Stopped
from pipetransformer.report.event_log import EVENT_LOG, read_events
from pipetransformer.training import interrupt
from pipetransformer.training.best_weights import weights_to_save
from support.jobs import TINY, loaded

WIDTH, NUM_BLOCKS, NUM_CLASSES, VOCABULARY = 8, 4, 3, 20
BATCH_SIZE, EPOCHS, SEED = 8, 3, 1
OPTIMIZER = pt.AdamW(lr=1e-2, schedule="constant", weight_decay=0.0)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.mean(1))  # (B, T, D) -> (B, C)


class FirstToken(Head):
    """A head that sees one token, and so no padding."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[:, :1])


class Tokens(torch.utils.data.Dataset[Any]):
    """Pairs of token ids, all of one length, and a class."""

    def __init__(self, num_samples: int = 28, num_tokens: int = 5) -> None:
        generator = torch.Generator().manual_seed(3)
        self.tokens = torch.randint(VOCABULARY, (num_samples, num_tokens), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.tokens[index], int(self.tokens[index].sum()) % NUM_CLASSES


class Images(Tokens):
    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        label = int(self.tokens[index].sum()) % NUM_CLASSES
        return torch.full((3, 16, 16), label / NUM_CLASSES) + self.tokens[index, 0] / 100, label


class Texts(Tokens):
    """Dictionaries with token ids of several lengths, as a tokenizer gives them."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        length = 2 + index % 4
        ids = self.tokens[index, :length].tolist()
        return {"input_ids": ids, "attention_mask": [1] * length, "labels": int(ids[0]) % NUM_CLASSES}


def sequential() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *(Block() for _ in range(NUM_BLOCKS)), Head())


def with_batch_norm() -> nn.Sequential:
    """A block whose training changes buffers: (B, T, D) as (B, C, L)."""
    embedding, *blocks, head = sequential()
    return nn.Sequential(embedding, nn.BatchNorm1d(5), *blocks, head)


def with_an_alias() -> nn.Sequential:
    """A block that has a parameter under two names, as masked language models of transformers have their bias."""
    model = sequential()
    model[2].same = model[2].linear
    return model


def with_an_idle_layer() -> nn.Sequential:
    """A block with parameters that it does not use, beside those of :func:`sequential`."""
    model = sequential()
    model[2].idle = nn.Linear(2, 2)
    return model


def as_a_stack() -> pt.LayerStack:
    return pt.LayerStack.from_sequential(sequential())


OF_LAYERS = {"sequential": sequential, "alias": with_an_alias, "idle": with_an_idle_layer, "stack": as_a_stack}


def model_and_data(kind: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    if kind in OF_LAYERS:
        return OF_LAYERS[kind](), Tokens()
    if kind == "encoder":  # torch's own blocks, with dropout
        blocks = [nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.3, batch_first=True) for _ in range(NUM_BLOCKS)]
        return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *blocks, Head()), Tokens()
    if kind == "timm":
        options = {"patch_size": 4, "embed_dim": 16, "depth": 3, "num_heads": 2, "img_size": 16}
        return timm.create_model("vit_tiny_patch16_224", num_classes=NUM_CLASSES, **options), Images()
    if kind in ("decoder", "language model"):
        sizes = {"n_embd": 16, "n_layer": 3, "n_head": 2, "n_positions": 8, "bos_token_id": 1, "eos_token_id": 1}
        config = GPT2Config(vocab_size=VOCABULARY, num_labels=NUM_CLASSES, pad_token_id=0, **sizes)
        return (GPT2ForSequenceClassification if kind == "decoder" else GPT2LMHeadModel)(config), Texts()
    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=16,
        num_labels=NUM_CLASSES,
    )  # fmt: skip
    model, texts = BertForSequenceClassification(config), Texts()
    if kind == "idle transformers":
        model.idle = nn.Linear(2, 2)
    if kind.endswith("transformers"):
        return model, texts
    rows = [texts[index] | {"text": "not tokenised", "idx": index} for index in range(len(texts))]
    dataset = datasets.Dataset.from_list(rows)
    dataset.set_format("torch" if kind == "dataset of tensors" else None)
    return model, dataset


def loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, reduction="none")


class Hooks(pt.Callback):
    """Counts its calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def on_step(self, trainer: Any, result: Any) -> None:
        self.calls.append("step")

    def on_decision(self, trainer: Any, signals: Any, decision: Any) -> None:
        self.calls.append("decision")

    def on_transition(self, trainer: Any, before: Any, after: Any) -> None:
        self.calls.append("transition")

    def on_evaluate(self, trainer: Any, split: str, metrics: dict[str, float]) -> None:
        self.calls.append(f"evaluate {split}")


def train_own(kind: str, folder: Path, parallel: pt.Parallel, options: dict[str, Any] | None = None) -> dict[str, Any]:
    """What one rank sees of a training of an own model."""
    model, data = model_and_data(kind)
    hooks = Hooks()
    with pt.ElasticTrainer(
        model, loss=loss, train=data, evaluation={"dev": data}, batch_size=BATCH_SIZE, epochs=EPOCHS, seed=SEED,
        parallel=parallel, precision="float64", callbacks=[hooks],
        freeze=pt.FixedSchedule(num_frozen=[1, 2], interval=1 / 3), **{"optimizer": OPTIMIZER, **(options or {})},
    ) as trainer:  # fmt: skip
        losses = [step.loss for step in trainer]
        metrics = trainer.evaluate()["dev"]
        state = trainer.state_dict()
        trainer.save(folder / "saved")
        plan = trainer.plan
    return {
        "losses": losses,
        "metrics": metrics,
        "calls": hooks.calls,
        "plan": plan,
        "step": state["train"]["step"],
        "saved": {name: tensor.float() for name, tensor in state["model"].items()},
        "model": {name: tensor.clone() for name, tensor in model.state_dict().items()},
    }


def train_twice(kind: str, parallel: pt.Parallel) -> tuple[list[float], Tensor]:
    """Losses of two trainings of one model, one after the other, and its outputs after them."""
    model, data = model_and_data(kind)
    losses = []
    for _ in range(2):
        with pt.ElasticTrainer(
            model, loss=loss, train=data, optimizer=OPTIMIZER, batch_size=BATCH_SIZE, epochs=EPOCHS, parallel=parallel,
            precision="float64", freeze=pt.FixedSchedule(num_frozen=[1, 2], interval=1 / 3),
        ) as trainer:  # fmt: skip
            losses += [step.loss for step in trainer]
    assert all(parameter.requires_grad for parameter in model.parameters())
    return losses, model(data.tokens).detach()


def warnings_of(kind: str, folder: Path) -> list[str]:
    """The warnings of a training in which blocks freeze twice; a language model is told its loss on the first token."""
    model, data = model_and_data(kind)
    with mock.patch.object(logging.getLogger("pipetransformer"), "warning") as told, pt.ElasticTrainer(
        model, loss=lambda output, target: loss(output if output.ndim == 2 else output[:, 0], target), train=data,
        optimizer=OPTIMIZER, batch_size=BATCH_SIZE, epochs=EPOCHS, run_dir=folder,
        freeze=pt.FixedSchedule(num_frozen=[1, 2], interval=1 / 3),
    ) as trainer:  # fmt: skip
        assert len(list(trainer)) == EPOCHS * num_batches(len(data), BATCH_SIZE)
    events = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    found = [event["message"] for event in events if event["event"] == "warning"]
    assert [call.args[0] for call in told.call_args_list] == found
    return found


def train_from_a_state(
    kind: str, parallel: pt.Parallel, at_most: int, before: dict[str, Any] | None, again: bool = False
) -> tuple[list[float], dict[str, Any]]:
    """Trains some steps from a state of another trainer, or anew; with ``again`` twice from where it began.

    Returns:
        The losses, and the state after them.
    """
    model, data = model_and_data(kind)
    losses, given = [], copy.deepcopy(before)
    with pt.ElasticTrainer(
        model, loss=loss, train=data, evaluation={"dev": data}, optimizer=OPTIMIZER, batch_size=BATCH_SIZE,
        epochs=EPOCHS, seed=SEED, parallel=parallel, precision="float64",
        freeze=pt.FixedSchedule(num_frozen=[1, 2], interval=1 / 3),
    ) as trainer:  # fmt: skip
        if before is not None:
            trainer.load_state_dict(before if trainer.rank == 0 else {**before, "model": {}, "optimizer": {}})
        for _ in range(1 + again):
            begun, losses = trainer.state_dict(), []
            for step in trainer:
                losses.append(step.loss)
                if len(losses) == at_most:
                    break
            after = trainer.state_dict()
            if again:
                trainer.load_state_dict(begun)
    if before is not None and given is not None:
        torch.testing.assert_close(before["optimizer"], given["optimizer"], rtol=0, atol=0)  # training left it alone
    return losses, after


def refusals_of_states() -> list[str]:
    """What a trainer says to states without weights, of another width, without a section, and of shorter batches."""
    model, data = model_and_data("sequential")

    def trainer(batch_size: int) -> pt.ElasticTrainer:
        return pt.ElasticTrainer(
            copy.deepcopy(model), loss=loss, train=data, optimizer=OPTIMIZER, batch_size=batch_size, epochs=EPOCHS,
            freeze=pt.NoFreezing(),
        )  # fmt: skip

    said = []
    with trainer(BATCH_SIZE // 2) as other:
        next(iter(other))
        shorter = other.state_dict()
    with trainer(BATCH_SIZE) as one:
        own = one.state_dict()
        weights = own["model"]
        wider = {name: torch.cat([tensor, tensor]) for name, tensor in weights.items()}
        parts = {name: own[name] for name in ("model", "train")}
        for state in (own | {"model": {}}, own | {"model": wider}, parts, shorter):
            try:
                one.load_state_dict(state)
            except pt.UserError as error:
                said.append(str(error))
    return said


def saved_step(folder: Path, goes_back: bool) -> int | None:
    """The step of the checkpoint after four steps, an epoch; or after three, the state before them, and one more."""
    model, data = model_and_data("sequential")
    with pt.ElasticTrainer(
        model, loss=loss, train=data, optimizer=OPTIMIZER, batch_size=BATCH_SIZE, epochs=EPOCHS, run_dir=folder,
        freeze=pt.NoFreezing(),
    ) as trainer:  # fmt: skip
        begun = trainer.state_dict()
        for _ in islice(trainer, 3):
            pass
        if goes_back:
            trainer.load_state_dict(begun)
        next(iter(trainer))
        return trainer.checkpoints.saved_step


def steps_on_disk(folder: Path) -> tuple[list[int], list[int]]:
    """Steps of the checkpoints after six steps, and after two more from the state before them."""
    model, data = model_and_data("sequential")
    with pt.ElasticTrainer(
        model, loss=loss, train=data, optimizer=OPTIMIZER, batch_size=BATCH_SIZE, epochs=EPOCHS, run_dir=folder,
        freeze=pt.NoFreezing(), checkpoint=pt.Checkpointing(every_steps=2, keep=2),
    ) as trainer:  # fmt: skip
        begun, found = trainer.state_dict(), list[list[int]]()
        for num_steps in (6, 2):
            for _ in islice(trainer, num_steps):
                pass
            trainer.checkpoints.wait()
            found.append([int(path.name.rpartition("-")[2]) for path in trainer.checkpoints.folder.published()])
            trainer.load_state_dict(begun)
    before, after = found
    return before, after


def logged_steps(folder: Path, is_stopped: bool, leave_at: int | None = None) -> tuple[list[int], int]:
    """The steps in the log of a run that neither saves nor evaluates, and how many it made.

    Args:
        is_stopped: A signal stops it.
        leave_at: Step after which the loop is left.
    """
    model, data = model_and_data("sequential")
    with suppress(Stopped), mock.patch.object(interrupt, "_requested", None), pt.ElasticTrainer(
        model, loss=loss, train=data, optimizer=OPTIMIZER, batch_size=BATCH_SIZE, epochs=1, run_dir=folder,
        freeze=pt.NoFreezing(), checkpoint=pt.Checkpointing(enabled=False),
    ) as trainer:  # fmt: skip
        for _ in trainer:
            interrupt._requested = interrupt.QUIT if is_stopped else None
            if trainer.state.step == leave_at:
                break
    return [event["step"] for event in read_events(folder / EVENT_LOG, "step")], trainer.state.step


def save_out_of_place(file: Path) -> list[str]:
    """The errors of a checkpoint and a model that have no place, and of a trainer that is closed."""
    model, data = model_and_data("sequential")
    errors = list[str]()

    def told(call: Callable[[], object]) -> None:
        with pytest.raises(pt.UserError) as caught:
            call()
        errors.append(str(caught.value))

    with pt.ElasticTrainer(
        model, loss=loss, train=data, optimizer=OPTIMIZER, batch_size=BATCH_SIZE, epochs=EPOCHS
    ) as trainer:
        told(trainer.save_checkpoint)
        told(lambda: trainer.save(file))
        told(lambda: trainer.save(None))  # type: ignore[arg-type]
    told(trainer.evaluate)
    told(lambda: trainer.save(file.parent / "model"))
    told(trainer.state_dict)
    told(lambda: trainer.load_state_dict({}))
    told(trainer.save_checkpoint)
    told(lambda: next(iter(trainer)))
    return errors


def begin_where_a_run_was(folder: Path) -> tuple[list[str], bool]:
    """The errors of a run in a folder that has only a trace, and of the next one there; whether the trace is gone."""
    model, data = model_and_data("sequential")
    trace, errors = folder / "trace_7.json", list[str]()
    trace.touch()
    for _ in range(2):
        try:
            with pt.ElasticTrainer(
                model, loss=loss, train=data, optimizer=OPTIMIZER, batch_size=BATCH_SIZE, epochs=1, run_dir=folder
            ) as trainer:
                assert len(list(trainer)) > 0
        except pt.UserError as error:
            errors.append(str(error))
    return errors, trace.exists()


def resume_with_another_rate(folder: Path, allow: Sequence[str]) -> tuple[int, str]:
    """The step from which a run goes on with half the rate, or the error of it."""
    model, data = model_and_data("sequential")
    try:
        for lr in (0.1, 0.05):
            with pt.ElasticTrainer(
                model, loss=loss, train=data, optimizer=pt.SGD(lr=lr), batch_size=BATCH_SIZE, epochs=1, run_dir=folder,
                resume=lr < 0.1, resume_allow=allow if lr < 0.1 else (),
            ) as trainer:  # fmt: skip
                first = trainer.state.step
                next(iter(trainer))
                trainer.save_checkpoint()
    except pt.UserError as error:
        return -1, str(error)
    return first, ""


def resume_on_a_list(folder: Path) -> tuple[dict[str, Any], int]:
    """The settings in the checkpoint of a run on lists with a missing value, and the step from which it goes on."""
    rows = [([[0.123, 0.0, float(index)]] * 2, math.nan) for index in range(BATCH_SIZE)]
    for resume in (False, True):
        with pt.ElasticTrainer(
            nn.Sequential(*(nn.Linear(3, 3) for _ in range(3))), loss=lambda output, _: output.mean((1, 2)), train=rows,
            evaluation={"dev": rows}, optimizer=OPTIMIZER, batch_size=BATCH_SIZE, epochs=2, run_dir=folder,
            resume=resume, freeze=pt.NoFreezing(),
        ) as trainer:  # fmt: skip
            first = trainer.state.step
            next(iter(trainer))
            saved = trainer.save_checkpoint()
    return read_manifest(saved).settings, first


def resume_to_one_epoch_of_two(folder: Path) -> str:
    """The error of a run that goes on with the checkpoint of a longer one; another number of epochs is allowed."""
    config = loaded(*TINY, "epochs=2", "parallel=single", "freeze=none")
    with pt.ElasticTrainer.from_config(config, folder) as trainer:
        assert len(list(trainer)) == trainer.timeline.num_steps
    shorter = replace(config, epochs=1, resume=pt.Resume(run="auto", allow=["epochs"]))
    try:
        with pt.ElasticTrainer.from_config(shorter, folder):
            return ""
    except pt.UserError as error:
        return str(error)


def resume_by_the_configuration(folder: Path) -> int:
    """The step from which a trainer goes on whose configuration names the run to be resumed."""
    config = loaded(*TINY, "epochs=2", "parallel=single", "freeze=none")
    with pt.ElasticTrainer.from_config(config, folder) as trainer:
        next(iter(trainer))
        trainer.save_checkpoint()
    with pt.ElasticTrainer.from_config(replace(config, resume=pt.Resume(run=str(folder)))) as trainer:
        return trainer.state.step


def train_and_go_elsewhere(folder: Path) -> list[str]:
    """The files of a run in a relative folder whose script goes to another one."""
    model, data = model_and_data("sequential")
    with chdir(folder), pt.ElasticTrainer(
        model, loss=loss, train=data, optimizer=OPTIMIZER, batch_size=BATCH_SIZE, epochs=1, run_dir="run"
    ) as trainer:  # fmt: skip
        next(iter(trainer))
        (folder / "other").mkdir()
        os.chdir("other")
        trainer.save_checkpoint()
    return sorted(str(path.relative_to(folder)) for path in folder.glob("**/*.json*") if "step-" not in str(path))


def keeps_checkpoints_without_a_folder(overrides: Sequence[str]) -> bool:
    with pt.ElasticTrainer.from_config(loaded(*overrides)) as trainer:
        return trainer.config.checkpoint.enabled


def train_with_a_block_of_no_parameters(parallel: pt.Parallel) -> list[float]:
    """Losses of a model one of whose blocks is an activation, while blocks freeze."""
    torch.manual_seed(0)
    blocks = [nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)]
    model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *blocks, Head())
    with pt.ElasticTrainer(
        model, loss=loss, train=Tokens(), optimizer=OPTIMIZER, batch_size=BATCH_SIZE, epochs=EPOCHS, seed=SEED,
        precision="float64", parallel=parallel, freeze=pt.FixedSchedule(num_frozen=[2, 3], interval=1 / 3),
    ) as trainer:  # fmt: skip
        return [step.loss for step in trainer]


def best_and_last(folder: Path, kind: str = "sequential", saves: bool = False) -> tuple[dict[str, Tensor], ...]:
    """Weights after the first epoch, as good as the second, after the last one, as they are saved, and of the model.

    Args:
        kind: Of the model.
        saves: The loop writes a checkpoint of its own after each epoch.
    """
    (model, data), scores = model_and_data(kind), iter([0.9, 0.9, 0.4])
    steps, best = num_batches(len(data), BATCH_SIZE), dict[str, Tensor]()
    with pt.ElasticTrainer(
        model, loss=loss, train=data, evaluation={"dev": data}, metrics=lambda *_: {"accuracy": next(scores)},
        optimizer=OPTIMIZER, batch_size=BATCH_SIZE, epochs=EPOCHS, run_dir=folder, freeze=pt.NoFreezing(),
        evaluate=pt.Evaluation(save="best"),
    ) as trainer:  # fmt: skip
        for _ in range(EPOCHS):
            assert len(list(islice(trainer, steps))) == steps
            best = best or trainer.state_dict()["model"]
            if saves:
                trainer.save_checkpoint()
        last = trainer.state_dict()["model"]
        state, _ = weights_to_save(trainer)
    assert state is not None
    return best, last, state, {name: tensor.clone() for name, tensor in model.state_dict().items()}


def close_on_a_full_disk(folder: Path) -> tuple[str, bool]:
    """The error of closing, and whether all was closed that was open."""
    model, data = model_and_data("sequential")
    trainer, closed = pt.ElasticTrainer(
        model, loss=loss, train=data, optimizer=OPTIMIZER, batch_size=BATCH_SIZE, epochs=EPOCHS, run_dir=folder
    ), list[bool]()  # fmt: skip
    trainer._closing.callback(closed.append, True)
    with mock.patch("pipetransformer.training.elastic_trainer.write_json", side_effect=OSError("no space")):
        try:
            trainer.close()
        except OSError as error:
            return str(error), closed == [True]
    return "", closed == [True]


def train_plainly() -> tuple[list[float], dict[str, Tensor]]:
    """The losses and weights of the sequential model by a plain loop in float64, with the same blocks frozen."""
    model, data = sequential().double(), Tokens()
    steps = num_batches(len(data), BATCH_SIZE)
    named = dict(model.named_parameters())
    optimizer = OPTIMIZER.build(named.values())
    assert optimizer is not None
    losses = []
    for step in range(EPOCHS * steps):
        epoch, index = divmod(step, steps)
        for name, parameter in named.items():  # embedding and first block freeze first
            parameter.requires_grad_(epoch == 0 or int(name.split(".")[0]) > epoch)
        ids = batch_ids(epoch_order(len(data), epoch, SEED), index, BATCH_SIZE)
        inputs, targets = zip(*(data[int(i)] for i in ids), strict=True)
        value = loss(model(torch.stack(inputs)), torch.tensor(targets)).mean()
        optimizer.zero_grad(set_to_none=True)
        value.backward()
        nn.utils.clip_grad_norm_([p for p in named.values() if p.grad is not None], OPTIMIZER.clip_norm or 0.0)
        optimizer.step()
        losses.append(value.item())
    return losses, model.state_dict()


def refused(options: dict[str, Any]) -> str:
    """The message with which a trainer refuses what it is given, before or in its steps."""
    given: dict[str, Any] = {"loss": loss, "train": Tokens(), "optimizer": OPTIMIZER, "batch_size": 8, "epochs": 1}
    model = options.pop("model", None) or sequential()
    try:
        with pt.ElasticTrainer(model, **given | options) as trainer:
            for _ in trainer:
                pass
    except pt.UserError as error:
        return str(error)
    return ""


def scored_without_a_mask() -> tuple[float, float]:
    """Losses of a decoder that classifies padded texts without a mask: by the trainer, and by the model itself."""
    model, _ = model_and_data("decoder")
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, VOCABULARY, (BATCH_SIZE, 6), generator=generator)
    ids[:, 3] = 0  # no padding where another token follows
    ids = ids.masked_fill(torch.arange(6) >= torch.arange(BATCH_SIZE)[:, None], 0)
    labels = torch.arange(BATCH_SIZE) % NUM_CLASSES
    with torch.no_grad():
        model.eval().get_submodule("score").weight.mul_(100)  # so that it matters which token is read
        expected = float(loss(model(ids).logits, labels).mean())
    texts = torch.utils.data.TensorDataset(ids, labels)
    with pt.ElasticTrainer(
        model, loss=loss, train=texts, evaluation={"dev": texts}, optimizer=OPTIMIZER, batch_size=BATCH_SIZE, epochs=1
    ) as trainer:
        return trainer.evaluate()["dev"]["loss"], expected


def scored_on_longer_inputs() -> set[str]:
    """Metrics of a model of layers that take any number of vectors, trained on three and scored on five."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    train, dev = ([(torch.randn(n, WIDTH), 0.0) for _ in range(BATCH_SIZE)] for n in (3, 5))
    with pt.ElasticTrainer(
        model, loss=lambda output, target: (output.mean((1, 2)) - target).square(), train=train,
        evaluation={"dev": dev}, optimizer=OPTIMIZER, batch_size=BATCH_SIZE, epochs=1,
    ) as trainer:  # fmt: skip
        next(iter(trainer))
        return {*trainer.evaluate()["dev"]}
