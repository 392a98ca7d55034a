"""Runs whose stages are on meshes: by one word of the command line, and trained as by one device."""

import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import load_file
from support.cases import tensors_equal
from support.jobs import TINY, Job, loaded, play, run_job
from support.pool import Pool
from support.texts import text_run, write_encoder
from torch import Tensor, nn
from torch.testing import assert_close
from transformers import AutoModelForSequenceClassification

from pipetransformer.autocache.source import SampleSource
from pipetransformer.checkpoint.folder import FOLDER, CheckpointFolder
from pipetransformer.config.no_effect import warnings
from pipetransformer.errors import UserError
from pipetransformer.mesh import SINGLE, StageMesh
from pipetransformer.models.stack import LayerStack
from pipetransformer.models.timm_layers import split_layers
from pipetransformer.optim.base import AdamW
from pipetransformer.training.mesh_setup import choose_meshes

FEW = ("dataset.max_train_samples=32", "dataset.max_eval_samples=16")
RUN = (*TINY, *FEW, "freeze=schedule", "freeze.num_frozen=[1]", "precision=float64", "optim.eps=1e-6")
PRESETS = {
    "megatron": "tp 2",
    "ring": "cp 2",
    "optimus": "tp 2 x dp_shard 2 (2d)",
    "cube": "tp 2 x dp_shard 2 (3d)",
    "tesseract": "tp 2 x dp_shard 2 (2d)",
}


