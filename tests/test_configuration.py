"""What a user writes becomes plain values, checked; settings without effect are named."""

import dataclasses
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import cast

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import CompactHydraException
from omegaconf import DictConfig, ListConfig, OmegaConf
from support.jobs import ROOT, TINY, loaded, loaded_simulation, run_job
from support.pool import Pool

from pipetransformer.autopipe.schedules import REFUSED
from pipetransformer.config.arguments import explain
from pipetransformer.config.compose import CONF, compose_simulation, compose_training, load, register
from pipetransformer.config.no_effect import warnings
from pipetransformer.config.schema import PRECISIONS, write_config
from pipetransformer.errors import UserError
from pipetransformer.planning.timeline import Timeline
from pipetransformer.runtime import precision


def options(group: str) -> list[str]:
    folder = CONF / group
    return sorted(str(file.relative_to(folder).with_suffix("")) for file in folder.rglob("*.yaml"))


TEXT = ("model=bert", "dataset=squad")
WRONG = {
    "freeze.alpha=abc": "freeze.alpha=abc must be a number",
    "freeze.alpha=2": "freeze.alpha=2.0 is not a fraction of the active blocks; give a number between 0 and 1",
    "+foo=1": "foo does not exist; valid options: model, dataset, freeze",
    "parallel.wrold_size=1": "did you mean parallel.world_size?",
    "parallel.schedule=zbv": "parallel.schedule=zbv is unknown; choose one of 1f1b, gpipe",
    "precision=half": "precision=half is unknown; choose one of float32, float64, bfloat16, float16",
    "optim.schedule=steps": "optim.schedule=steps is unknown; choose one of linear, cosine, constant",
    "dataset=sst2": "choose a model for texts (model=albert, bert, bert_large, deberta, distilbert, ",
    "dataset=image_folder": "dataset.path= is missing",
    "dataset=image": "give dataset.path=<file or folder> or dataset.hub=<owner/name>: neither is given",
    "dataset.transforms=[RandAugmnt]": "dataset.transforms[0]=RandAugmnt is a transform neither",
    "dataset.mixup=-1": "dataset.mixup=-1.0 is no parameter of a Beta distribution",
    "freeze.guard=-0.1": "freeze.guard=-0.1 is below 0; give the largest fall of the main metric",
    "guard.not_finite=ignore": "guard.not_finite=ignore is unknown; choose one of stop, skip, roll_back",
    "guard.freeze=skip": "guard.freeze=skip is unknown; choose one of stop, unfreeze, roll_back",
    "guard.max_norm_ratio=1": "guard.max_norm_ratio=1.0 must be above 1",
    "guard.max_skips=0": "guard.max_skips=0 is below 1; take stop",
    "dataset.max_train_samples=0": "dataset.max_train_samples=0 leaves no samples",
    "seed=one": "seed=one must be a whole number",
    "seed=-1": "seed=-1 is below 0",
    "freeze.num_blocks=1": "freeze.num_blocks does not exist; freeze=prefix has it; valid options: interval, alpha",
    "freeze.num_frozen=[1]": "freeze.num_frozen does not exist; freeze=schedule has it; valid options: interval, alpha",
    "optim.momentum=0.9": "optim.momentum does not exist; optim=sgd has it; valid options: lr, recipe_lr",
    "cache.path=''": "cache.path= is empty; give a folder, or null",
    "cache.disk_gib=inf": "cache.disk_gib=inf is no finite number; give the most that it may take, or 0 for none",
    "cache.memory_gib=nan": "cache.memory_gib=nan is no finite number",
    "parallel.device_memory_gib=inf": "parallel.device_memory_gib=inf must be a finite number",
    "parallel.timeout_s=nan": "parallel.timeout_s=nan must be a finite number",
    "cache.wait_s=-1": "cache.wait_s=-1.0 is below 0; give the longest wait for another run, or 0 for none",
    "loader.num_workers=-1": "loader.num_workers=-1 is below 0; give 0 for none, or null for a choice",
    "loader.prefetch_factor=0": "loader.prefetch_factor=0 is below 1; loader.num_workers=0 reads nothing ahead",
    "optim.betas=0.9": "optim.betas: expected a list such as [1,2]",
    "optim.betas=[0.9]": "optim.betas=[0.9] are not two numbers",
    "parallel.world_size=0": "parallel.world_size=0 must be above 0",
}
FREE = {  # all three forms of an option of the library; timm's model has arguments of its own by default
    "model.options.drop_path_rate=0.1": {"drop_path_rate": 0.1},
    "model.options={drop_path_rate: 0.1, depth: 2}": {"drop_path_rate": 0.1, "depth": 2},
    "+model.options.drop_path_rate=0.1": {"drop_path_rate": 0.1},
    "model.options.depth=2": {"depth": 2},
}


