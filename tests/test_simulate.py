"""Simulated runs from the command line's options to table and trace."""

import json
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from support.command import TIMEOUT_S
from support.jobs import loaded_simulation

from pipetransformer.autopipe.cost import step_seconds
from pipetransformer.autopipe.plan import Layout
from pipetransformer.autopipe.search.bounds import LowerBounds
from pipetransformer.config.compose import CONF, compose_simulation
from pipetransformer.config.schema import SimulationConfig
from pipetransformer.config.sections import Parallel
from pipetransformer.data.images.datasets import Digits
from pipetransformer.errors import UserError
from pipetransformer.simulate.run import make_planner, run_history, simulate

ROOT = Path(__file__).parents[1]
SMALL = ("epochs=4", "num_samples=6400", "batch_size=64")


def composed(*overrides: str) -> SimulationConfig:
    return loaded_simulation(*SMALL, *overrides)


def options(group: str) -> list[str]:
    return sorted(file.stem for file in (CONF / group).glob("*.yaml"))


@pytest.mark.parametrize("cluster", options("cluster"))
def test_every_cluster_can_be_simulated(cluster: str) -> None:
    result = simulate(composed(f"cluster={cluster}", "cluster.transition_s=0"))
    assert result.speedup_vs_static > 1
    assert 0 < result.share_of_limit <= 1
    assert sum(result.time_parts.values()) == pytest.approx(result.train_seconds)
    assert result.time_parts["unpredicted"] == pytest.approx(0, abs=1e-9 * result.train_seconds)
    assert "goes to                            " in result.summary()


@pytest.mark.thinned("elastic", "pipeline", "sharded", "single", "tesseract")
@pytest.mark.parametrize("arrangement", sorted({*options("parallel")} - {"chunks"}))
def test_every_arrangement_can_be_simulated(arrangement: str) -> None:
    """Only how fast host memory is, no cluster says."""
    result = simulate(composed(f"parallel={arrangement}", "freeze=none", "cluster.num_nodes=1"))
    if arrangement == "single":
        assert [(plan.num_stages, plan.num_replicas) for plan in result.rows] == [(1, 1)]
    assert sum(result.time_parts.values()) == pytest.approx(result.train_seconds)


def test_a_pipeline_over_more_devices_than_layers_is_refused_with_a_remedy() -> None:
    with pytest.raises(UserError, match=r"has 16 stages on 16 devices, and the model 14 layers; .* parallel=elastic"):
        simulate(composed("parallel=pipeline", "freeze=none"))


@pytest.mark.parametrize("model", options("model"))
def test_every_model_has_a_shape(model: str) -> None:
    reads_text = "HuggingFaceModel" in (CONF / "model" / f"{model}.yaml").read_text()
    assert composed(f"model={model}", *(["dataset=squad"] if reads_text else [])).shape.num_blocks >= 6


def test_the_plans_freeze_what_the_cap_of_the_rule_allows() -> None:
    rows = simulate(composed("freeze.alpha=0.3333")).rows
    assert [(row.epoch, row.num_frozen) for row in rows] == [(0, 0), (1, 4), (2, 7), (3, 9)]


def test_a_policy_unfreezes_where_the_learning_rate_of_the_run_has_dropped() -> None:
    options = ("freeze=egeria", "freeze.interval=0.05", "cluster.transition_s=0")
    falling, constant = (simulate(composed(*options, f"optim.schedule={each}")) for each in ("linear", "constant"))
    assert [row.num_frozen for row in falling.rows] == [0, 12, 0]
    assert [row.num_frozen for row in constant.rows] == [0, 12]
    assert falling.speedup_vs_static < constant.speedup_vs_static


def test_a_row_names_what_a_plan_adds_to_its_schedule_as_the_options_do() -> None:
    options = ("num_stages=4", "stages_per_rank=2", "schedule=interleaved1f1b", "recompute=true")
    rows = simulate(composed("freeze=none", *(f"parallel.{option}" for option in options))).rows
    assert [row.schedule for row in rows] == ["interleaved1f1b, stages_per_rank=2, recompute"]
    sharded = simulate(composed("freeze=none", "parallel=sharded")).rows
    assert [row.schedule.partition(", ")[2] for row in sharded] == ["sharded"]


def test_the_cache_is_filled_where_that_pays() -> None:
    """In the last epoch filling computes what the cache would spare; and a long transition pays for no level."""
    assert [row.cache_level for row in simulate(composed("cluster.transition_s=0")).rows] == [0, 4, 7, 7]
    assert [row.cache_level for row in simulate(composed("cluster.transition_s=5")).rows] == [0, 0, 0, 0]


