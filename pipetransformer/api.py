"""The public functions that take a whole configuration."""

from datetime import datetime
from pathlib import Path
from typing import Any

from pipetransformer.config.schema import Config, as_plain, write_config
from pipetransformer.config.validate import validate
from pipetransformer.launch.start import preflight, start


def train(config: Config, run_dir: str | Path | None = None) -> dict[str, Any]:
    """Trains as the command line does: one process per device, or in this one under torchrun.

    A script that calls it needs no ``__main__`` guard, unless it defines a spec of the configuration itself.

    Args:
        config: The run, for example ``Config(model=TimmModel(name="vit_tiny_patch16_224"), dataset=Digits(), ...)``.
        run_dir: Folder for events, summary and model; by default ``outputs/<date>/<time>``.

    Returns:
        The contents of ``summary.json``; under torchrun an empty dictionary on all ranks but 0.

    Raises:
        UserError: A value that the user can change, in the names of the command line's options, which are those of the
            configuration's attributes.
        RuntimeError: Any other failure of a rank, with its trace.
        KeyboardInterrupt: The run was interrupted.
    """
    validate(config)
    preflight(config)
    folder = Path(run_dir if run_dir is not None else f"outputs/{datetime.now():%Y-%m-%d/%H-%M-%S}").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    write_config(config, folder)
    return start(config, folder, as_plain(config))
