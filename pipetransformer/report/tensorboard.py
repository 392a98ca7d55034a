"""TensorBoard, by itself or beside Weights & Biases, with the same names of charts."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipetransformer.errors import UserError
from pipetransformer.report.charts import charts, step_of, without_idle_gains
from pipetransformer.report.reporter import LoggerSpec, check_share
from pipetransformer.report.run_folder import TENSORBOARD
from pipetransformer.report.sinks import MAX_SHARE, EventName, Sink, Sinks, Thinned, Values
from pipetransformer.report.text import flatten
from pipetransformer.report.wandb import WandbLogger

if TYPE_CHECKING:
    from torch.utils.tensorboard.writer import SummaryWriter


def _check_installed() -> None:
    if find_spec("tensorboard") is None:
        raise UserError(
            "logger=tensorboard needs a package that is not installed; pip install 'pipetransformer[tensorboard]', or "
            "take logger=wandb or none"
        )


@dataclass(frozen=True, kw_only=True)
class TensorBoardLogger(LoggerSpec):
    """One TensorBoard log per training run, in ``<run folder>/tensorboard``.

    Attributes:
        max_share: As of :class:`~pipetransformer.report.wandb.WandbLogger`.
    """

    max_share: float | None = MAX_SHARE

    def __post_init__(self) -> None:
        check_share(self.max_share)
        _check_installed()

    def open(
        self,
        run_dir: Path,
        config: dict[str, Any],
        group_default: str | None = None,
        resumed: dict[str, Any] | None = None,
    ) -> Sink:
        return Thinned(TensorBoardSink(run_dir / TENSORBOARD, config), self.max_share)


@dataclass(frozen=True, kw_only=True)
class WandbAndTensorBoard(WandbLogger):
    """Both, with the options of :class:`~pipetransformer.report.wandb.WandbLogger`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_installed()

    def open(
        self,
        run_dir: Path,
        config: dict[str, Any],
        group_default: str | None = None,
        resumed: dict[str, Any] | None = None,
    ) -> Sink:
        wandb = super().open(run_dir, config, group_default, resumed)
        return Sinks([wandb, TensorBoardLogger(max_share=self.max_share).open(run_dir, config, group_default, resumed)])


class TensorBoardSink(Sink):
    """Writes the numbers of events as scalars over the optimizer steps, and settings and summary as text.

    Where steps are repeated, by a resumed run or after the guard has rolled one back, a new file says from which step
    on TensorBoard hides what the files before it hold.

    Args:
        folder: Of the log; a resumed run adds its files.
        config: The settings of the run, without secrets.
    """

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        self._folder, self._config = folder, config
        self._writer: SummaryWriter | None = None

    def write(self, event: EventName, values: Values) -> None:
        if event == "start":
            self._begin(None)
            self._add_text("config", self._config, 0)
        elif event == "resume" or values.get("num_steps_rolled_back"):
            self._begin(values["step"] + 1)
        if self._writer is None:  # before the first step
            return
        if event == "summary":
            self._add_text("summary", dict(flatten(without_idle_gains(values))), step_of(values))
        for name, value in charts(event, values).items():
            if isinstance(value, int | float):
                self._writer.add_scalar(name, value, step_of(values))

    def _begin(self, purge_step: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.close()
        self._writer = SummaryWriter(self._folder, purge_step=purge_step)

    def _add_text(self, name: str, values: Values, step: int) -> None:
        assert self._writer is not None
        lines = json.dumps(values, indent=2, default=str).splitlines()
        self._writer.add_text(name, "\n".join(f"    {line}" for line in lines), step)  # indented: code in Markdown

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