def test_a_cache_that_is_required_is_filled_whatever_it_costs() -> None:
    rows = simulate(composed("cluster.transition_s=5", "cache.require=true")).rows
    assert [row.cache_level for row in rows] == [row.num_frozen for row in rows] == [0, 4, 7, 9]


def test_each_draw_of_a_sample_that_is_still_read_is_filled() -> None:
    """Decisions come after each of four epochs, and three, two and one are left."""
    random = ("dataset.augment=true", "cache.augmentation=variants", "cache.require=true", "cluster.transition_s=0")
    one, two, eight = (
        [entry.num_samples_left for entry in run_history(config, make_planner(config)).entries]
        for config in (composed(*random, f"cache.variants={each}") for each in (1, 2, 8))
    )
    assert one == [0, 6400, 6400, 6400]
    assert two == [0, 12800, 12800, 6400]
    assert eight == [0, 19200, 12800, 6400]


def test_an_epoch_has_the_samples_that_the_dataset_is_limited_to() -> None:
    limited, fewer = (simulate(composed(each)) for each in ("dataset.max_train_samples=3200", "num_samples=3200"))
    assert limited == fewer
    assert "3,200 training samples" in limited.header()


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["peft=lora"], "peft= cannot be simulated"),
        (["model.options={depth: 6}"], "model.options.depth=6 and shape.num_blocks=12 are two models"),
        (["dataset.max_train_samples=63"], "dataset.max_train_samples=63 must be at least batch_size=64"),
    ],
)
def test_what_would_be_simulated_as_another_run_is_refused(overrides: list[str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        simulate(composed(*overrides))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"precision": "bf16"}, "precision=bf16 is unknown; choose one of float32"),
        ({"batch_size": 0}, "batch_size=0 must be above 0"),
        ({"parallel": Parallel(world_size=2)}, "parallel.world_size=2 has no effect here"),
        ({"parallel": Parallel(device_chunk_gib=0.2)}, "parallel.device_chunk_gib has no effect here"),
        ({"num_samples": None, "dataset": Digits()}, "dataset digits does not say how many training samples it has"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_script_is_refused_what_the_command_is(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        simulate(replace(composed(), **changes))


def test_a_dataset_says_how_many_samples_it_has() -> None:
    known = replace(composed(), num_samples=None, dataset=Digits(num_train_samples=6400))
    assert "6,400 training samples" in simulate(known).header()


def test_a_model_of_another_size_is_simulated_by_its_shape() -> None:
    result = simulate(composed("model.options={depth: 6}", "shape.num_blocks=6"))
    assert "6 blocks of width 768" in result.header()


def test_options_that_a_simulation_does_not_count_are_named() -> None:
    options = ("compile=true", "batching=bucketed", "cache.memory_gib=0.5", "cache.storage=float16")
    row = "cache.memory_gib=0.5, cache.storage=float16, batching=bucketed, compile=true: what a run takes with it"
    assert row in simulate(composed(*options)).header()
    assert "left out" not in simulate(composed()).header()


def test_samples_per_second_and_training_time_follow_from_the_cost_model() -> None:
    config = composed("freeze=none")
    planner = make_planner(config)
    step_s = step_seconds(planner.profile, planner.cluster, planner.initial(), 64)
    result = simulate(config)
    assert [row.samples_per_second for row in result.rows] == [pytest.approx(64 / step_s)]
    assert result.train_seconds == pytest.approx(400 * step_s)
    assert result.speedup_vs_static == pytest.approx(1)
    assert result.limit >= 1


def test_a_transition_and_filling_the_cache_take_time() -> None:
    slow, fast = (simulate(composed(f"cluster.transition_s={seconds}")) for seconds in (0.1, 0))
    assert [row.cache_level for row in slow.rows] == [row.cache_level for row in fast.rows]
    assert slow.train_seconds == pytest.approx(fast.train_seconds + 3 * 0.1)
    steps_s = sum(6400 / row.samples_per_second for row in fast.rows)
    assert fast.train_seconds > steps_s


@pytest.mark.parametrize(
    ("precision", "peak_tflops"), [("float32", 495), ("bfloat16", 989), ("float16", 989), ("float64", 67)]
)
def test_a_precision_brings_its_speed_and_its_bytes(precision: str, peak_tflops: float) -> None:
    single, found = (make_planner(composed("cluster=dgx", f"precision={name}")) for name in ("float32", precision))
    block, layer = single.profile.layers[1], found.profile.layers[1]
    assert layer.forward.per_sample_s == pytest.approx(block.forward.per_sample_s * 495 / peak_tflops)
    wider = 2 if precision == "float64" else 1
    assert layer.parameter_bytes == wider * block.parameter_bytes
    assert layer.output_bytes == wider * block.output_bytes
    assert layer.optimizer_s == pytest.approx(wider * block.optimizer_s)
    assert (layer.autocast_bytes > 0) == ("16" in precision)


def test_half_precision_runs_faster_and_in_less_memory() -> None:
    single, half = (
        simulate(composed("cluster=paper", "freeze=none", f"precision={name}")).static
        for name in ("float32", "float16")
    )
    assert half.samples_per_second > 1.5 * single.samples_per_second
    assert half.memory_gib < single.memory_gib


ETHERNET = ("cluster.link_gb_per_s=10", "cluster.num_nodes=8", "cluster.node_link_gb_per_s=10")


def test_parts_of_heads_pay_for_small_batches_on_fast_links_and_never_for_large_ones_or_slow_links() -> None:
    """Acceptance check 7 of the design, which counts sums of two bytes, as those over two ranks have by themselves."""
    exact = ("model=bert_large", "dataset=squad", "precision=bfloat16", "freeze=none", "cluster=dgx")
    bert = (*exact, "parallel.reduce_dtype=precision")

    def rate(*more: str, bert: tuple[str, ...] = bert) -> tuple[float, str]:
        row = simulate(composed(*bert, *more)).rows[0]
        return row.samples_per_second, row.schedule

    for size, expected, options in ((8, "tp 4", bert), (16, "tp 2", exact)):
        (whole, _), (split, mesh) = (
            rate(f"batch_size={size}", f"parallel.tp={tp}", bert=options) for tp in ("1", "null")
        )
        assert expected in mesh
        assert split >= 1.15 * whole
    assert "tp" not in rate("batch_size=512", "parallel.tp=null")[1]
    on_ethernet = (*bert, "batch_size=8", "parallel.tp=null", *ETHERNET)
    assert make_planner(composed(*on_ethernet)).profile.meshes, "there are some to choose from"
    assert "tp" not in simulate(composed(*on_ethernet)).rows[0].schedule


def test_the_search_among_meshes_looks_at_most_twice_as_often_on_thousands_of_devices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Acceptance check 7: 4,096 devices. It counts bounds of layouts, of which there are millions."""
    looks, bound = [0], LowerBounds.pipeline_makespan

    def counted(self: LowerBounds, layout: Layout) -> float:
        looks[0] += 1
        return bound(self, layout)

    monkeypatch.setattr(LowerBounds, "pipeline_makespan", counted)
    bert = ("model=bert_large", "dataset=squad", "precision=bfloat16", "freeze=none", "cluster=dgx")
    found = list[int]()
    for meshes in (("parallel.tp=1",), ("parallel.tp=null",), ("parallel.tp=null", "parallel.dp_shard=null")):
        looks[0] = 0
        planner = make_planner(composed(*bert, "cluster.num_nodes=512", "batch_size=8192", "num_samples=8192", *meshes))
        assert planner.static.num_devices == 4096
        found.append(looks[0])
    assert 0 < max(found) <= 2 * found[0], found


def test_a_peak_that_the_user_knows_makes_a_precision_possible() -> None:
    planner = make_planner(composed("precision=float64", "cluster.float64_tflops=0.35"))
    assert planner.profile.layers[1].autocast_bytes == 0


def test_without_a_cache_nothing_is_cached() -> None:
    rows = simulate(composed("cache=off")).rows
    assert [row.cache_level for row in rows] == [0] * 4
    assert [row.num_frozen for row in rows] == [0, 4, 7, 9]


FLIPS = "dataset.transforms=[RandomHorizontalFlip]"


@pytest.mark.thinned("overrides0", "overrides2", "overrides5", "overrides6")
@pytest.mark.parametrize(
    ("overrides", "note"),
    [
        (["dataset.augment=true"], "the cache is off: the dataset's transform is random"),
        (["dataset.transforms=[RandAugment]"], "the cache is off: the dataset's transform is random"),
        (["dataset.augment=true", "cache.augmentation=first_draw"], ""),
        (["dataset.transforms=[RandAugment]", "cache.augmentation=variants", "cache.variants=2", "epochs=12"], ""),
        ([FLIPS, "cache.augmentation=flip_pair"], ""),
        ([FLIPS, "dataset.augment=true", "cache.augmentation=flip_pair"], "the cache is off: cache.augmentation=flip"),
        (["dataset.mixup=0.8", "cache.augmentation=first_draw"], "the cache is off: dataset.mixup and dataset.cutmix"),
        (["dataset.cutmix=1"], "the cache is off: dataset.mixup and dataset.cutmix"),
        (["dataset.transforms=[{name: Resize, size: 256}]"], ""),
    ],
)
def test_the_cache_is_off_with_the_same_note_where_a_run_has_none(overrides: list[str], note: str) -> None:
    result = simulate(composed("cluster.transition_s=0", *overrides))
    assert any(row.cache_level for row in result.rows) == (not note)
    assert [words.startswith(note) for label, words in result.setting if label == "cache"] == [True] * bool(note)
    if note:
        with pytest.raises(UserError, match=f"cache.require=true trains only with the cache, and {note}"):
            simulate(composed("cache.require=true", *overrides))
        assert "the cache is off" not in simulate(composed("cache=off", *overrides)).header()
        assert "the cache is off" not in simulate(composed("freeze=none", *overrides)).header()


def test_a_pipeline_that_does_not_fit_is_left_out_and_explained() -> None:
    result = simulate(composed("cluster=dgx"))
    assert result.speedup_vs_pipeline is None
    assert "pipeline.num_stages=8 x pipeline.num_replicas=2 need 16 devices" in result.summary()
    assert "| pipeline" not in result.table()


def test_the_static_pipeline_is_the_one_asked_for() -> None:
    found = simulate(composed()).pipeline
    assert found is not None
    assert (found.num_stages, found.num_replicas, found.num_microbatches) == (8, 2, 2)
    assert found.bubble == pytest.approx(7 / 9, abs=0.1)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model=bert"], "reads texts and the dataset holds images"),
        (["num_samples=1"], "num_samples=1 must be at least batch_size=64"),
        (["cluster.efficiency=2"], r"cluster\.efficiency=2\.0 is a fraction of the peak"),
        (["cluster.memory_gib=-1"], r"cluster\.memory_gib=-1\.0 must be above 0"),
        (["parallel.world_size=4"], r"parallel\.world_size=4 has no effect here: .* cluster\.num_nodes"),
        (["pipeline.schedule=zbv"], r"pipeline\.schedule=zbv is unknown"),
        (["precision=bfloat16"], r"precision=bfloat16 cannot be simulated: cluster\.bfloat16_tflops is null"),
        (["precision=float64"], r"precision=float64 cannot be simulated: cluster\.float64_tflops is null"),
        (["cluster.float16_tflops=0"], r"cluster\.float16_tflops=0\.0 must be above 0"),
        (["cluster.transition_s=nan"], r"cluster\.transition_s=nan must be above 0 and finite"),
        (["cluster.link_latency_s=inf"], r"cluster\.link_latency_s=inf must be above 0 and finite"),
        (["shape.mlp_ratio=nan"], r"shape\.mlp_ratio=nan must be above 0"),
        (["shape.head_tokens=0"], r"shape\.head_tokens=0 must be above 0"),
        (["shape.num_embeddings=-1"], r"shape\.num_embeddings=-1 must be 0 or more"),
        (["shape.token_values=-1"], r"shape\.token_values=-1 must be 0 or more"),
        (["parallel.tp=2", "peft=lora"], r"parallel\.tp=2 does not go with peft="),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_is_refused(overrides: list[str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        composed(*overrides)


def command(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    arguments = [sys.executable, "-X", "importtime", "-m", "pipetransformer.simulate", f"hydra.run.dir={folder}"]
    return subprocess.run([*arguments, *SMALL, *overrides], cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S)


def test_the_command_prints_a_table_and_writes_traces_without_torch(tmp_path: Path) -> None:
    done = command(tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert not [line for line in done.stderr.splitlines() if line.endswith(("| torch", " torch"))]
    assert "speed-up over best static plan" in done.stdout
    assert json.loads((tmp_path / "simulation.json").read_text())["rows"][1]["num_frozen"] == 4
    for number in range(4):
        rows = json.loads((tmp_path / f"trace_{number}.json").read_text())["traceEvents"]
        spans = sorted((row["pid"], row["ts"], row["dur"]) for row in rows if row["ph"] == "X" and row["tid"] == 0)
        assert spans
        assert all(a[0] != b[0] or a[1] + a[2] <= b[1] + 1e-6 for a, b in pairwise(spans))


@pytest.mark.thinned(1)
@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["cluster.memory_gib=0.001"], ["no plan fits cluster.memory_gib=0.001", "raise cluster.memory_gib or"]),
        (["parallel.device_memory_gib=0.001"], ["no plan fits parallel.device_memory_gib=0.001"]),
    ],
)
def test_what_does_not_fit_ends_in_one_message(overrides: list[str], words: list[str], tmp_path: Path) -> None:
    done = command(tmp_path, *overrides)
    assert done.returncode == 1
    assert all(word in done.stderr for word in words), done.stderr
    assert "Traceback" not in done.stderr
    (line,) = (line for line in done.stderr.splitlines() if not line.startswith("import time:"))
    assert all(word in line for word in words), "Hydra adds nothing of its own"


def test_a_schedule_of_more_blocks_than_the_model_has_is_refused() -> None:
    with pytest.raises(UserError, match="freezes up to 90 blocks"):
        simulate(composed("freeze=schedule", "freeze.num_frozen=[1,90]"))


def test_a_run_folder_that_is_a_file_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "odd.csv").touch()
    done = command(tmp_path / "odd.csv")
    assert done.returncode == 1
    (line,) = (line for line in done.stderr.splitlines() if not line.startswith("import time:"))
    assert line.startswith("the run folder cannot be written")
    assert "hydra.run.dir=" in line


def test_the_number_of_samples_is_the_datasets() -> None:
    assert compose_simulation(("model=bert", "dataset=squad")).num_samples == 88_524
    assert compose_simulation(("model=bert", "dataset=glue/sst2")).num_samples == 67_349
    with pytest.raises(UserError, match="does not say how many training samples it has; give num_samples="):
        compose_simulation(("model=bert", "dataset=squad_v2"))
    assert compose_simulation(("model=bert", "dataset=squad_v2", "num_samples=640")).num_samples == 640


def test_the_header_names_model_data_and_devices_and_what_is_made_up() -> None:
    lines = simulate(composed("cluster=paper")).header().splitlines()
    assert [line.split()[0] for line in lines] == ["model", "data", "devices", "freezing"]
    assert "12 blocks of width 768, 197 tokens, 87 M parameters, float32" in lines[0]
    assert "imagenet-1k: 6,400 training samples, 4 epochs in batches of 64" in lines[1]
    assert "2 nodes x 8 devices, each 14.5 GiB" in lines[2]
    assert lines[2].endswith("11.2 TFLOPS peak x 0.55 in float32")
    assert "gradient norms are made up" in lines[3]
    assert "feature changes are made up" in simulate(composed("freeze=cka")).header()
    for policy in (["freeze=none"], ["freeze=schedule", "freeze.num_frozen=[2]"]):  # which measure nothing
        assert "freezing" not in simulate(composed(*policy)).header()
    narrow = simulate(composed("cluster=dgx", "precision=bfloat16")).header()
    assert "989 TFLOPS peak x 0.4 in bfloat16" in narrow, "the peak that counts"


def test_what_a_run_would_warn_of_is_told() -> None:
    header = simulate(composed("freeze=prefix", "freeze.num_blocks=3", "freeze.target_fraction=0.5")).header()
    assert "warning   freeze.target_fraction has no effect" in header
    assert (
        "warning   no prefix meets freeze.time_share=0.1"
        in simulate(composed("freeze=budget", "freeze.time_share=0.1")).header()
    )


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["parallel.tp=2", "optim=torch", "optim.name=Adafactor"],
            "optim.name=Adafactor needs each weight in one piece, .* take optim=adamw, lamb or sgd",
        ),
        (["parallel.cp=2", "model=eva02"], r"no mesh splits the layers of eva02_base.*drop parallel\.tp=, cp="),
    ],
)
def test_a_mesh_on_which_the_run_could_not_begin_is_refused(overrides: list[str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        simulate(composed(*overrides))


def test_a_mesh_that_is_left_open_is_not_taken_where_no_mesh_splits_the_model() -> None:
    bert = "model=bert_large", "dataset=squad", "precision=bfloat16", "freeze=none", "cluster=dgx"
    options = *bert, "batch_size=4", "num_samples=400", "parallel.tp=null"
    plans = [simulate(composed(*options, f"shape.has_tp_plan={value}")).rows[0].schedule for value in ("true", "false")]
    assert ["tp" in each for each in plans] == [True, False]


@pytest.mark.thinned
@pytest.mark.parametrize("cluster", options("cluster"))
@pytest.mark.parametrize("pipeline", options("pipeline"))
def test_the_table_fits_a_hundred_columns(cluster: str, pipeline: str) -> None:
    result = simulate(composed(f"cluster={cluster}", f"pipeline={pipeline}"))
    lines = (result.header() + "\n" + result.table()).splitlines()
    assert max(map(len, lines)) < 100


@pytest.mark.parametrize("pipeline", options("pipeline"))
def test_every_pipeline_to_compare_with_composes(pipeline: str) -> None:
    found = simulate(composed(f"pipeline={pipeline}")).pipeline
    assert found is not None
    assert found.num_stages == 8
