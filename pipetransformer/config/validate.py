"""Refuses options that cannot be, before the model or the data is loaded."""

import math
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from pipetransformer.autocache.writable import check_writable
from pipetransformer.config.kinds import check_config
from pipetransformer.config.schema import (
    BATCHINGS,
    CONF,
    PRECISIONS,
    RANDOMNESS,
    Config,
    SimulationConfig,
)
from pipetransformer.config.sections import (
    AUGMENTATIONS,
    FREEZE_ACTIONS,
    SAVED,
    STEP_ACTIONS,
    STORAGE,
    Cache,
    Checkpointing,
    Launch,
    Loading,
)
from pipetransformer.config.validate_parallel import check_parallel, one_of
from pipetransformer.errors import UserError

if TYPE_CHECKING:
    from pipetransformer.data.base import DatasetSpec
    from pipetransformer.models.base import ModelSpec


def validate(config: Config, with_data: bool = True) -> None:
    """Checks the options, before model and data are loaded.

    Args:
        with_data: The options of the dataset count too, and what they name has to be there.

    Raises:
        UserError: With the option, the reason and the remedy.
    """
    check_config(config)
    check_modality(config.model, config.dataset)
    _check_numbers(config)
    one_of("precision", config.precision, PRECISIONS)
    one_of("batching", config.batching, BATCHINGS)
    one_of("randomness", config.randomness, RANDOMNESS)
    _check_cache(config.cache)
    _check_require(config)
    _check_loader(config.loader)
    _check_checkpoint(config.checkpoint)
    _check_evaluate(config)
    _check_launch(config.launch)
    _check_guard(config)
    check_parallel(config)
    _check_dry_run(config)
    if isinstance(config, SimulationConfig):
        _check_simulation(config)
    elif config.cache.enabled and config.cache.path is not None:
        check_writable(Path(config.cache.path))
    config.model.check()
    if with_data:
        config.dataset.check()


def check_batch(batch_size: int, num_samples: int) -> None:
    """Refuses a global batch with more samples than there are.

    Raises:
        UserError: With both numbers.
    """
    if batch_size > num_samples:
        raise UserError(f"batch_size={batch_size} is larger than the {num_samples} training samples; lower batch_size")


def _check_numbers(config: Config) -> None:
    """Refuses numbers of the run and of its section ``parallel`` that are not positive; a seed may be 0."""
    for prefix, section in (("", config), ("parallel.", config.parallel)):
        for each in fields(section):
            value = getattr(section, each.name)
            if each.name == "seed" and not 0 <= value < 2**63:
                bound = "below 0; give 0 or more" if value < 0 else f"more than the largest one, {2**63 - 1}"
                raise UserError(f"seed={value} is {bound}")
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if is_number and each.name != "seed" and not 0 < value < math.inf:
                wanted = "above 0" if value <= 0 else "a finite number"
                raise UserError(f"{prefix}{each.name}={value} must be {wanted}")


def _check_cache(cache: Cache) -> None:
    one_of("cache.storage", cache.storage, STORAGE)
    one_of("cache.augmentation", cache.augmentation, AUGMENTATIONS)
    for name, value in (("memory_gib", cache.memory_gib), ("disk_gib", cache.disk_gib)):
        if not 0 <= value < math.inf:
            reason = "is below 0" if value < 0 else "is no finite number"
            raise UserError(f"cache.{name}={value} {reason}; give the most that it may take, or 0 for none")
    if not cache.wait_s >= 0:
        raise UserError(f"cache.wait_s={cache.wait_s} is below 0; give the longest wait for another run, or 0 for none")
    if cache.variants < 1:
        raise UserError(f"cache.variants={cache.variants} must be at least 1: the random draws of each sample")
    if cache.path is not None and not str(cache.path).strip():
        raise UserError("cache.path= is empty; give a folder, or null for a cache that ends with the run")
    if cache.enabled and cache.memory_gib == cache.disk_gib == 0:
        raise UserError("cache.memory_gib=0 and cache.disk_gib=0 leave no room; raise one of them, or give cache=off")


def _check_require(config: Config) -> None:
    """Refuses a run that requires a cache and never has one."""
    reasons = (
        ("cache=off", not config.cache.enabled),
        ("freeze=none, which freezes nothing to store", config.freeze.never_freezes),
        ("parallel.autopipe=false, which keeps the stages", not config.parallel.autopipe),
    )
    for reason, is_so in reasons:
        if config.cache.require and is_so:
            raise UserError(f"cache.require=true is not possible with {reason}; drop one of them")


def _check_loader(loader: Loading) -> None:
    if loader.num_workers is not None and loader.num_workers < 0:
        raise UserError(f"loader.num_workers={loader.num_workers} is below 0; give 0 for none, or null for a choice")
    if loader.prefetch_factor < 1:
        raise UserError(
            f"loader.prefetch_factor={loader.prefetch_factor} is below 1; loader.num_workers=0 reads nothing ahead"
        )


def _check_checkpoint(checkpoint: Checkpointing) -> None:
    for name, least in (("every_steps", 1), ("every_minutes", 0), ("keep", 1), ("keep_best", 0)):
        value = getattr(checkpoint, name)
        if value is not None and not value >= least:
            raise UserError(f"checkpoint.{name}={value} is below {least}; checkpoint=off writes no checkpoints")


