"""Labelled images from folders: each class is a folder of files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pipetransformer.data.images.decoding import check_file, read_file
from pipetransformer.data.images.picture_files import (
    OF_SYSTEMS,
    SUFFIXES,
    is_picture,
    leads_back,
    left_out,
    visible_files,
)
from pipetransformer.data.images.sources import ImageSource, ImageSplits
from pipetransformer.data.tables.files import FORMATS
from pipetransformer.data.tables.spec import EVAL_SPLITS, TEST, passed_over
from pipetransformer.errors import UserError

SAVED = ("dataset_dict.json", "state.json")  # of datasets' save_to_disk
IMAGE_FOLDER = "a folder with train/<class>/*.png and test/, val/ or validation/<class>/*.png"
NO_CLASS = ("images", "unknown")  # names of the only folder of pictures without labels, beside that of the split
NO_CLASSES = "has pictures and no folders of the classes of training"
EVALUATION = ("test", "val", "validation")  # folders, by falling preference
SYNONYMS = {"val": "validation", "validation": "val"}
CLASS_FOLDERS = f"a table ({', '.join(FORMATS)}), or a folder for each class: <class>/*.png, or train/<class>/*.png"


@dataclass(frozen=True)
class ClassFolders:
    """Folders of pictures, one for each class.

    Attributes:
        train: Folder of the classes to train on.
        evaluation: The same to evaluate on; ``None``: there is none.
        classes: Their names.
        unlabelled: Folders named as one to evaluate on, whose pictures are in no class, and so are not read.
    """

    train: Path
    evaluation: Path | None
    classes: tuple[str, ...]
    unlabelled: tuple[Path, ...] = ()

    def pictures(self, folder: Path) -> tuple[ImageSource, tuple[str, ...]]:
        """Returns the pictures of one of the two, and what is to be said of other files; see :func:`from_folder`."""
        files, labels, others = _files(folder, self.classes)
        return _of_files(files, labels), left_out(folder, others)

    def warnings(self, instead: str) -> tuple[str, ...]:
        """Returns what is to be said of folders that are not read.

        Args:
            instead: The data to evaluate on in their place.
        """
        return tuple(passed_over(folder.name, f"{folder} {NO_CLASSES}", instead) for folder in self.unlabelled)


def class_folders(
    root: Path, train_split: str, eval_split: str | None, labels: tuple[str, ...] = ()
) -> ClassFolders | None:
    """Finds the folders of classes in a folder; ``None`` where it has tables, or is one.

    Args:
        root: The folder, with a folder for each split or for each class.
        train_split: Name of the folder to train on, where there is one for each split.
        eval_split: The same to evaluate on; ``None``: the first of :data:`EVAL_SPLITS` that there is and has classes.
        labels: Names of all classes in order, of which some may have no folder; none: those that training has.

    Raises:
        UserError: There are neither tables nor classes, a split is missing, only evaluation has some class, or a folder
            is not among the labels.
    """
    if not root.is_dir() or _has_tables(root, train_split):
        return None
    train = root / train_split if (root / train_split).is_dir() else root
    found = _evaluation(root, eval_split, EVAL_SPLITS, train)
    if train == root and found:
        raise UserError(f"dataset.path={root} has {found[0].name}/ and no {train_split}/; give dataset.train_split=")
    classes = _classes(train)
    if not classes:
        raise UserError(f"dataset.path={root} has neither tables nor folders of classes; give {CLASS_FOLDERS}")
    if labels:
        _refuse_unknown(train, "dataset.labels=", labels)
    evaluation, unlabelled = _first_with_classes(found, labels or classes, eval_split)
    if evaluation is not None:
        _refuse_unknown(evaluation, "dataset.labels=" if labels else f"{train.name}/", labels or classes)
    return ClassFolders(train, evaluation, labels or classes, unlabelled)


def _has_tables(root: Path, train_split: str) -> bool:
    """Returns whether the data is in tables: beside classes with pictures, only if one is named as the split is."""
    files = [entry for entry in root.iterdir() if entry.is_file()]
    tables = [file for file in files if file.suffix.lower() in FORMATS or file.name in SAVED]
    named = re.compile(rf"{re.escape(train_split)}(?=[-_.]|$)")
    return any(named.match(file.stem) for file in tables) or (bool(tables) and not _has_pictures(root / train_split))


def _has_pictures(train: Path) -> bool:
    files = (file for name in _classes(train) for file in visible_files(train / name))
    return any(map(is_picture, files))


def _evaluation(root: Path, wanted: str | None, usual: Sequence[str], train: Path) -> list[Path]:
    """Returns the folders to evaluate on, by falling preference: those that are asked for, or the usual ones.

    The folder to train on is none of them.

    Raises:
        UserError: The one that is asked for is not there.
    """
    names = usual if wanted is None else [wanted, *filter(None, [SYNONYMS.get(wanted)])]
    there = [root / name for name in names if (root / name).is_dir() and root / name != train]
    if not there and wanted is not None:
        others = [name for name in usual if (root / name).is_dir() and root / name != train]
        raise UserError(
            f"dataset.eval_split={wanted}: there is no folder {root / wanted}; "
            + (f"there is {', '.join(others)}" if others else f"give {IMAGE_FOLDER}")
        )
    return there


def _first_with_classes(
    folders: Sequence[Path], classes: tuple[str, ...], wanted: str | None
) -> tuple[Path | None, tuple[Path, ...]]:
    """Returns the first folder of pictures with classes, and the test folder before it whose pictures have none.

    Raises:
        UserError: The one that is asked for has none, or another one than the test folder.
    """
    unlabelled: list[Path] = []
    for folder in folders:
        if not _is_unlabelled(folder, classes):
            return folder, (*unlabelled,)
        if wanted is not None or folder.name != TEST:
            raise UserError(f"{folder} {NO_CLASSES}; sort them, or name another folder by dataset.eval_split=")
        unlabelled.append(folder)
    return None, (*unlabelled,)


def _is_unlabelled(folder: Path, classes: tuple[str, ...]) -> bool:
    """Returns whether all pictures lie in the folder itself, or below one that is called as no class is."""
    inside = {*_classes(folder)}
    return (
        not inside & {*classes} and inside <= {folder.name, *NO_CLASS} and any(map(is_picture, visible_files(folder)))
    )


def from_folder(root: Path, eval_split: str | None = None, holds_out: bool = False) -> ImageSplits:
    """Takes ``train/<class>/**`` and the evaluation folder beside it; see :func:`folder_classes`.

    Without that folder the training pictures stand in its place, of which the caller holds some out.

    A folder may mix grey and colour, and all of its images are read as colour, upright by their EXIF orientation.
    Files and folders whose names begin with a dot are left out, links to a folder that they lie in, and files that do
    not end in one of :data:`SUFFIXES`, of which a warning tells.

    Raises:
        UserError: A folder is missing, or a class has files of which none is an image.
    """
    folders = folder_classes(root, eval_split, holds_out)
    train, of_train = folders.pictures(folders.train)
    evaluation = folders.evaluation
    if evaluation is None:
        return ImageSplits(train, train, folders.train.name, folders.classes, of_train)
    held_out, of_held_out = folders.pictures(evaluation)
    warnings = *folders.warnings(evaluation.name), *of_train, *of_held_out
    return ImageSplits(train, held_out, evaluation.name, folders.classes, warnings)


def folder_classes(root: Path, eval_split: str | None = None, holds_out: bool = False) -> ClassFolders:
    """Returns the folders of both splits, and the names of the classes; a folder without files is none.

    Args:
        root: The folder.
        eval_split: Name of the evaluation folder; ``None``: the first of :data:`EVALUATION` that there is and has
            classes, else the first.
        holds_out: A part of the training pictures is held out to evaluate on, and the folder need not be there.

    Raises:
        UserError: A folder is missing, or the evaluation folder has classes that training lacks.
    """
    train = root / "train"
    found, classes = _evaluation(root, eval_split, EVALUATION, train), _classes(train)
    if not classes or not (found or holds_out):
        part = ", or evaluate on a part of train/ by dataset.validation_fraction=0.1" if classes else ""
        raise UserError(f"dataset.path={root} is not an image folder; give {IMAGE_FOLDER}{part}")
    evaluation, unlabelled = _first_with_classes(found, classes, eval_split)
    if evaluation is None:  # which is refused where it is needed
        return ClassFolders(train, found[0] if found else None, classes)
    _refuse_unknown(evaluation, "train/", classes)
    return ClassFolders(train, evaluation, classes, unlabelled)


def _refuse_unknown(folder: Path, known: str, classes: tuple[str, ...]) -> None:
    """Refuses a folder with other classes than those of ``known``, a folder or an option."""
    if unknown := sorted({*_classes(folder)} - {*classes}):
        raise UserError(f"{folder} has {len(unknown)} classes that {known} lacks: {', '.join(unknown[:5])}")


def _classes(folder: Path) -> tuple[str, ...]:
    if not folder.is_dir():
        return ()
    inside = [entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith(".")]
    inside = [entry for entry in inside if not leads_back(entry, folder)]
    return tuple(sorted(entry.name for entry in inside if any(visible_files(entry))))


def _files(folder: Path, classes: tuple[str, ...]) -> tuple[list[Path], np.ndarray, list[Path]]:
    """Returns the pictures of all classes, the class of each, and the other files."""
    files: list[Path] = []
    labels: list[int] = []
    others: list[Path] = []
    for label, name in enumerate(classes):
        found = sorted(visible_files(folder / name))
        images = [*filter(is_picture, found)]
        if found and not images:
            raise UserError(
                f"{folder / name} has {len(found)} files and no pictures, the first is {found[0].name}; give pictures "
                f"that end in one of {', '.join(SUFFIXES)}, or remove the folder"
            )
        files += images
        labels += [label] * len(images)
        others += (file for file in found if not is_picture(file) and file.name.lower() not in OF_SYSTEMS)
    return files, np.array(labels, dtype=np.int64), others


def unlabelled_files(source: Path) -> tuple[list[str], ImageSource]:
    """Takes all pictures in a folder and below it, or those that a text file lists, one path in each line.

    Returns:
        The path of each as it is listed, or from the folder; and the pictures, all of class 0.

    Raises:
        UserError: There are none, or a listed one is not there.
    """
    if source.is_dir():
        found = sorted(filter(is_picture, visible_files(source)))
        names, files = [str(file.relative_to(source)) for file in found], found
    elif is_picture(source):
        names, files = [source.name], [source]
    elif source.suffix.lower() in FORMATS:
        raise UserError(
            f"input={source} is a table, and the data of the run has none; give a folder, a picture, or a .txt file "
            "with the path of a picture in each line"
        )
    else:
        try:
            names = [line.strip() for line in source.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
        except (OSError, ValueError) as error:
            raise UserError(f"input={source} is neither a folder nor a list of pictures ({error})") from error
        files = [source.parent / name for name in names]  # a whole path stays what it is
        if lost := [name for name, file in zip(names, files, strict=True) if not file.is_file()]:
            raise UserError(f"input={source} lists {lost[0]}, which is not there (nor are {len(lost) - 1} others)")
    if not files:
        raise UserError(f"input={source} has no pictures; give files that end in one of {', '.join(SUFFIXES)}")
    return names, _of_files(files, np.zeros(len(files), dtype=np.int64))


def _of_files(files: Sequence[Path], labels: np.ndarray) -> ImageSource:
    return ImageSource(
        lambda indices: [read_file(files[index]) for index in indices],
        labels,
        lambda indices: 3,
        lambda index: file_stamp(files[index]),
        lambda index: check_file(files[index]),
    )


def file_stamp(file: Path) -> str:
    """Returns the whole name, the size and the time of the last change; while all three stay, so does the image."""
    try:
        facts = file.stat()
    except OSError as error:
        raise UserError(f"{file} cannot be looked at ({error}); repair or remove it") from error
    return f"{file.absolute()} {facts.st_size} {facts.st_mtime_ns}"