@pytest.mark.parametrize("option", FREE)
def test_options_of_the_library_need_no_plus(option: str) -> None:
    assert loaded(option).model.options == loaded().model.options | FREE[option]
    assert loaded(*TEXT, "model.options={hidden_dropout_prob: 0.2}").model.options == {"hidden_dropout_prob": 0.2}


GROUPS = ("model", "dataset", "freeze", "parallel", "cache", "optim", "peft", "logger")


# all models, data and arrangements: tests/models/test_conf.py, tests/data/test_conf.py, test_simulate.py,
# test_arrangements.py and test_mesh_jobs.py
@pytest.mark.thinned(
    *(f"[{group}=" for group in GROUPS if group not in ("model", "dataset", "parallel")),
    *("=bert", "=gpt2", "=vit_tiny", "=squad", "=digits", "=image", "=tokens", "=causal_lm", "=chunks", "=elastic"),
)
@pytest.mark.parametrize("option", [f"{group}={name}" for group in GROUPS for name in options(group)])
def test_every_option_of_every_group_composes(option: str, tmp_path: Path) -> None:
    group, name = option.split("=")
    path = CONF / group / f"{name}.yaml"
    of_text = ("glue", "imdb", "sst2", "squad", "tokens", "text", "causal_lm")
    reads_text = "HuggingFaceModel" in path.read_text() or any(word in name for word in of_text)
    data = f"dataset.path={_picture_folder(tmp_path)}"
    needed = {each: [data] for each in ("image_folder", "image", "tokens", "text", "causal_lm")}
    needed |= {"schedule": ["freeze.num_frozen=[2,4]"], "prefix": ["freeze.num_blocks=2"]}
    extra = needed.get(name, [])
    run_config = loaded(*(TEXT if reads_text else ()), option, *extra)
    assert dataclasses.is_dataclass(getattr(run_config, group))
    libraries = getattr(getattr(run_config, group), "libraries", ())
    assert all(find_spec(library) for library in libraries), "the process that imports them first tells of none"


def _picture_folder(folder: Path) -> Path:
    for split in ("train", "test"):
        for label in ("cat", "dog"):
            (folder / split / label).mkdir(parents=True)
            (folder / split / label / "1.png").touch()
    return folder


def test_every_precision_that_may_be_written_is_one_of_the_runtime() -> None:
    assert set(PRECISIONS) == set(precision.PRECISIONS)
    assert [loaded(f"precision={name}").precision for name in PRECISIONS] == [*PRECISIONS]


def test_nothing_of_hydra_is_left_in_the_values() -> None:
    def walk(value: object) -> None:
        assert not isinstance(value, DictConfig | ListConfig)
        if dataclasses.is_dataclass(value):
            walk(list(vars(value).values()))
        for item in value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ():
            walk(item)

    walk(loaded("freeze=schedule", "freeze.num_frozen=[2,4]", "+model.options.drop_path_rate=0.1", "logger.tags=[one]"))


def test_values_have_the_types_of_the_schema() -> None:
    run_config = loaded(
        "epochs=7", "optim.lr=1", "parallel.device_memory_gib=2", "freeze=schedule", "freeze.num_frozen=[2,4]"
    )
    assert (run_config.epochs, run_config.optim.lr, run_config.parallel.device_memory_gib) == (7, 1.0, 2.0)
    assert isinstance(run_config.optim.lr, float)
    assert run_config.freeze.num_frozen == [2, 4]