def _check_evaluate(config: Config) -> None:
    evaluate = config.evaluate
    one_of("evaluate.save", evaluate.save, SAVED)
    for name in ("every_epochs", "every_steps", "patience"):
        value = getattr(evaluate, name)
        if value is not None and value < 1:
            raise UserError(f"evaluate.{name}={value} is below 1; give 1 or more, or null for none")
    if not evaluate.min_delta >= 0:
        raise UserError(f"evaluate.min_delta={evaluate.min_delta} is below 0; give the gain that a new best has")
    if evaluate.save == "best" and not config.checkpoint.enabled:
        raise UserError(
            "evaluate.save=best takes the weights from a checkpoint, and none is written; drop checkpoint=off, or take "
            "evaluate.save=last"
        )


def _check_dry_run(config: Config) -> None:
    """Refuses a dry run in the folder of another run, whose record it would replace."""
    if config.dry_run and (config.resume.run is not None or config.overwrite):
        other = "overwrite=true" if config.overwrite else f"resume={config.resume.run}"
        raise UserError(f"dry_run=true estimates a run that starts, and {other} is about another one; drop one of them")


def _check_launch(launch: Launch) -> None:
    if launch.max_restarts is not None and launch.max_restarts < 0:
        raise UserError(f"launch.max_restarts={launch.max_restarts} is below 0; give 0 for no restart")


def _check_guard(config: Config) -> None:
    guard = config.guard
    if guard.max_norm_ratio is not None and not guard.max_norm_ratio > 1:
        raise UserError(
            f"guard.max_norm_ratio={guard.max_norm_ratio} must be above 1: times the mean norm of the last steps"
        )
    for name in ("max_skips", "max_rollbacks"):
        if getattr(guard, name) < 1:
            raise UserError(f"guard.{name}={getattr(guard, name)} is below 1; take stop for what ends the run at once")
    for name, choices, is_used in (
        ("not_finite", STEP_ACTIONS, True),
        ("exploding", STEP_ACTIONS, guard.max_norm_ratio is not None),
        ("freeze", FREEZE_ACTIONS, config.freeze.guard is not None),
    ):
        one_of(f"guard.{name}", getattr(guard, name), choices)
        if getattr(guard, name) == "roll_back" and is_used and not config.checkpoint.enabled:
            raise UserError(
                f"guard.{name}=roll_back goes back to a checkpoint, and none is written; drop checkpoint=off, or take "
                f"guard.{name}={choices[1]}"
            )


def check_modality(model: "ModelSpec", dataset: "DatasetSpec") -> None:
    """Refuses a model that cannot read the dataset's samples.

    Raises:
        UserError: With the models that can.
    """
    if model.modality != dataset.modality:
        raise UserError(
            f"{model.name} reads {model.modality}s and the dataset holds {dataset.modality}s; choose a model for "
            f"{dataset.modality}s (model={', '.join(_models(dataset.modality))}) or another dataset"
        )


def _models(modality: str) -> list[str]:
    """Returns the options of ``model=`` whose class reads images or texts."""
    targets = {
        file.stem: yaml.safe_load(file.read_text(encoding="utf-8")) for file in sorted(CONF.glob("model/*.yaml"))
    }
    classes = {name: each["_target_"].rpartition(".") for name, each in targets.items()}
    return [
        name for name, (module, _, cls) in classes.items() if getattr(import_module(module), cls).modality == modality
    ]


def _check_simulation(config: SimulationConfig) -> None:
    if config.pipeline.schedule is not None:
        one_of("pipeline.schedule", config.pipeline.schedule, ("gpipe", "1f1b"))
    num_samples, limit = config.samples_of_an_epoch, config.dataset.max_train_samples
    if num_samples < config.batch_size:
        given = f"num_samples={num_samples}" if num_samples != limit else f"dataset.max_train_samples={limit}"
        raise UserError(f"{given} must be at least batch_size={config.batch_size}: they are an epoch's")
    if config.has_adapters:
        raise UserError("peft= cannot be simulated: the work is counted of a model whose weights all train; drop it")
    _check_sizes(config)
    if config.parallel.world_size is not None and config.parallel.arrangement != "single":  # which has one itself
        raise UserError(
            f"parallel.world_size={config.parallel.world_size} has no effect here: the devices are cluster.num_nodes x "
            "cluster.devices_per_node"
        )
    if config.parallel.device_chunk_gib is not None:
        raise UserError(
            "parallel.device_chunk_gib has no effect here: no cluster says how fast its host memory is; drop it"
        )
    config.cluster.speed(config.precision)  # refuses a precision whose speed is not known


SIZES = {
    "depth": "num_blocks", "num_hidden_layers": "num_blocks", "embed_dim": "hidden_size", "hidden_size": "hidden_size",
    "num_heads": "num_heads", "num_attention_heads": "num_heads", "mlp_ratio": "mlp_ratio",
}  # fmt: skip
"""Sizes of a shape by the names that models have for them."""


def _check_sizes(config: SimulationConfig) -> None:
    """Refuses a model that is another one than its shape, by which alone it is simulated."""
    for option, value in getattr(config.model, "options", {}).items():
        name = SIZES.get(option)
        if name is not None and getattr(config.shape, name) != value:
            raise UserError(
                f"model.options.{option}={value} and shape.{name}={getattr(config.shape, name)} are two models: a "
                f"simulation takes its sizes from shape=; give shape.{name}={value} as well"
            )
