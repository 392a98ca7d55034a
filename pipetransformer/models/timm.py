"""timm's Vision Transformers (ViT, DeiT, EVA and their kin) as a flat stack, and whether timm has one of a name."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pipetransformer.errors import UserError
from pipetransformer.hub import TIMEOUT_S
from pipetransformer.models.base import Head, ModelSpec
from pipetransformer.models.files import PICKLES, SAFE, refuse_pickle
from pipetransformer.models.hub import CONFIG, check_folder, check_repository, has_file

if TYPE_CHECKING:
    from torch import Tensor, nn

    from pipetransformer.models.stack import LayerStack
    from pipetransformer.models.timm_layers import FlatModel
    from pipetransformer.models.timm_weights import Create, RandomInit


_VISION_TRANSFORMERS = ("vit_", "deit", "eva")
NAMES = (
    "supported is what timm builds as a VisionTransformer or an Eva: vit_*, deit_*, deit3_*, eva_*, eva02_* and "
    "folders with one of these"
)
_NOT_AN_OPTION = {
    "num_classes": "it follows from the data",
    "in_chans": "use model.num_channels",
    "img_size": "use model.image_size",
    "pretrained": "use model.pretrained",
    "checkpoint_path": "use model.name=<folder> with config.json and model.safetensors",
}
_RESIZING: dict[str, Any] = {
    "interpolation": "bilinear",
    "crop_mode": "center",
    "crop_pct": 1.0,
    "test_input_size": None,
    "test_crop_pct": None,
    "label_names": None,  # those of the model that it began with
    "label_descriptions": None,
}
"""The data's preprocessing in timm's words: resize the shorter side, crop the middle."""


@dataclass(frozen=True, kw_only=True)
class TimmModel(ModelSpec):
    """A Vision Transformer from timm: its name there or on the hub, or a folder with config.json and its weights.

    Attributes:
        options: Arguments of ``timm.create_model``: patch_size, embed_dim, depth, num_heads, drop_path_rate, ...
        image_size: Side length in pixels; ``None`` takes the published model's, or the data's own from scratch.
        num_channels: Image channels; ``None`` takes the published model's, or the data's own from scratch.
    """

    options: dict[str, Any] = field(default_factory=dict)
    image_size: int | None = None
    num_channels: int | None = None

    modality: ClassVar[str] = "image"
    libraries: ClassVar[tuple[str, ...]] = ("timm",)

    def check(self) -> None:
        self._check_picture(image_size=self.image_size, num_channels=self.num_channels)
        for option, remedy in _NOT_AN_OPTION.items():
            if option in self.options:
                raise UserError(f"model.options.{option}={self.options[option]} is not an option: {remedy}")
        if self.options.get("patch_drop_rate"):
            raise UserError(
                f"model.options.patch_drop_rate={self.options['patch_drop_rate']}: images would differ in tokens and "
                "in what the cache may keep; leave it out, or use drop_path_rate to regularise"
            )

    def check_exists(self, timeout_s: float = TIMEOUT_S) -> None:
        scheme, _, name = self._source().rpartition(":")
        if scheme == "local-dir":
            check_folder(name, "give one that timm.models.save_for_hf wrote")
            self._check_pickle({"source": "local-dir", "file": name})
        elif scheme:
            check_repository(self.name, name, CONFIG, timeout_s)
        else:
            check_name(name)
            place = repository(name) if self.pretrained else None
            if place is not None:  # timm may know other places, too
                check_repository(self.name, place, "model.safetensors", timeout_s, must_exist=False)

    def _check_pickle(self, published: Any) -> None:
        """Raises UserError where timm's ``pretrained_cfg`` leads to pickled weights alone."""
        if self.pretrained and not self.allow_pickle and (file := find_pickle(published)):
            raise refuse_pickle(self.name.removeprefix("local-dir:"), file)

    def input_format(self) -> dict[str, Any]:
        """Returns keyword arguments of ``ImageFormat``: the pretrained model's preprocessing, or a plain one."""
        if not self.pretrained:
            return {"size": self.image_size, "num_channels": self.num_channels, "mean": (0.5,), "std": (0.5,)}
        from timm.data.config import resolve_model_data_config

        published = resolve_model_data_config(self._meta_model())
        num_channels, size, _ = published["input_size"]
        wanted = self.num_channels or num_channels
        return {
            "size": self.image_size or size,
            "num_channels": wanted,
            "mean": _per_channel(published["mean"], wanted),
            "std": _per_channel(published["std"], wanted),
        }

    def build_meta(self, head: Head, input_shape: tuple[int, ...], seed: int) -> LayerStack:
        from pipetransformer.models.stack import seeded
        from pipetransformer.models.timm_layers import split_layers
        from pipetransformer.models.timm_weights import RandomInit

        self.check()
        self._check_data(head, input_shape)
        num_channels, size, _ = input_shape
        arguments = {"num_classes": head.num_outputs, "in_chans": num_channels, "img_size": size}
        create = partial(self._create, **arguments)
        model = create(pretrained=False, device="meta")
        with seeded(seed):
            idle = self._check_layers(model, head.num_outputs, num_channels)
        stack = split_layers(model, (arguments, head.labels))
        drawn = RandomInit(model, stack, create, seed)
        if self.pretrained:
            stack = self._published(stack, create, drawn, seed)
        else:
            stack.source = drawn
        stack.note_idle(idle)
        return stack

    def save(self, stack: LayerStack, state: dict[str, Tensor], folder: Path) -> None:
        """Writes model.safetensors and config.json for ``timm.create_model("local-dir:<folder>", pretrained=True)``.

        Its ``pretrained_cfg`` asks for the pictures that the model was trained on: timm's transform for it resizes and
        normalises as the run did.
        """
        import torch
        from timm.models import save_for_hf

        arguments, labels = stack.config
        with torch.device("meta"):
            model = self._create(pretrained=False, **arguments)
        model.load_state_dict({name: tensor.cpu() for name, tensor in state.items()}, assign=True)
        num_channels, size = arguments["in_chans"], arguments["img_size"]
        wanted = self.input_format()
        published = {
            **_RESIZING,
            "input_size": (num_channels, size, size),
            "mean": _per_channel(wanted["mean"], num_channels),
            "std": _per_channel(wanted["std"], num_channels),
        }
        save_for_hf(
            model,
            str(folder),
            model_config={"pretrained_cfg": published, "label_names": list(labels)},
            # recent versions of timm know their arguments, older ones have to be told
            model_args={**self.options, "in_chans": num_channels, "img_size": size},
            safe_serialization=True,
        )

    def _published(self, stack: LayerStack, create: Create, drawn: RandomInit, seed: int) -> LayerStack:
        """Returns the stack with pretrained weights as its source, or loaded if they cannot be read layer by layer."""
        from pipetransformer.models.stack import seeded
        from pipetransformer.models.timm_layers import BLOCKS, split_layers
        from pipetransformer.models.timm_weights import Pretrained, find_checkpoint

        self._check_pickle(drawn.model.pretrained_cfg)
        with self._explained():
            checkpoint = find_checkpoint(drawn.model.pretrained_cfg)
        source = Pretrained(checkpoint, create, drawn) if checkpoint else None
        if source and not any(name.startswith(BLOCKS) for name in source.converted):
            stack.source = source
            return stack
        with seeded(seed):
            whole = split_layers(create(pretrained=True), stack.config)
        why = "timm converts them" if source else "there is no model.safetensors"
        warnings.warn(
            f"every process reads all weights of model.name={self.name} before it keeps its own: {why}; save the model "
            "once with timm.models.save_for_hf to avoid it",
            stacklevel=2,
        )
        return whole

    def _check_layers(self, model: FlatModel, num_outputs: int, num_channels: int) -> set[str]:
        from pipetransformer.models.timm_layers import check_runs_by_layers

        create = partial(self._create, num_classes=num_outputs, in_chans=num_channels)
        try:
            return check_runs_by_layers(model, create, num_outputs)
        except ValueError as error:
            raise UserError(f"model.name={self.name} cannot be trained layer by layer: {error}") from error
        except (ArithmeticError, RuntimeError) as error:  # in its first pass
            raise UserError(f"{self.name} does not run with model.options={self.options}: {error}") from error

    def _check_data(self, head: Head, input_shape: tuple[int, ...]) -> None:
        if head.kind != "image":
            raise UserError(
                f"a timm model has an image head, the dataset asks for a {head.kind} head; choose a text model"
            )
        num_channels, height, width = input_shape
        if height != width:
            raise UserError(f"images of {height}x{width} pixels are not square; give model.image_size=<pixels>")
        patches: Any = self._meta_model().patch_embed
        pixels_per_patch = patches.feat_ratio()
        if height % pixels_per_patch:
            raise UserError(
                f"images of {height}x{width} pixels do not divide into patches of {pixels_per_patch}; give "
                f"model.image_size a multiple of {pixels_per_patch}, or change model.options.patch_size"
            )
        expected = self.input_format()["num_channels"]
        if expected not in (None, num_channels):
            raise UserError(
                f"images have {num_channels} channels, the model takes {expected}; "
                f"give model.num_channels={num_channels}"
            )

    def _meta_model(self) -> FlatModel:
        """Returns the model as published, without storage, to read its sizes and its preprocessing."""
        import torch

        with torch.device("meta"):
            return self._create(pretrained=False)

    def _create(self, pretrained: bool, **arguments: Any) -> FlatModel:
        import timm

        from pipetransformer.models.stack import WithoutFilling
        from pipetransformer.models.timm_layers import FlatModel

        with self._explained(), WithoutFilling():
            model = timm.create_model(self._source(), pretrained=pretrained, **{**self.options, **arguments})
        if not isinstance(model, FlatModel):
            raise UserError(f"model.name={self.name} is a {type(model).__name__}{why_not_flat(model)}; {NAMES}")
        return model

    @contextmanager
    def _explained(self) -> Iterator[None]:
        from safetensors import SafetensorError

        try:
            yield
        except UserError:
            raise
        except (TypeError, AssertionError, ArithmeticError) as error:
            if self.options:
                replace(self, options={})._meta_model()  # of another structure it takes other options
            raise UserError(f"{self.name} does not go with model.options={self.options}: {error}") from error
        except (OSError, RuntimeError, ValueError, KeyError, SafetensorError) as error:
            raise UserError(
                f"timm could not load model.name={self.name} (model.pretrained={self.pretrained}): {error}. Without "
                "network give model.name=<folder> with config.json and model.safetensors, HF_HUB_OFFLINE=1 for what "
                "was downloaded before, or a name that timm lists with model.pretrained=false to start from scratch"
            ) from error

    def _source(self) -> str:
        """Returns the name with timm's scheme for a folder or the hub, or as it is for timm's own list."""
        if Path(self.name).is_dir():
            return f"local-dir:{self.name}"
        return f"hf-hub:{self.name}" if "/" in self.name and ":" not in self.name else self.name