@pytest.mark.parametrize(
    "overrides",
    [
        (), (*TEXT, "optim=lamb", "epochs=1"), (*TINY, "+model.options.init_values=1e-5", "-v"),
        ("parallel=megatron", "parallel.num_stages=2", "cache=false"), ("resume=auto", "optim.betas=[0.8,0.99]"),
        ("logger=[wandb,tensorboard]", "experiment=null", "freeze=schedule", "freeze.num_frozen=[1,2]"),
    ],
    ids=lambda overrides: " ".join(overrides),
)  # fmt: skip
def test_the_short_way_to_the_configuration_of_a_job_leads_where_the_command_goes(overrides: tuple[str, ...]) -> None:
    assert loaded(*overrides) == compose_training(overrides)


@pytest.mark.parametrize("overrides", [(), ("cluster=dgx", *TEXT, "parallel.tp=2", "num_samples=640", "freeze=none")])
def test_and_so_does_that_of_a_simulation(overrides: tuple[str, ...]) -> None:
    assert loaded_simulation(*overrides) == compose_simulation(overrides)


@pytest.mark.parametrize(("override", "words"), WRONG.items())
def test_a_wrong_option_is_explained_in_one_line(override: str, words: str) -> None:
    with pytest.raises((UserError, CompactHydraException)) as caught:
        loaded(override)
    message = explain(caught.value)
    assert words in message
    assert "\n" not in message


@pytest.mark.parametrize("option", ["guard.not_finite=roll_back", "freeze.guard=0"])
def test_what_goes_back_to_a_checkpoint_is_refused_without_one(option: str) -> None:
    with pytest.raises(
        UserError, match=r"=roll_back goes back to a checkpoint, and none is written; drop checkpoint=off"
    ):
        loaded(option, "checkpoint=off")


@pytest.mark.parametrize(("group", "value"), [("freeze", "linear"), ("logger", None), ("model", {"name": "mine"})])
def test_a_group_that_a_file_gives_as_a_value_is_told_how_to_be_chosen(group: str, value: object) -> None:
    register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        node = compose("config")
    node[group] = value
    with pytest.raises(UserError, match=f"gives {group} as .* names no class; .* as '- override /{group}: <name>'"):
        load(node)


