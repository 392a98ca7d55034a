"""Prepares the fork server, which imports this module first: it ends with the launcher, and imports without pauses.

The forked ranks end too: ``torch.multiprocessing`` has each interrupted at its parent's death. The garbage collector
takes a fifth of the time of the imports and finds nothing; each rank turns it on again.
"""

import atexit
import gc
import os
import sys

from pipetransformer.parent_process import LAUNCHER, end_with_parent

end_with_parent()
if sys.platform == "linux" and os.getppid() != int(os.environ.get(LAUNCHER, os.getppid())):  # it was gone before
    os._exit(0)
gc.disable()
atexit.register(gc.freeze)  # the last search of all that was imported would take a second, and finds nothing either
