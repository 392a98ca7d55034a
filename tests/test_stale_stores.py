"""An edited file, another tokenizer, resolution or revision makes a store stale: that is said, and nothing is read."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import pytest
from support.caches import OURS
from support.jobs import TINY, Job, loaded, run_job
from support.pool import Pool
from support.texts import text_run, write_encoder, write_table

from pipetransformer.autocache.about import ABOUT, About, changed_parts, read_about
from pipetransformer.autocache.persistent import lock_store_dir, other_stores
from pipetransformer.training.store_parts import named_parts, revision

PREFIX = ("precision=float64", "epochs=2", "freeze=prefix", "freeze.num_blocks=1")
Change = Callable[[Path, Path], object]


def edit_table(data: Path, encoder: Path) -> None:
    lines = (data / "train.tsv").read_text().splitlines()
    (data / "train.tsv").write_text("\n".join([lines[0], "not " + lines[1], *lines[2:]]) + "\n")


def edit_tokenizer(data: Path, encoder: Path) -> None:
    """Exchanges the ids of two words."""
    settings = json.loads((encoder / "tokenizer.json").read_text())
    vocab = settings["model"]["vocab"]
    vocab["bird"], vocab["sings"] = vocab["sings"], vocab["bird"]
    (encoder / "tokenizer.json").write_text(json.dumps(settings))


@pytest.mark.thinned("data")
@pytest.mark.parametrize(
    ("change", "words"),
    [(edit_table, "train.tsv was edited"), (edit_tokenizer, "the tokenizer was edited")],
    ids=["data", "tokenizer"],
)
def test_an_edited_source_of_texts_is_named_and_not_read(
    change: Change, words: str, pool: Pool, tmp_path: Path
) -> None:
    data, encoder = tmp_path / "data", write_encoder(tmp_path / "encoder")
    data.mkdir()
    for name in ("train", "dev"):
        write_table(data / f"{name}.tsv", [0, 1] * 8)
    options = (*text_run(encoder, "sst2", data), *PREFIX, f"cache.path={tmp_path / 'features'}")
    first = run_job(pool, 1, tmp_path / "first", *options, made_up_times=True)
    again = run_job(pool, 1, tmp_path / "again", *options, made_up_times=True)
    assert (found(first), found(again)) == (0, 32)
    change(data, encoder)
    job = run_job(pool, 1, tmp_path / "job", *options, made_up_times=True)
    assert not job.error
    assert found(job) == (16 if change is edit_table else 0), "of the evaluation data nothing has changed"
    assert any("is stale: " in message and words in message for message in job.messages), job.messages
    assert not any("was edited" in message for message in first.messages + again.messages)


def found(job: Job) -> int:
    (fill,) = job.events("cache_fill")
    return fill["num_found"]


def test_other_evaluation_data_moves_no_sample_of_a_store_that_a_budget_binds(pool: Pool, tmp_path: Path) -> None:
    """Splits share the budgets, so that each has less beside a larger one, and its samples lie elsewhere."""
    options = (*TINY, *PREFIX, f"cache.path={tmp_path / 'features'}", "cache.memory_gib=1e-5")
    first = run_job(pool, 1, tmp_path / "first", *options, made_up_times=True)
    fewer = run_job(pool, 1, tmp_path / "fewer", *options, "dataset.max_eval_samples=20", made_up_times=True)
    again = run_job(pool, 1, tmp_path / "again", *options, made_up_times=True)
    stored = [fill["num_samples"] for job in (first, fewer) for fill in job.events("cache_fill")]
    assert (stored, found(first), found(fewer), found(again)) == ([104, 84], 0, 0, 104)
    assert not any("damaged" in message for job in (fewer, again) for message in job.messages)


def test_another_resolution_is_named_and_not_read(pool: Pool, tmp_path: Path) -> None:
    options = (*TINY, *PREFIX, f"cache.path={tmp_path / 'features'}")
    run_job(pool, 1, tmp_path / "first", *options, made_up_times=True)
    job = run_job(pool, 1, tmp_path / "job", *options, "model.image_size=16", made_up_times=True)
    assert found(job) == 0
    assert any("is stale: model.image_size=None, here 16" in message for message in job.messages), job.messages


def test_another_revision_of_the_model_is_named_and_not_read(pool: Pool, tmp_path: Path) -> None:
    trained = run_job(pool, 1, tmp_path / "trained", *TINY, made_up_times=True)
    other = run_job(pool, 1, tmp_path / "other", *TINY, "seed=2", made_up_times=True)
    model, path = tmp_path / "model", f"cache.path={tmp_path / 'features'}"
    shutil.copytree(trained.folder / "model", model)
    options = (*TINY, *PREFIX, f"model.name={model}", "model.pretrained=true", path)
    run_job(pool, 1, tmp_path / "first", *options, made_up_times=True)
    shutil.copytree(other.folder / "model", model, dirs_exist_ok=True)
    job = run_job(pool, 1, tmp_path / "job", *options, made_up_times=True)
    assert found(job) == 0
    (message,) = job.messages
    assert "stored samples were of other weights or another level (revision of the model=" in message


def test_the_parts_of_the_same_run_are_the_same_whatever_its_rate_and_seed(tmp_path: Path) -> None:
    assert named_parts(loaded(*TINY)) == named_parts(loaded(*TINY, "seed=3", "optim.lr=1", "batch_size=8"))
    assert changed_parts(named_parts(loaded()), named_parts(loaded(*TINY[:2]))) == [
        "dataset.max_train_samples=None, here 64"
    ]


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("google/bert@v1", ("google/bert", "v1")),
        ("hf-hub:timm/vit_tiny@v1", ("timm/vit_tiny", "v1")),
        ("hf_hub:timm/vit_tiny", ("timm/vit_tiny", None)),
        ("vit_tiny_patch16_224", None),
    ],
)
def test_a_model_of_the_hub_is_known_by_its_commit(
    name: str, asked: tuple[str, str | None] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = list[object]()

    def found(repository: str, _: str, revision: str | None) -> str:
        seen.append((repository, revision))
        return "snapshots/0123/config.json"

    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", found)
    assert (revision(name), seen) == (("0123", [asked]) if asked else (None, []))


def test_a_folder_is_known_by_its_files_and_a_name_of_no_repository_by_nothing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert revision(f"local-dir:{tmp_path}") == revision(str(tmp_path)) is not None
    assert revision(f"local-dir:{tmp_path / 'away'}") is None
    assert revision("own:a/b/c") is None


def test_samples_of_another_dataset_are_not_called_stale(tmp_path: Path) -> None:
    about = About(owner="a run", made=0.0, level=1, key="0", num_stored=1, num_samples=1, parts={"dataset": "one"})
    with lock_store_dir(tmp_path, replace(OURS, split_identity="cd" * 16), "a run") as store:
        about.write(store.path)
    assert other_stores(tmp_path, OURS, parts={"dataset": "two", "file a.csv": "1"}) == []
    assert other_stores(tmp_path, OURS, parts={"dataset": "one", "model.name": "other"}) == []
    (stale,) = other_stores(tmp_path, OURS, parts={"dataset": "one", "file a.csv": "1"})
    assert stale.endswith("is stale: a.csv was added")
    (unnamed,) = other_stores(tmp_path, OURS, parts={"dataset": "one"})
    assert unnamed.endswith(
        "is stale: files that the data names, such as pictures, or the library that reads them have changed"
    )


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"owner": 1}', "[" * 100_000])
def test_a_damaged_description_says_nothing_and_stops_nobody(text: str, tmp_path: Path) -> None:
    (tmp_path / ABOUT).write_text(text)
    assert read_about(tmp_path) is None
    about = About(owner="a run", made=1.5, level=4, key="ab", num_stored=3, num_samples=4, parts={"tokenizer": "cd"})
    about.write(tmp_path)
    assert read_about(tmp_path) == about
