"""Ends the fork server with the launcher: importing this module, which the server does first, asks Linux for it.

The forked ranks then end too: ``torch.multiprocessing`` has each interrupted at its parent's death.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h

if sys.platform == "linux":
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == 1:  # the launcher was gone before
        os._exit(0)
