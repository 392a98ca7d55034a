"""Ends the fork server with the launcher: importing this module, which the server does first, asks Linux for it.

The forked ranks then end too: ``torch.multiprocessing`` has each interrupted at its parent's death.
"""

import os
import sys

from pipetransformer.parent_process import LAUNCHER, end_with_parent

end_with_parent()
if sys.platform == "linux" and os.getppid() != int(os.environ.get(LAUNCHER, os.getppid())):  # it was gone before
    os._exit(0)
