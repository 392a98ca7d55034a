"""``train.py`` with made-up times, to whose workers a fault happens: ``faulty_train.py <fault as JSON> ...``."""

import json
import os
import sys
from contextlib import ExitStack, nullcontext
from pathlib import Path

ROOT = Path(__file__).parents[2]
TRAIN, FAULT = ROOT / "train.py", "PIPETRANSFORMER_TEST_FAULT"
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

if __name__ == "__mp_main__":  # in a worker, which imports the program that it was started by
    from support.faults import Fault
    from support.jobs import with_made_up_times

    changes = ExitStack()
    changes.enter_context(with_made_up_times())
    changes.enter_context(Fault(**json.loads(os.environ[FAULT])).injected())

if __name__ == "__main__":
    os.environ[FAULT] = sys.argv.pop(1)
    from pipetransformer.launch import elastic

    elastic._main_not_imported = nullcontext  # type: ignore[assignment]  # workers do import this program
    exec(compile(TRAIN.read_text(), str(TRAIN), "exec"))  # so that this file stays the program