@pytest.fixture(scope="module")
def single(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Job:
    return run_job(pool, 1, tmp_path_factory.mktemp("jobs") / "single", *RUN, "parallel=single", made_up_times=True)


@pytest.mark.thinned("megatron", "ring")
@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_trains_and_saves_as_a_single_device_does(
    preset: str, pool: Pool, tmp_path: Path, single: Job
) -> None:
    num_ranks = loaded(f"parallel={preset}").parallel.cpu_processes
    job = run_job(pool, num_ranks, tmp_path / "run", *RUN, f"parallel={preset}", made_up_times=True)
    assert job.error == ""
    plans = job.summary["plans"]
    assert {plan["mesh"] for plan in plans} == {PRESETS[preset]}
    assert [plan["cache_level"] for plan in plans] == [0, 1]
    assert {plan["num_replicas"] for plan in plans} == ({2} if preset == "tesseract" else {1})
    assert job.losses == pytest.approx(single.losses, rel=0, abs=1e-10)
    assert job.summary["metrics"] == single.summary["metrics"]
    saved, expected = (load_file(run.folder / "model" / "model.safetensors") for run in (job, single))
    tensors_equal(saved, expected)
    told = {run.events("start")[0]["num_parameters"] for run in (job, single)}
    assert told == {sum(each.numel() for each in saved.values())}, "of the whole model, not of a rank's part"
    pictures = torch.rand(3, 1, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert_close(answers_of_timm(job, pictures), answers_of_timm(single, pictures), rtol=0, atol=1e-10)


def test_features_that_a_mesh_stores_are_found_by_the_next_run_on_any_arrangement(pool: Pool, tmp_path: Path) -> None:
    """Their key has the frozen weights in one piece, the same on every rank, also where it has other layers."""
    frozen = (*TINY, "freeze=prefix", "freeze.num_blocks=1", "precision=float64", f"cache.path={tmp_path / 'features'}")
    mesh = "parallel.tp=2", "parallel.num_stages=2"
    first = run_job(pool, 4, tmp_path / "mesh", *frozen, *mesh, made_up_times=True)
    again = run_job(pool, 1, tmp_path / "single", *frozen, "parallel=single", made_up_times=True)
    assert (first.error, again.error) == ("", "")
    fills = [run.events("cache_fill") for run in (first, again)]
    assert [(fill["num_found"], fill["to_level"]) for (fill, *_) in fills] == [(0, 1), (fills[0][0]["num_samples"], 1)]
    assert again.losses == pytest.approx(first.losses, rel=0, abs=1e-10)


def answers_of_timm(run: Job, pictures: Tensor) -> Tensor:
    """Loads the model that a run has saved as its library does, and asks it."""
    model = timm.create_model(f"local-dir:{run.folder / 'model'}", pretrained=True).double().eval()
    with torch.no_grad():
        return model(pictures)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """The options of a run of a BERT on a few texts."""
    folder = tmp_path_factory.mktemp("texts")
    rows = "\n".join(["sentence\tlabel", *(f"{'bird ' * (2 + row % 7)}\t{row % 2}" for row in range(8))])
    for name in ("train.tsv", "dev.tsv"):
        (folder / name).write_text(rows + "\n")
    return (*text_run(write_encoder(folder / "encoder"), "sst2", folder), "precision=float64", "epochs=1")


def answer_of_transformers(job: Job) -> Tensor:
    assert job.error == ""
    model = AutoModelForSequenceClassification.from_pretrained(job.folder / "model", dtype=torch.float64).eval()
    with torch.no_grad():
        return model(torch.tensor([[1, 2, 3, 4, 5]])).logits


@pytest.fixture(scope="module")
def answer_of_one_process(pool: Pool, texts: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Tensor:
    folder = tmp_path_factory.mktemp("single_text") / "run"
    return answer_of_transformers(run_job(pool, 1, folder, *texts, "parallel=single", made_up_times=True))


@pytest.mark.thinned("rows", "2d")
@pytest.mark.parametrize(
    "mesh",
    [
        ("parallel.dp_shard=2",),
        ("parallel.cp=2", "parallel.tp=2"),
        ("parallel.tp=2", "parallel.tp_algorithm=2d"),
        ("parallel.tp=2", "parallel.tp_algorithm=3d"),
    ],
    ids=["rows", "ring and heads", "2d", "3d"],
)
def test_transformers_loads_what_a_mesh_has_trained(
    mesh: tuple[str, ...], pool: Pool, tmp_path: Path, texts: tuple[str, ...], answer_of_one_process: Tensor
) -> None:
    num_ranks = loaded(*mesh).parallel.cpu_processes
    job = run_job(pool, num_ranks, tmp_path / "run", *texts, *mesh, made_up_times=True)
    assert_close(answer_of_transformers(job), answer_of_one_process, rtol=0, atol=1e-10)


@pytest.mark.thorough  # stages on a mesh: test_features_that_a_mesh_stores_...; pipeline: test_arrangements.py
def test_a_mesh_goes_with_stages_and_a_static_arrangement(pool: Pool, tmp_path: Path, single: Job) -> None:
    job = run_job(pool, 4, tmp_path / "run", *RUN, "parallel=pipeline", "parallel.tp=2", made_up_times=True)
    assert {(len(plan["stages"]), plan["mesh"]) for plan in job.summary["plans"]} == {(2, "tp 2")}
    assert job.losses == pytest.approx(single.losses, rel=0, abs=1e-10)


def test_a_run_on_a_mesh_goes_on_without_one(pool: Pool, tmp_path: Path, single: Job) -> None:
    """The planner of the second world knows nothing of the mesh, nor of a second device."""
    run, folder = (*RUN, "checkpoint.every_steps=1", "checkpoint.keep=9"), tmp_path / "run"
    assert run_job(pool, 2, folder, *run, "parallel=megatron", made_up_times=True).error == ""
    kept, *later = CheckpointFolder(folder / FOLDER).published()[1:]
    for each in later:
        shutil.rmtree(each)
    assert pool.run(1, play, (*run, "parallel=single", "resume=auto"), folder, True) == [""]
    job = Job(folder, "")
    assert job.events("resume")[0]["step"] == int(kept.name.removeprefix("step-"))
    assert job.losses == pytest.approx(single.losses, rel=0, abs=1e-10)
    plans = {plan["mesh"]: plan["step_parts"] for plan in job.summary["plans"]}
    assert [*plans] == ["tp 2", ""]
    assert [parts is None for parts in plans.values()] == [True, False]
    assert job.summary["speedup_vs_static"] > 0
    assert sum(job.summary["time_parts"].values()) == pytest.approx(job.summary["train_seconds"])


@pytest.mark.parametrize(("batch_size", "mesh"), [(1, "tp 2"), (16, "")])
def test_a_run_that_leaves_its_mesh_open_takes_the_fastest(
    batch_size: int, mesh: str, pool: Pool, tmp_path: Path
) -> None:
    """A single sample has no second replica to go to; of many each rank computes its own."""
    run = (*RUN, "parallel.tp=null", f"batch_size={batch_size}", "dataset.max_train_samples=16", "epochs=1")
    job = run_job(pool, 2, tmp_path / "run", *run, made_up_times=True)
    assert {plan["mesh"] for plan in job.summary["plans"]} == {mesh}


def test_a_model_that_no_mesh_splits_is_trained_without_one_where_the_choice_is_open(
    pool: Pool, tmp_path: Path
) -> None:
    job = run_job(pool, 2, tmp_path / "run", *RUN, "parallel.tp=null", "peft=lora", made_up_times=True)
    assert {plan["mesh"] for plan in job.summary["plans"]} == {""}
    assert any("every stage runs on one device: " in text and "has no rule" in text for text in job.messages)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["parallel.tp=3"], r"parallel\.tp=3 does not divide the model's heads \(2\); possible: 1, 2"),
        (["parallel.tp=2", "parallel.dp_shard=3"], r"parallel\.tp x dp_shard=6 does not divide the model's .* \(16\)"),
        (["parallel.cp=6"], r"parallel\.cp=6 is more than the 5 tokens of the shortest sample; lower parallel\.cp"),
        (["parallel.cp=4"], r"a mesh of cp 4 takes 4 devices, and there are 2; lower parallel\.tp"),
    ],
)
def test_a_mesh_that_a_run_cannot_have_is_refused_before_anything_is_measured(
    overrides: list[str], words: str, pool: Pool, tmp_path: Path
) -> None:
    job = run_job(pool, 2, tmp_path / "run", *RUN, *overrides, made_up_times=True)
    with pytest.raises(UserError, match=words):
        raise UserError(job.error)
    assert "measuring layers and links" not in [phase["message"] for phase in job.events("phase")]


