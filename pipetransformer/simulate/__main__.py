"""Simulates a run: ``python -m pipetransformer.simulate cluster=paper model=vit freeze=pipetransformer``. No torch."""

import json
import os
import sys
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import CompactHydraException
from omegaconf import DictConfig

from pipetransformer.config.arguments import explain, read_arguments, unwritable
from pipetransformer.config.compose import load, register
from pipetransformer.config.help import print_help
from pipetransformer.config.names import in_options
from pipetransformer.config.schema import CONF, SimulationConfig
from pipetransformer.errors import INTERRUPTED, UserError
from pipetransformer.report.trace import write_trace
from pipetransformer.simulate.result import LEGEND
from pipetransformer.simulate.run import option_names, simulate


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="simulate")
def compose_and_run(node: DictConfig) -> None:
    try:
        run(node)
    except UserError as error:
        sys.exit(explain(error))  # within the job: Hydra writes a line of its own about an error that leaves it


def run(node: DictConfig) -> None:
    """Simulates a composed configuration, prints what comes out, and writes it to the run folder."""
    config = load(node, SimulationConfig)
    try:
        result = simulate(config)
    except UserError as error:
        raise UserError(in_options(error, option_names(config))) from None
    run_dir = Path(HydraConfig.get().runtime.output_dir).resolve()
    (run_dir / "simulation.json").write_text(json.dumps(result.as_dict(), indent=1), encoding="utf-8")
    for stale in run_dir.glob("trace_*.json"):  # of a run with more plans
        stale.unlink()
    for number, events in enumerate(result.traces):
        write_trace(events, run_dir, number)
    print(f"{result.header()}\n\n{result.table()}\n({LEGEND})\n\n{result.summary()}")
    print(f"traces of one step per plan        {run_dir}/trace_*.json")


def main() -> None:
    """Runs the command line. An error that the user can fix ends in one line, without a trace."""
    if {"-h", "--help"} & {*sys.argv}:
        return print_help(sys.argv[1:], simulation=True)
    register(SimulationConfig)
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come here in place of being printed
    try:
        sys.argv[1:] = read_arguments(sys.argv[1:], simulation=True)
        compose_and_run()
    except (UserError, CompactHydraException) as error:
        sys.exit(explain(error))
    except OSError as error:  # Hydra makes the folder
        sys.exit(unwritable(error))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
