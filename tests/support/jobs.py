"""Runs of the whole system on the ranks of the pool, configured as on the command line."""

import copy
import gc
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import torch
import torch.distributed as dist
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig

from pipetransformer.autopipe.cluster import Cluster
from pipetransformer.autopipe.plan import Plan
from pipetransformer.autopipe.profile import AffineTime, LayerProfile, MeshProfile, Profile
from pipetransformer.config import compose
from pipetransformer.config.arguments import groups, read_arguments
from pipetransformer.config.names import in_options
from pipetransformer.config.schema import Config, SimulationConfig
from pipetransformer.errors import UserError
from pipetransformer.mesh import StageMesh
from pipetransformer.models.stack import LayerStack
from pipetransformer.optim.base import OptimizerSpec
from pipetransformer.planning.planner import Planner
from pipetransformer.profiling.kept import profile_key
from pipetransformer.profiling.layers import Batches, profile
from pipetransformer.profiling.meshes import profile_mesh
from pipetransformer.profiling.overhead import StepOverheads
from pipetransformer.report import event_log
from pipetransformer.runtime import precision
from pipetransformer.runtime.batch import SampleLoss
from pipetransformer.runtime.groups import broadcast_from_rank0
from pipetransformer.runtime.precision import Precision
from pipetransformer.runtime.result import TransitionReport
from pipetransformer.training import planner_setup as setup
from pipetransformer.training.run import run_rank
from support.pool import Pool

ROOT = Path(__file__).parents[2]
TINY = (
    "logger=none",
    "dataset.max_train_samples=64",
    "dataset.max_eval_samples=40",
    "model.options={patch_size: 4, embed_dim: 16, depth: 2, num_heads: 2}",
    "epochs=2",
    "batch_size=16",
)


@dataclass(frozen=True)
class Job:
    """A run that has come to its end, well or not."""

    folder: Path
    error: str

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.folder / "summary.json").read_text())

    def events(self, name: str) -> list[dict[str, Any]]:
        log = self.folder / "metrics.jsonl"  # not there where the run was refused early
        lines = log.read_text().splitlines() if log.exists() else []
        return [event for event in map(json.loads, lines) if event["event"] == name]

    @property
    def losses(self) -> list[float]:
        return [step["loss"] for step in self.events("step")]

    @property
    def messages(self) -> list[str]:
        return [warning["message"] for warning in self.events("warning")]


def loaded(*overrides: str) -> Config:
    """The configuration of ``python train.py <overrides>``.

    Hydra takes as long as a short run, so it composes each choice of groups once; options are set as it sets them.
    """
    try:
        return _of_groups("config", Config, read_arguments(overrides))
    except HydraException:
        return compose.compose_training(overrides)  # which tells what is wrong in the words of the command


def loaded_simulation(*overrides: str) -> SimulationConfig:
    """The configuration of ``python -m pipetransformer.simulate <overrides>``, in the same way."""
    try:
        return _of_groups("simulate", SimulationConfig, read_arguments(overrides, simulation=True))
    except HydraException:
        return compose.compose_simulation(overrides)


C = TypeVar("C", bound=Config)


def _of_groups(name: str, kind: type[C], arguments: Sequence[str]) -> C:
    names = groups(simulation=True)
    options = [each for each in arguments if each.partition("=")[0] not in names]
    choices = tuple(each for each in arguments if each not in options)
    node = copy.deepcopy(_composed(name, kind, choices))
    ConfigLoaderImpl._apply_overrides_to_config([_parsed(option) for option in options], node)
    return compose.load(node, kind)


@cache
def _composed(name: str, kind: type[Config], choices: tuple[str, ...]) -> DictConfig:
    return compose._compose(name, choices, kind)


@cache
def _parsed(option: str) -> Override:
    return OverridesParser.create().parse_override(option)


def run_job(
    pool: Pool, world_size: int, folder: Path, *overrides: str, made_up_times: bool = False,
    first_loss_scale: float = precision.INITIAL_SCALE,
) -> Job:  # fmt: skip
    """Runs on ``world_size`` ranks; what the user can mend comes back in :attr:`Job.error`."""
    folder.mkdir(parents=True)
    errors = pool.run(world_size, play, overrides, folder, made_up_times, first_loss_scale)
    assert len(set(errors)) == 1, f"the ranks disagree: {errors}"
    return Job(folder, errors[0])


def play(
    overrides: tuple[str, ...], folder: Path, made_up_times: bool, first_loss_scale: float = precision.INITIAL_SCALE,
    run: Callable[..., object] = run_rank,
) -> str:  # fmt: skip
    """One rank of a run, in a world that is open; gives what the user can mend."""
    try:
        with (
            _without_network(),
            with_made_up_times() if made_up_times else _measured_times(),
            mock.patch.object(precision, "INITIAL_SCALE", first_loss_scale),
            mock.patch.object(gc, "freeze"),  # a run's process ends with it; here what it keeps would stay for ever
        ):
            run(composed(overrides), folder, torch.device("cpu"), {}, None)
    except UserError as error:
        return in_options(error)
    return ""