def why_not_flat(model: nn.Module) -> str:
    """Returns the reason why a model of timm is no flat list of layers, as far as it shows."""
    if len({info["num_chs"] for info in getattr(model, "feature_info", ())}) > 1:
        return ", whose hidden state changes its shape from stage to stage, where one shape goes between all layers"
    if type(model).__name__ == "NaFlexVit":
        return ", whose images differ in their number of patches, where all samples have one shape"
    return ""


def find_pickle(published: Any) -> str | None:
    """Returns the pickle that timm reads for a ``pretrained_cfg``, or ``None`` where it has other weights or none."""
    source, repository = published.get("source"), published.get("hf_hub_id")
    if source == "local-dir":
        files = sorted(each.name for each in Path(published["file"]).iterdir())
        return None if f"model{SAFE}" in files else next((each for each in files if each.endswith(PICKLES)), None)
    if source != "hf-hub" and published.get("file"):
        return _if_pickle(str(published["file"]))
    if not repository:
        return _if_pickle(published.get("url") or "")
    pickled = _if_pickle(published.get("hf_hub_filename") or "pytorch_model.bin")
    twins = {f"model{SAFE}", f"open_clip_model{SAFE}", f"{Path(pickled).stem}{SAFE}"} if pickled else ()
    if pickled and not any(has_file(repository, twin) for twin in twins) and has_file(repository, pickled):
        return pickled
    return None


