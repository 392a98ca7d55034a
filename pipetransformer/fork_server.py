"""Imported first by the process that ranks are forked from: it ends with the launcher, and they end with it.

The system tells a process of its parent's end if asked to. A rank asks for an interrupt (``torch.multiprocessing``).
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h

if sys.platform == "linux":
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == 1:  # it was too late to ask
        os._exit(0)