def test_no_wrong_option_is_slow_to_answer() -> None:
    code = f"""
import sys
from hydra import compose, initialize_config_dir
from hydra.errors import CompactHydraException
from pipetransformer.config.compose import load, register
from pipetransformer.errors import UserError
register()
for override in {list(WRONG)}:
    try:
        with initialize_config_dir({str(CONF)!r}, version_base="1.3"):
            load(compose("config", [override]))
    except (UserError, CompactHydraException):
        continue
    sys.exit(override)
print([name for name in ("torch", "timm", "transformers", "datasets", "sklearn", "torchvision") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]", done.stdout


@pytest.mark.parametrize("schedule", REFUSED)
def test_a_schedule_that_forgets_gradients_is_refused_with_the_reason(schedule: str) -> None:
    with pytest.raises(UserError, match=f"parallel.schedule={schedule} {REFUSED[schedule]}; choose one of"):
        loaded(f"parallel.schedule={schedule}")


def test_a_dataset_brings_its_recipe_and_the_command_line_has_the_last_word() -> None:
    assert loaded(*TEXT).batch_size == 32
    assert loaded(*TEXT, "batch_size=8").batch_size == 8


def test_language_modelling_freezes_nothing_unless_asked(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a bird sings\n" * 20)
    texts = ("model=gpt2", "dataset=causal_lm", f"dataset.path={tmp_path / 'a.txt'}")
    assert type(loaded(*texts).freeze).__name__ == "NoFreezing"
    assert loaded(*texts, "freeze=pipetransformer", "freeze.alpha=0.5").freeze.alpha == 0.5


@pytest.mark.parametrize("dataset", ["digits", "fashion_mnist"])
@pytest.mark.parametrize(
    ("options", "pretrained", "rate"),
    [
        ((), False, 1e-3),
        (("model=vit", "model.pretrained=false"), False, 1e-3),
        ((), True, 8e-4),
        (("optim=sgd",), False, 0.01),
        (("optim=timm",), False, 1e-4),
        (("optim=torch",), True, 1e-4),
    ],
)
def test_a_recipe_of_pictures_has_a_rate_for_adamw_alone(
    dataset: str, options: tuple[str, ...], pretrained: bool, rate: float
) -> None:
    optim = loaded(f"dataset={dataset}", *options).optim.for_model(96, pretrained=pretrained)
    assert optim.peak == pytest.approx(rate, rel=1e-12)
    assert optim.peak == rate or pretrained


def test_the_record_composes_the_same_run(tmp_path: Path) -> None:
    config = loaded(*TEXT, "+model.options.num_hidden_layers=2", "freeze=schedule", "freeze.num_frozen=[1,2]")
    write_config(config, tmp_path)
    written = cast("DictConfig", OmegaConf.load(tmp_path / "config.yaml"))
    assert load(written) == config
    assert written["batch_size"] == config.batch_size == 32


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([], []),
        (["freeze=none"], []),
        (["parallel.autopipe=false", "parallel.autodp=false"], ["the cache has no effect"]),
        (["parallel.autopipe=false", "cache=off"], ["parallel.autodp has no effect"]),
        (["parallel.autopipe=false", "cache=off", "parallel.autodp=false"], []),
        (["cache.path=features", "cache.disk_gib=0"], ["cache.path has no effect"]),
        (["freeze=none", "freeze.guard=0.1"], ["freeze.guard has no effect"]),
        (["freeze=none", "freeze.target_fraction=0.5"], ["freeze.target_fraction has no effect"]),
        (["freeze=freezeout", "freeze.target_fraction=0.5"], ["freeze.target_fraction changes what freezes, and not"]),
        (["cache.wait_s=5"], ["cache.wait_s=5 has no effect"]),
        (["cache.wait_s=5", "cache.path=features", "freeze=prefix", "freeze.num_blocks=1"], []),
        (
            ["freeze=prefix", "freeze.num_blocks=1", "freeze.guard=0.1"],
            ["freeze.guard has no effect with this policy"],
        ),
        (["freeze.on_unfreeze=reset"], ["freeze.on_unfreeze=reset has no effect"]),
        (["freeze.on_unfreeze=reset", "freeze.guard=0.1"], []),
        (
            ["freeze.on_unfreeze=reset", "freeze.guard=0.1", "guard.freeze=stop"],
            ["freeze.on_unfreeze=reset has no effect"],
        ),
        (["baseline=true"], []),
        (["baseline=true", "parallel=sharded"], ["baseline=true has no effect with parallel=sharded"]),
        (["baseline=true", "freeze=prefix", "freeze.num_blocks=1"], ["baseline=true has no effect: static plans"]),
        (["cache=off", "cache.path=features"], ["cache.path=features has no effect with cache=off"]),
        (["cache.path=features", "freeze=none"], ["cache.path=features has no effect with freeze=none: of layers"]),
        (
            ["cache=off", "cache.storage=int8", "cache.disk_gib=1"],
            ["cache.disk_gib=1.0 has no effect with cache=off", "cache.storage=int8 has no effect with cache=off"],
        ),
        (["launch.shrink=true"], []),
        (["launch.shrink=true", "launch.max_restarts=0"], ["shrink=true has no effect with launch.max_restarts=0: no"]),
        (["launch.shrink=true", "checkpoint=off"], ["launch.shrink=true has no effect with checkpoint=off: no"]),
        (["launch.shrink=true", "checkpoint=off", "launch.max_restarts=1"], []),
        (["resume.allow=[optim.lr,seed]"], ["resume.allow=[optim.lr,seed] has no effect without resume="]),
        (["resume=auto", "resume.allow=[optim.lr]"], []),
        (["evaluate.every_steps=48"], []),
        (["evaluate.every_steps=49"], ["evaluate.every_steps=49 has no effect: the run has 48 steps"]),
        (["evaluate.every_epochs=2", "epochs=2"], []),
        (["evaluate.every_epochs=3", "epochs=2"], ["every_epochs=3 has no effect with epochs=2: the end of"]),
        (["checkpoint.every_steps=48"], []),
        (["checkpoint.every_steps=49"], ["checkpoint.every_steps=49 has no effect: the run has 48 steps"]),
        (
            ["checkpoint=off", "checkpoint.every_steps=5", "checkpoint.keep=3"],
            ["checkpoint.every_steps=5 has no effect with checkpoint=off", "checkpoint.keep=3 has no effect with"],
        ),
        (["evaluate.patience=1", "evaluate.every_epochs=null"], ["evaluate.patience=1 has no effect with evaluate.ev"]),
        (["evaluate.patience=1", "evaluate.every_epochs=null", "evaluate.every_steps=9"], []),
        (
            ["guard.max_skips=9", "guard.max_rollbacks=9"],
            ["guard.max_skips=9 has no effect where", "guard.max_rollbacks=9 has no effect without"],
        ),
        (["guard.max_skips=9", "guard.not_finite=skip"], []),
        (["guard.max_skips=9", "guard.max_norm_ratio=9"], []),
        (["guard.max_rollbacks=9", "freeze.guard=0.1"], []),
        (["guard.max_rollbacks=9", "guard.not_finite=roll_back"], []),
        (["optim.warmup_steps=48"], []),
        (["optim.warmup_steps=49"], ["optim.warmup_steps=49 is longer than the run of 48 steps, whose rate never"]),
        (["guard.freeze=stop", "guard.exploding=stop"], ["guard.freeze=stop has no", "guard.exploding=stop has no"]),
        (["optim.final_fraction=0.1"], []),
        (["optim.schedule=constant", "optim.final_fraction=0.1"], ["optim.final_fraction=0.1 has no effect with"]),
        (["optim.power=2", "optim.gamma=0.5"], ["optim.power=2 has no", "optim.gamma=0.5 has no"]),
        (["optim.schedule=step", "optim.milestones=[0.5]", "optim.gamma=0.5"], []),
    ],
    ids=lambda value: " ".join(value),
)
def test_a_setting_without_effect_is_named(overrides: list[str], words: list[str]) -> None:
    texts = warnings(loaded(*overrides), num_steps=48)
    assert len(texts) == len(words)
    assert all(word in text for word, text in zip(words, texts, strict=True))


@pytest.mark.parametrize(
    ("overrides", "first_decision"),
    [
        (["freeze.interval=null", "epochs=1"], "null, once per epoch, the first decision would come after step 48"),
        (["freeze.interval=1"], "1 the first decision would come after step 48"),
        (["freeze.interval=0.99"], "0.99 the first decision would come after step 48"),
        (["freeze.interval=0.95"], None),
        (["freeze.interval=null", "epochs=2"], None),
        (["freeze.interval=1", "freeze.target_fraction=0.2"], None),
        (["freeze=prefix", "freeze.num_blocks=1", "epochs=1"], None),
        (["freeze=none", "epochs=1"], None),
    ],
    ids=str,
)
def test_a_run_that_ends_before_its_first_freeze_decision_says_so(
    overrides: list[str], first_decision: str | None
) -> None:
    config = loaded("batch_size=16", "epochs=4", *overrides)
    timeline = Timeline.of(config, 16 * 48 // config.epochs)
    texts = warnings(config, timeline.num_steps, timeline.decision_every)
    told = f"no block freezes after the start: with freeze.interval={first_decision}, and the run has 48; give"
    assert [text.partition(" a smaller")[0] for text in texts] == ([told] if first_decision else [])


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (
            ["freeze=egeria"],
            "needs 5 decisions to freeze one, and with freeze.interval=0.3 the run has 3; give a smaller",
        ),
        (["freeze=egeria", "freeze.interval=0.17"], None),
        (["freeze=egeria", "freeze.window=2", "freeze.patience=1"], None),
        (["freeze=egeria", "freeze.target_fraction=0.2"], None),
        (["freeze=autofreeze", "freeze.interval=0.5"], "this policy needs 2 decisions to freeze one, and"),
        (["freeze=cka", "freeze.interval=0.5"], "the run has 1; give a smaller fraction of the run, as 0.33"),
        (["freeze=threshold", "freeze.interval=0.5"], "this policy needs 2 decisions to freeze one, and"),
        (["freeze=threshold", "freeze.interval=0.5", "freeze.signal=relative_update"], None),
        (["freeze=schedule", "freeze.num_frozen=[1,2,3]"], None),
        (["freeze=schedule", "freeze.num_frozen=[1,3,3,3]"], None),
        (
            ["freeze=schedule", "freeze.num_frozen=[1,2,3,4]", "freeze.interval=null", "epochs=3"],
            "[1, 2, 3, 4] stops at 2: with freeze.interval=null, once per epoch, the run has 2 of its 4 decisions",
        ),
    ],
    ids=str,
)
def test_a_policy_with_too_few_decisions_says_so(overrides: list[str], told: str | None) -> None:
    config = loaded("batch_size=16", "epochs=4", *overrides)
    timeline = Timeline.of(config, 16 * 48 // config.epochs)
    texts = warnings(config, timeline.num_steps, timeline.decision_every)
    assert len(texts) == (told is not None)
    assert all(told in text for text in texts if told)


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ("freeze=none", "freeze=none, which freezes nothing to store"),
        ("cache=off", "cache=off"),
        ("parallel.autopipe=false", "parallel.autopipe=false, which keeps the stages"),
    ],
)
def test_a_cache_that_is_required_cannot_be_switched_off(option: str, reason: str) -> None:
    assert loaded("cache.require=true").cache.require
    with pytest.raises(UserError, match=rf"cache\.require=true is not possible with {reason}; drop one of them"):
        loaded(option, "cache.require=true")


def test_a_run_names_a_setting_without_effect_once(pool: Pool, tmp_path: Path) -> None:
    words = "parallel.autopipe=false", "cache=off", "evaluate.every_steps=9"
    job = run_job(pool, 2, tmp_path / "run", *TINY, *words)
    found = [message.partition(" no effect")[0] for message in job.messages]
    assert found == ["parallel.autodp has", "evaluate.every_steps=9 has"], "the run has 8 steps"


def test_a_random_transform_keeps_the_cache_off_and_says_so(pool: Pool, tmp_path: Path) -> None:
    job = run_job(pool, 1, tmp_path / "run", *TINY, "dataset.augment=true")
    assert [message.partition(":")[0] for message in job.messages] == ["the cache is off"]
    assert [plan["cache_level"] for plan in job.summary["plans"]] == [0, 0, 0]
    silent = run_job(pool, 1, tmp_path / "silent", *TINY, "dataset.augment=true", "cache=off")
    assert not silent.messages
    assert silent.losses == pytest.approx(job.losses, rel=1e-5)


@pytest.mark.thinned("variants")
@pytest.mark.parametrize("options", [("first_draw", "1"), ("variants", "2")], ids=lambda options: options[0])
def test_the_user_may_choose_to_cache_random_draws(options: tuple[str, str], pool: Pool, tmp_path: Path) -> None:
    chosen = [f"cache.augmentation={options[0]}", f"cache.variants={options[1]}"]
    job = run_job(pool, 2, tmp_path / "run", *TINY, "dataset.augment=true", *chosen, "epochs=4", made_up_times=True)
    assert job.summary["status"] == "completed"
    fill = job.events("cache_fill")[0]
    assert fill["num_samples"] == 64 * int(options[1]) + 40, "each draw of a training sample, each evaluation sample"
    assert job.summary["cache"]["hit_rate"] == 1
