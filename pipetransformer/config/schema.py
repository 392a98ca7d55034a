"""The configuration of a run as a dataclass, and the same as plain values for the record."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from numbers import Integral, Real
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from pipetransformer.config.sections import (
    Cache,
    Checkpointing,
    Evaluation,
    Guard,
    Launch,
    Loading,
    Parallel,
    Profiling,
    Resume,
    StaticPipeline,
    Targets,
)
from pipetransformer.errors import UserError
from pipetransformer.models.adapters import NoAdapters
from pipetransformer.report.run_folder import CONFIG
from pipetransformer.report.secrets import redact
from pipetransformer.report.wandb import NoLogger

if TYPE_CHECKING:
    from pipetransformer.data.base import DatasetSpec
    from pipetransformer.freeze.base import FreezePolicy
    from pipetransformer.models.adapters import AdapterSpec
    from pipetransformer.models.base import ModelSpec
    from pipetransformer.optim.base import OptimizerSpec
    from pipetransformer.report.reporter import LoggerSpec


CONF = Path(__file__).resolve().parents[1] / "conf"
HALF_PRECISIONS = ("bfloat16", "float16")
PRECISIONS = ("float32", "float64", *HALF_PRECISIONS)
BATCHINGS = ("uniform", "bucketed")
RANDOMNESS = ("sample", "device")
DEFAULT_RESTARTS = 3


@dataclass(frozen=True, kw_only=True)
class Config:
    """One run: the specs of the groups and the general options.

    Attributes:
        model, dataset, freeze, optim, peft, logger: A spec each; its class is what ``_target_`` names in the group's
            YAML.
        batch_size: Samples of one optimizer step over all replicas, whatever the topology.
        batching: One of :data:`BATCHINGS`: batches are drawn from all samples, or from samples of about one length.
        precision: One of :data:`PRECISIONS`. The last two apply to matrix products, under autocast; weights, optimizer
            state, cached features and tensors between stages stay float32. float16 scales the loss.
        randomness: One of :data:`RANDOMNESS`: dropout draws by sample, the same at any topology, or by the device's own
            generator, with other results at another one.
        compile: Blocks run as graphs of ``torch.compile``.
        log_every_s: Seconds between two step lines where the output is not a terminal.
        log_every_steps: Steps between two step lines there, in addition; ``None``: by time alone.
        verbose: Show all there is to know about each event on a terminal, as ``-v`` does.
        overwrite: Start in a run folder that holds another run, which is removed.
        dry_run: Stop before the first step, when layers are measured and time and memory of the run are estimated.
        baseline: Begin with a few steps under the best static plan of each kind, with which the run then compares its
            time as measured. They are steps of the training like any others.
        trace: Write a trace of one step of each plan, over all ranks; that step is slower.
    """

    model: "ModelSpec"
    dataset: "DatasetSpec"
    freeze: "FreezePolicy"
    optim: "OptimizerSpec"
    peft: "AdapterSpec" = field(default_factory=NoAdapters)
    logger: "LoggerSpec" = field(default_factory=NoLogger)
    parallel: Parallel = field(default_factory=Parallel)
    cache: Cache = field(default_factory=Cache)
    loader: Loading = field(default_factory=Loading)
    checkpoint: Checkpointing = field(default_factory=Checkpointing)
    evaluate: Evaluation = field(default_factory=Evaluation)
    profile: Profiling = field(default_factory=Profiling)
    resume: Resume = field(default_factory=Resume)
    launch: Launch = field(default_factory=Launch)
    guard: Guard = field(default_factory=Guard)
    overwrite: bool = False
    targets: Targets = field(default_factory=Targets)
    seed: int = 1
    epochs: int = 3
    batch_size: int = 32
    batching: str = "uniform"
    precision: str = "float32"
    randomness: str = "sample"
    compile: bool = False
    log_every_s: float = 10.0
    log_every_steps: int | None = None
    verbose: bool = False
    dry_run: bool = False
    baseline: bool = False
    trace: bool = False

    @property
    def has_adapters(self) -> bool:
        """True where few of the weights train."""
        return not isinstance(self.peft, NoAdapters)

    @property
    def may_unfreeze(self) -> bool:
        """True where frozen blocks may train again: by the policy, or by the guard, which also does it in place of a
        roll-back whose checkpoint is lost.
        """
        is_guarded = self.freeze.guard is not None and not self.freeze.is_static
        return self.freeze.may_unfreeze or (is_guarded and self.guard.freeze != "stop")

    @property
    def num_restarts(self) -> int:
        """Times that the ranks are started again after one has died."""
        given = self.launch.max_restarts
        return given if given is not None else DEFAULT_RESTARTS if self.checkpoint.enabled else 0

    @property
    def parks(self) -> bool:
        """True where the optimizer state of blocks that freeze is kept until they train again."""
        return self.may_unfreeze and self.freeze.on_unfreeze == "keep"


@dataclass(frozen=True, kw_only=True)
class SimulationConfig(Config):
    """A run that is only simulated: its options, and what stands for devices, model and data.

    Attributes:
        cluster: The devices, a :class:`~pipetransformer.simulate.hardware.Hardware`.
        shape: The model's size, a :class:`~pipetransformer.simulate.analytic.TransformerShape`.
        pipeline: The static pipeline that the run is compared with.
        num_samples: Training samples, of which ``max_train_samples`` of the dataset are an epoch's; by default the
            dataset's ``num_train_samples``.
    """

    cluster: Any
    shape: Any
    pipeline: StaticPipeline = field(default_factory=StaticPipeline)
    num_samples: int | None = None

    @property
    def samples_of_an_epoch(self) -> int:
        """Training samples after the dataset's limit.

        Raises:
            UserError: Neither the dataset says how many it has nor ``num_samples``.
        """
        known = self.num_samples if self.num_samples is not None else getattr(self.dataset, "num_train_samples", None)
        if known is None:
            raise UserError(
                f"dataset {self.dataset.name} does not say how many training samples it has; give num_samples="
            )
        limit = self.dataset.max_train_samples
        return known if limit is None else min(known, limit)


SECTIONS: dict[str, type] = {
    "parallel": Parallel,
    "cache": Cache,
    "loader": Loading,
    "checkpoint": Checkpointing,
    "evaluate": Evaluation,
    "profile": Profiling,
    "resume": Resume,
    "launch": Launch,
    "guard": Guard,
    "targets": Targets,
    "pipeline": StaticPipeline,
}
"""Sections whose options the schema itself types; the class of any other is what its ``_target_`` names."""


def as_plain(config: Config) -> dict[str, Any]:
    """Returns the configuration as containers of plain values; composed again, they give the same run.

    ``_target_`` names the class of each spec.
    """
    return {field.name: _plain(getattr(config, field.name)) for field in fields(config)}


def _plain(value: Any) -> Any:
    if not is_dataclass(value) or isinstance(value, type):
        return _untagged(value)
    kind = type(value)
    target = {} if kind in SECTIONS.values() else {"_target_": f"{kind.__module__}.{kind.__qualname__}"}
    return target | _untagged(asdict(value))


def _untagged(value: Any) -> Any:
    """Returns what YAML writes without tags: of tuples lists, of paths strings, of numpy's numbers Python's."""
    if isinstance(value, dict):
        return {name: _untagged(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_untagged(each) for each in value]
    if isinstance(value, PathLike):
        return fspath(value)
    if isinstance(value, bool) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def write_config(config: Config, folder: Path) -> None:
    """Writes the configuration to the run folder, without keys and tokens."""
    write_settings(as_plain(config), folder)


def write_settings(plain: Mapping[str, Any], folder: Path) -> None:
    """Writes settings to a run folder, without keys and tokens."""
    (folder / CONFIG).write_text(yaml.safe_dump(redact(plain), sort_keys=False), encoding="utf-8")
