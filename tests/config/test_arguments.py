"""Command lines that others would write are answered with the form that is meant."""

import pytest
from hydra.errors import HydraException
from support.jobs import loaded

from pipetransformer.config.arguments import explain, read_arguments, unwritable
from pipetransformer.config.help import help_text
from pipetransformer.config.names import ACCUMULATION, OF_OTHER_TOOLS
from pipetransformer.errors import UserError


def refused(*overrides: str) -> str:
    with pytest.raises((UserError, HydraException)) as caught:
        loaded(*overrides)
    message = explain(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["--epochs", "3"], "--epochs is not an option; write epochs=3"),
        (["--optim.lr=3"], "--optim.lr=3 is not an option; write optim.lr=3"),
        (["epochs", "=", "3"], "= stands alone; write name=value without spaces"),
        (["epochs"], "epochs has no value; write epochs=<value>"),
        (["dataset.path=a=b,c"], """quote the value, and all of it once more for the shell: 'dataset.path="a=b,c"'"""),
        (["dataset.path=(a"], "dataset.path=(a cannot be read; quote the value"),
        (["seed=1,2"], "seed=1,2 gives several values; a list is written seed=[1,2], and -m starts a run for each"),
        (["cluster=paper"], "cluster=paper describes a simulation; give it to pipetransformer-simulate"),
        (["lr=1e-3"], "lr does not exist; did you mean optim.lr?"),
        (["num_stages=2"], "num_stages does not exist; did you mean parallel.num_stages?"),
        (["epoch=2"], "epoch does not exist; did you mean epochs?"),
        (["parallel.tp=nul"], "parallel.tp=nul must be a whole number or null"),
        (["parallel.tp=1.5"], "parallel.tp=1.5 must be a whole number or null"),
        (["parallel.recompute=maybe"], "parallel.recompute=maybe must be true, false or null"),
        (["freeze.interval=often"], "freeze.interval=often must be a number or null"),
        (["seed=null"], "seed=null is not possible; give a value"),
        (["parallel.checkpoint=true"], "parallel.checkpoint is now called parallel.recompute"),
        (["gradient_accumulation_steps=4"], "parallel.num_microbatches=<number> is gradient accumulation; batch_size"),
        (["learning_rate=1"], "learning_rate does not exist; optim.lr=<peak rate> sets it"),
        (["num_devices=2"], "num_devices does not exist; parallel.world_size=<number> sets it"),
        (["max_length=64"], "max_length does not exist; dataset.max_length=<tokens> sets it"),
        (["learing_rate=1"], "learing_rate does not exist; optim.lr=<peak rate> sets it"),
        (["--output_dir", "runs"], "--output_dir is not an option; hydra.run.dir=<folder> sets it"),
        (["--gradient-checkpointing"], "--gradient-checkpointing is not an option; parallel.recompute=true sets it"),
        (["optim.max_grad_norm=1"], "optim.max_grad_norm does not exist; optim.clip_norm=<norm> sets it"),
        (["eval_every_epochs=2"], "eval_every_epochs is now called evaluate.every_epochs"),
        (["parallel.num_chunks=2"], "parallel.num_chunks is now called parallel.stages_per_rank"),
        (["freeze=schedule"], "give a value to freeze.num_frozen"),
        (["optim.weight_decay=-0.1"], "optim.weight_decay=-0.1 must be 0 or more"),
        (
            ["parallel.num_stages=2", "parallel.num_replicas=3", "parallel.world_size=4"],
            "need 6 devices, and there are 4",
        ),
        (["batch_size=2", "parallel.num_replicas=4"], "parallel.num_replicas=4 x parallel.num_microbatches=1"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_is_meant_is_told_in_one_line(overrides: list[str], words: str) -> None:
    assert words in refused(*overrides)


def test_an_error_about_the_rate_names_the_rate_alone() -> None:
    assert refused("optim.lr=0") == "optim.lr=0.0 must be a number above 0"
    assert refused("optim.clip_norm=0").startswith("optim.clip_norm=0.0 must be above 0")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model=t5", "model=t5 is unknown; there are: albert, bert, bert_large"),
        ("model=BERT", "did you mean model=bert?"),
        ("dataset=mnist", "did you mean dataset=fashion_mnist?"),
        ("dataset=mnist", "glue/sst2"),
        ("dataset=glue/sst-2", "did you mean dataset=glue/sst2?"),
        ("experiment=all", "did you mean experiment=components/all?"),
        ("model=false", "model=false is unknown; there are: albert, bert"),
        ("dataset=null", "dataset=null is unknown; there are: causal_lm, cifar10"),
    ],
)
def test_an_unknown_option_of_a_group_is_told_the_nearest_and_all_there_are(override: str, words: str) -> None:
    assert words in refused(override)