def _if_pickle(file: str) -> str | None:
    return None if not file or file.endswith((SAFE, ".npz")) else file


def _per_channel(values: tuple[float, ...], num_channels: int) -> tuple[float, ...]:
    """Returns the values if there is one per channel, else their mean for each channel."""
    return tuple(values) if len(values) == num_channels else (sum(values) / len(values),) * num_channels


def check_name(name: str) -> None:
    """Raises :class:`UserError` with the nearest names where timm has no architecture ``name`` or ``name.tag``.

    The names are read from timm's source: importing timm imports torch.
    """
    architecture = name.partition(".")[0]
    if re.search(rf"^def {re.escape(architecture)}\(|^    '{re.escape(architecture)}':", _source(), re.MULTILINE):
        return
    names = [known for known in architectures() if known.startswith(_VISION_TRANSFORMERS)]
    near = get_close_matches(architecture, names, n=3, cutoff=0.6)
    raise UserError(
        f"timm has no model.name={name}; "
        + (f"did you mean {' or '.join(near)}?" if near else "give a name that timm lists, owner/name or a folder")
    )


def architectures() -> list[str]:
    """Returns the functions by which timm makes models."""
    return re.findall(r"^@register_model\s+def (\w+)\(", _source(), re.MULTILINE)


def repository(name: str) -> str | None:
    """Returns where timm's own weights of ``name`` or ``name.tag`` are on the hub, or None where timm does not say."""
    entry = rf"^    '({re.escape(name)}(?:\.\w+)?)\*?': _cfg\((.*?)\),$"
    tagged = re.search(entry, _source(), re.MULTILINE | re.DOTALL)
    return f"timm/{tagged[1]}" if tagged and "hf_hub_id='timm/'" in tagged[2] else None


@cache
def _source() -> str:
    spec = find_spec("timm")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    folder = Path(spec.submodule_search_locations[0]) / "models"
    return "\n".join(file.read_text(encoding="utf-8") for file in sorted(folder.glob("*.py")))