def with_a_prompt(stack: LayerStack) -> None:
    stack[0].module.register_parameter("prompt", nn.Parameter(torch.zeros(1, 1, 16)))


def with_softmax_by_hand(stack: LayerStack) -> None:
    stack[1].module.attn.fused_attn = False  # type: ignore[union-attr]


def with_another_norm(stack: LayerStack) -> None:
    stack[1].module.norm1 = nn.RMSNorm(16)


def with_a_norm_before_the_blocks(stack: LayerStack) -> None:
    stack[0].module.norm_pre = nn.RMSNorm(16)


@pytest.mark.parametrize(
    ("change", "overrides", "words", "left"),
    [
        (with_a_prompt, ["parallel.tp=2"], r"parameters prompt\) has no rule for tensor", None),
        (with_a_prompt, ["parallel.tp=null"], r"every stage runs on one device: .*parameters prompt", [SINGLE]),
        (with_softmax_by_hand, ["parallel.cp=2"], r"cp=2 splits the tokens, and blocks\.0\.attn computes", None),
        (
            with_softmax_by_hand,
            ["parallel.cp=null", "parallel.tp=null"],
            r"no stage runs on cp 2, nor on larger meshes of its kind: .*cp=2 splits the tokens",
            [SINGLE, StageMesh(tp=2)],
        ),
        (with_another_norm, ["parallel.tp=2", "parallel.tp_algorithm=2d"], "RMSNorm and not an nn.LayerNorm", None),
        (
            with_another_norm,
            ["parallel.tp=null", "parallel.tp_algorithm=2d"],
            r"no stage runs on tp 2 \(2d\), nor .*: norm1 is a RMSNorm",
            [SINGLE],
        ),
        (with_a_norm_before_the_blocks, ["parallel.tp=null"], r"no stage runs on tp 2, nor .*RMSNorm", [SINGLE]),
    ],
)
def test_a_model_that_does_not_run_on_a_mesh_is_refused_or_has_none(
    change: Callable[[LayerStack], None], overrides: list[str], words: str, left: list[StageMesh] | None
) -> None:
    config, source = loaded(*TINY, *overrides), SimpleNamespace(lengths=np.array([2048]))
    sizes = {"patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2, "img_size": 8}
    stack = split_layers(timm.create_model("vit_tiny_patch16_224", **sizes))
    change(stack)
    chosen = partial(choose_meshes, config, stack, AdamW(lr=0.1), [cast(SampleSource, source)], 2, 2)
    if left is None:
        with pytest.raises(UserError, match=words):
            chosen()
        return
    meshes, (note,) = chosen()
    assert list(meshes) == left
    assert re.search(words, note)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["parallel.tp=0"], r"parallel\.tp=0 must be above 0"),
        (["parallel.tp_algorithm=4d"], r"parallel\.tp_algorithm=4d is unknown; choose one of 1d, 2d, 3d"),
        (["parallel.reduce_dtype=half"], r"parallel\.reduce_dtype=half is unknown; choose one of float32, precision"),
        (["parallel.tp_algorithm=3d", "parallel.cp=2"], "3d splits no tokens; drop parallel.cp=2"),
        (["parallel=sharded", "parallel.tp=2"], r"parallel\.tp=2 lets several ranks .* parallel=sharded does not"),
        (["parallel=single", "parallel.cp=2"], r"parallel\.cp=2 lets several ranks .* parallel=single does not"),
        (
            ["parallel=data", "parallel.tp=null"],
            r"parallel=data is one .* parallel\.tp=null leaves it open",
        ),
        (["parallel.tp=4", "parallel.world_size=2"], r"parallel\.tp=4 takes 4 processes, more than .*=2; raise it"),
        (["parallel.tp=2", "compile=true"], r"parallel\.tp=2 does not go with compile=true"),
        (["parallel=megatron", "peft=lora"], r"parallel\.tp=2 does not go with peft=, since no mesh splits"),
    ],
)
def test_a_mesh_that_cannot_be_is_refused_at_once(overrides: list[str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        loaded(*overrides)


def test_settings_that_have_no_effect_on_a_mesh_are_told() -> None:
    (drawn,) = warnings(loaded("parallel.tp=2", "randomness=device"))
    assert drawn.startswith("randomness=device has no effect on a mesh")
    for options in (["parallel.tp_algorithm=2d"], ["parallel.tp_algorithm=2d", "parallel.cp=2"]):
        assert "no effect without parallel.tp=" in " ".join(warnings(loaded(*options)))
    assert not warnings(loaded("parallel.tp_algorithm=2d", "parallel.tp=null"))
    narrow, half = "parallel.reduce_dtype=precision", "precision=bfloat16"
    assert "reduce_dtype=precision has no effect" in " ".join(warnings(loaded(narrow, half)))
    assert "reduce_dtype=precision has no effect" in " ".join(warnings(loaded(narrow, "parallel.tp=4")))
    assert "above 2: the sum of two" in " ".join(warnings(loaded(narrow, "parallel.tp=2", half)))
    for size in ("4", "null"):
        assert "reduce_dtype" not in " ".join(warnings(loaded(narrow, f"parallel.tp={size}", half)))


def test_without_gpus_there_are_as_many_processes_as_the_mesh_takes() -> None:
    numbers = {preset: loaded(f"parallel={preset}").parallel.cpu_processes for preset in PRESETS}
    assert numbers == {"megatron": 2, "ring": 2, "optimus": 4, "cube": 8, "tesseract": 8}
    assert loaded().parallel.cpu_processes == 2
