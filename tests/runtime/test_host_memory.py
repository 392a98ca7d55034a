"""Freed memory stays with a rank from step to step, and goes back to the system at a transition."""

import ctypes
import os
import resource
import subprocess
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from unittest import mock

import pytest
from support.cases import Case
from support.observations import observe
from support.plans import PIPE_TO_DATA
from support.pool import Pool

from pipetransformer.config.schema import Config
from pipetransformer.runtime import host_memory
from pipetransformer.training import run

NUM_BYTES = 64 * 2**20
PAGES = NUM_BYTES // resource.getpagesize()
SCRIPT = f"""
import sys
from pathlib import Path
sys.path.append({str(Path(host_memory.__file__).parent)!r})
import host_memory  # alone: with its package it takes seconds

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1])

{{setting}}
before = resident()
bytearray({NUM_BYTES + 2**16})  # free again at once; torch takes its memory from the same allocator
freed = resident()
host_memory.trim()
print(freed - before, resident() - before)
"""
KEEP = "host_memory.keep_freed_memory()"
needs_glibc = pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"), reason="needs glibc's allocator"
)


def pages_more(setting: str, **variables: str) -> tuple[int, int]:
    """Pages that a process has more after it freed a block, and after a transition."""
    env = {name: value for name, value in os.environ.items() if name not in host_memory.SETTINGS} | variables
    command = [sys.executable, "-c", SCRIPT.format(setting=setting)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    freed, trimmed = map(int, done.stdout.split())
    return freed, trimmed


@needs_glibc
def test_a_rank_keeps_what_it_frees_until_it_is_trimmed() -> None:
    freed, trimmed = pages_more(KEEP)
    assert freed >= PAGES
    assert trimmed < PAGES // 4


@needs_glibc
@pytest.mark.parametrize(
    ("setting", "variables"), [("", {}), (KEEP, {"MALLOC_MMAP_THRESHOLD_": "131072"})], ids=["as it is", "the user's"]
)
def test_memory_goes_back_at_once_where_nobody_asks_to_keep_it(setting: str, variables: dict[str, str]) -> None:
    freed, _ = pages_more(setting, **variables)
    assert freed < PAGES // 4


@needs_glibc
def test_memory_that_the_user_keeps_is_not_trimmed() -> None:
    kept = "glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=2147483647"
    freed, trimmed = pages_more("", GLIBC_TUNABLES=kept)
    assert min(freed, trimmed) >= PAGES


def num_trims(case: Case, folder: str) -> int:
    with mock.patch.object(host_memory, "trim") as trim:
        observe(case, PIPE_TO_DATA, folder)
    return trim.call_count


def test_every_transition_gives_memory_back(pool: Pool, bert_config: Path, tmp_path: Path) -> None:
    assert pool.run(4, num_trims, Case("vit", bert_config), str(tmp_path)) == [len(PIPE_TO_DATA)] * 4


def test_a_job_keeps_its_memory_before_it_opens_the_world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    done = list[str]()

    def opened(_: object) -> AbstractContextManager[None]:
        done.append("world")
        return nullcontext()

    monkeypatch.setattr(run, "keep_freed_memory", lambda: done.append("memory"))
    monkeypatch.setattr(run, "open_world", opened)
    monkeypatch.setattr(run, "limit_threads", lambda: None)
    monkeypatch.setattr(run.interrupt, "listen", lambda: None)
    monkeypatch.setattr(run, "_run", lambda *_: {})
    run.run_job(mock.create_autospec(Config, parallel=None), tmp_path, {})
    assert done == ["memory", "world"]
