"""The command that shows and removes stores tells what is there in plain words, and touches nothing that is in use."""

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from support.caches import OURS

from pipetransformer import stores
from pipetransformer.autocache.about import ABOUT, About
from pipetransformer.autocache.persistent import IDENTITY, lock_store_dir
from pipetransformer.stores import HEADER, main

SIZE = 64 * 1024


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two splits with stored features."""
    for name in ("train", "dev"):
        with lock_store_dir(tmp_path, replace(OURS, split_name=name), "outputs/1") as store:
            (store.path / f"{name}.features").write_bytes(bytes(SIZE))
            parts = {"file train.tsv": "ab12", "tokenizer": "cd34"}
            made = time.time() - 7300
            About(owner="outputs/1", made=made, level=4, key="00ff", num_stored=60, num_samples=64, parts=parts).write(
                store.path
            )
    return tmp_path


def output(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    main(arguments)
    return capsys.readouterr().out.splitlines()


def test_list_has_a_line_for_each_store(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    header, dev, train = output(capsys, "list", str(root))
    assert header.split("  ")[0] == HEADER[0]
    for line, split in ((dev, "dev"), (train, "train")):
        assert all(word in line for word in ("some/vit_tiny", split, "60 of 64", "4", "KiB", "2 h", "outputs/1", "no"))


def test_a_store_in_use_is_shown_with_its_run_and_not_removed(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with lock_store_dir(root, OURS, "outputs/2", shares="the output of block 4"):
        _, dev, train = output(capsys, "list", str(root))
        assert dev.endswith("no")
        assert "fills for outputs/2 (process " in train
        with pytest.raises(SystemExit, match=r"error: .*/train is in use by outputs/2 \(process .*Nothing was removed"):
            main(["remove", str(root)])
    assert len(list(root.rglob("*.features"))) == 2


def test_whether_a_store_of_another_user_is_in_use_may_stay_unknown(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(path: Path) -> bool:
        raise PermissionError

    monkeypatch.setattr(stores, "is_locked", denied)
    assert [line.split()[-1] for line in output(capsys, "list", str(root))] == ["use", "?", "?"]


def test_inspect_names_all_that_a_store_depends_on(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = next(root.glob("*/node0/train"))
    lines = [line.strip() for line in output(capsys, "inspect", str(store))]
    assert lines[0] == str(store)
    for line in (
        "model: some/vit_tiny TimmModel heads=2", "hidden size: 16", "precision: float32", "level: 4",
        "key of the level: 00ff", "owner: outputs/1", "made of file train.tsv: ab12", "made of tokenizer: cd34",
        "in use: no",
    ):  # fmt: skip
        assert line in lines
    assert any(line.startswith("samples stored: 60 of 64") for line in lines)


def test_remove_says_what_it_frees_and_leaves_the_rest(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "notes.txt").write_text("mine")
    (line,) = output(capsys, "remove", str(root))
    assert line.startswith("removed 2 stores, ")
    assert float(line.split()[3]) >= 2 * SIZE / 1024
    assert [path.name for path in root.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000])
def test_damaged_files_of_a_store_stop_no_command(text: str, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in (ABOUT, IDENTITY):
        for file in root.rglob(name):
            file.write_text(text)
    _, dev, train = output(capsys, "list", str(root))
    assert "not filled" in train
    assert "dev" in dev
    assert any("damaged: no run reads this store" in line for line in output(capsys, "inspect", str(root)))
    assert output(capsys, "remove", str(root))[0].startswith("removed 2 stores")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["show", "."], "show is no command"),
        (["inspect"], "inspect takes one folder, that of cache.path=, and got 0"),
        (["remove", "a", "b"], "remove takes one folder, that of cache.path=, and got 2"),
        (["list", "nowhere"], "nowhere is no folder; give the one of cache.path="),
        (["remove", "{empty}"], "has no stores; give the folder of cache.path="),
    ],
)
def test_a_wrong_call_is_answered_in_one_line_with_the_remedy(arguments: list[str], words: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        main([each.format(empty=tmp_path) for each in arguments])
    assert words in str(ended.value)
    assert "\n" not in str(ended.value)


def test_help_is_shown_without_torch(capsys: pytest.CaptureFixture[str]) -> None:
    assert output(capsys, "--help")[0].startswith("Shows and removes the stores")
    shown = "import sys; from pipetransformer.stores import main; main(['--help'])"
    code = f"{shown}; print({{'torch', 'hydra'}} & {{*sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"
