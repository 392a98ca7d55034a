"""One folder for all that libraries write in passing, which goes when the launcher ends.

Torch's launcher leaves its folders behind, and forked ranks end without the clean-up that libraries have registered.
"""

import atexit
import os
import shutil
import tempfile
from functools import cache
from multiprocessing import util


@cache
def keep_together() -> None:
    """From here on the temporary files of this process and of those that it starts lie in the folder."""
    util.get_temp_dir()  # made before and apart, for the path of a socket has to be short; it goes by itself
    folder = tempfile.mkdtemp(prefix="pipetransformer-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ["TMPDIR"] = tempfile.tempdir = folder