def play_with_steps_held_back(overrides: tuple[str, ...], folder: Path) -> str:
    """The same with steps that follow each other as fast as they may: none is written to the log for its own sake."""
    with mock.patch.object(event_log, "HOLD_S", math.inf):
        return play(overrides, folder, made_up_times=True)


def composed(overrides: tuple[str, ...]) -> Config:
    """Composes on rank 0 and broadcasts, as the launcher composes for all ranks."""
    config: Config | UserError | None = None
    if dist.get_rank() == 0:
        try:
            config = loaded(*overrides)
        except UserError as error:
            config = error
    config = broadcast_from_rank0(config)
    if isinstance(config, UserError):
        raise config
    assert config is not None, "rank 0 has composed"
    return config


@contextmanager
def _without_network() -> Iterator[None]:
    """The hub's libraries give up at once, as with ``HF_HUB_OFFLINE=1``."""
    with (
        mock.patch("huggingface_hub.constants.HF_HUB_OFFLINE", True),
        mock.patch("datasets.config.HF_HUB_OFFLINE", True),
    ):
        yield


@contextmanager
def _measured_times() -> Iterator[None]:
    yield


def corrected_by(planner: Planner, plan: Plan, measured_s: float) -> float:
    """Corrects nothing: measured steps do not take what was made up."""
    return planner.predict(plan)


@contextmanager
def with_made_up_times() -> Iterator[None]:
    """Plans follow from bytes alone."""
    with (
        mock.patch.object(setup, "profile", made_up_profile),
        mock.patch.object(setup, "profile_mesh", made_up_mesh_profile),
        mock.patch("pipetransformer.profiling.layers.measure_contention", return_value=1.0),
        mock.patch("pipetransformer.profiling.layers.measure_waiting", return_value=0.0),
        mock.patch("pipetransformer.profiling.meshes._Exchanges.seconds", return_value=0.0),
        mock.patch.object(setup, "measure_messages", return_value=((1e-3, 1e12), None)),
        mock.patch.object(setup, "measure_all_reduces", return_value=((1e-3, 1e12), None)),
        mock.patch.object(setup, "measure_step_overheads", return_value=StepOverheads(0.0)),
        mock.patch.object(setup, "measure_sharding_overhead", return_value=(0.0, 0.0)),
        mock.patch.object(setup, "measure_reading", return_value=AffineTime(0.0, 0.0)),
        mock.patch.object(Planner, "correct", corrected_by),
        mock.patch.object(TransitionReport, "overhead_s", 0.0),
    ):
        yield


_made_up_profiles: dict[str, Profile] = {}


def made_up_profile(
    stack: LayerStack, loss: SampleLoss, batches: Batches, optimizer: OptimizerSpec, device: torch.device,
    precision: Precision, devices_per_node: int = 1, randomness: str = "sample",
) -> Profile:  # fmt: skip
    """One second per layer and sample, whatever the machine does. The bytes are measured in the first of equal jobs."""
    args = (stack, loss, batches, optimizer, device, precision, devices_per_node, randomness)
    key = profile_key(stack, loss, batches, "", optimizer, device, precision, devices_per_node, randomness=randomness)
    if key not in _made_up_profiles:
        measured = profile(*args)
        layers = tuple(_made_up(layer, 1.0) for layer in measured.layers)
        _made_up_profiles[key] = replace(measured, layers=layers)
    return _made_up_profiles[key]


_made_up_mesh_profiles: dict[tuple[str, StageMesh, int], MeshProfile] = {}


def made_up_mesh_profile(
    stack: LayerStack, loss: SampleLoss, mesh: StageMesh, batches: Batches, optimizer: OptimizerSpec,
    device: torch.device, precision: Precision, cluster: Cluster,
) -> MeshProfile:  # fmt: skip
    """The same in equal parts; exchanges take what their bytes take."""
    key = profile_key(stack, loss, batches, "", optimizer, device, precision, 1), mesh, dist.get_world_size()
    if key not in _made_up_mesh_profiles:
        measured = profile_mesh(stack, loss, mesh, batches, optimizer, device, precision, cluster)
        parts = mesh.num_ranks / mesh.batch_ways
        layers = tuple(replace(shard, layer=_made_up(shard.layer, 1 / parts)) for shard in measured.layers)
        _made_up_mesh_profiles[key] = measured._replace(layers=layers)
    return _made_up_mesh_profiles[key]


def _made_up(layer: LayerProfile, seconds: float) -> LayerProfile:
    passes = {name: AffineTime(0.0, seconds) for name in ("forward", "input_grad", "weight_grad", "lowest_grad")}
    none = AffineTime(0.0, 0.0)
    return replace(layer, optimizer_s=0.0, checkpointing=none, loss_forward=none, **passes)