def test_what_users_try_for_a_switch_is_taken_as_its_option() -> None:
    assert read_arguments(["cache=false", "logger=null", "freeze=false", "experiment=null", "-m"]) == [
        "-m", "cache=off", "logger=none", "freeze=none", "~experiment",
    ]  # fmt: skip
    assert read_arguments(["-v", "seed=2"]) == ["verbose=true", "seed=2"]
    assert read_arguments(["seed=2", "-m", "--config-dir", "conf", "-v", "--cfg=job", "epochs=1"]) == [
        "-m", "--config-dir", "conf", "--cfg=job", "seed=2", "verbose=true", "epochs=1",
    ]  # fmt: skip
    assert read_arguments(["cache=True", "cache.path=null", "+cache.x=1"]) == [
        "cache=on",
        "cache.path=null",
        "+cache.x=1",
    ]
    assert not loaded("cache=false").cache.enabled


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        (
            "parallel=data",
            "\nparallel=data\n\n  # Static data parallelism: the whole model on every device, from the start",
        ),
        ("parallel=data", "\n  arrangement: data  # elastic, data, sharded, pipeline or single;"),
        ("parallel=data", "\n  world_size: null         # processes"),
        ("parallel=data", "\n  autodp: false  # turn freed devices into replicas\n"),
        ("dataset=sst2", "\n  # Short for dataset=glue/sst2\n  # SST-2: is a film review positive?"),
        ("dataset=sst2", "\n    max_length: 128  # tokens of a sample"),
        ("dataset=causal_lm", "\nfreeze=none\n"),
        ("dataset=causal_lm freeze=alpha", "\nfreeze=alpha\n"),
        ("experiment=components/freeze", "\ncache=off\n"),
        ("experiment=cache_storage/text", "\nmodel=bert\n"),
        ("experiment=cache_storage/text model=vit", "\nmodel=vit\n"),
    ],
)
def test_help_follows_what_a_file_builds_on(argument: str, words: str) -> None:
    text = help_text(["--help", *argument.split()])
    assert words in text
    assert all(text.count(f"\n  {name}:") == 1 for name in ("arrangement", "autodp", "num_stages"))


@pytest.mark.parametrize("told", sorted({*OF_OTHER_TOOLS.values()} - {ACCUMULATION}))
def test_what_is_named_in_place_of_another_tools_argument_exists(told: str) -> None:
    with pytest.raises((UserError, HydraException)) as caught:
        loaded("model=bert", "dataset=sst2", f"{told.partition('=')[0]}=[no value]")
    assert "does not exist" not in explain(caught.value)


def test_what_the_system_refuses_beside_files_is_not_laid_on_the_run_folder() -> None:
    assert unwritable(PermissionError(13, "Permission denied", "/proc/run")).startswith(
        "the run folder cannot be written"
    )
    told = unwritable(OSError(30, "Read-only file system"))  # as where a semaphore is made
    assert told.startswith("the system refuses what a run needs ([Errno 30] Read-only file system)")
    assert "/dev/shm" in told
