"""Any table of pictures with labels, or folders of classes: classes, several classes at once, or values."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from pipetransformer.data.base import Data, ImageFormat, TextFormat, subsample
from pipetransformer.data.hub import download_folders
from pipetransformer.data.images.datasets import hold_out
from pipetransformer.data.images.folders import ClassFolders, class_folders
from pipetransformer.data.images.sources import ImageSource, refuse_damaged
from pipetransformer.data.images.spec import PictureSpec
from pipetransformer.data.tables.labelled import LabelledTable, columns_of
from pipetransformer.data.tables.spec import HELD_OUT, Tables
from pipetransformer.data.tasks import Task
from pipetransformer.errors import UserError

if TYPE_CHECKING:
    from pipetransformer.data.images.picture_column import PictureColumn
    from pipetransformer.data.tables.labels import Labels
    from pipetransformer.data.tables.rows import Rows

OF_TABLES = ("image", "label", "root", "delimiter", "eval_path", "label_separator")  # not of class folders

MAX_DECODED = 5_000  # pictures of a split that are opened before the start; of all others the file has to be there


@dataclass(frozen=True, kw_only=True)
class Pictures:
    """Pictures of a run with their labels, before they are fitted to a model."""

    train: ImageSource
    evaluation: ImageSource
    eval_name: str
    labels: Labels
    columns: tuple[PictureColumn, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class TableImages(LabelledTable, PictureSpec):
    """Pictures with labels.

    ``path`` is a table with a column of paths or of pictures, a folder of such tables, or a folder of classes:
    ``train/<class>/*`` with the evaluation data beside it, or ``<class>/*`` alone.

    Attributes:
        image: Column of the pictures: paths, which do not lead out of ``root``, or pictures in the table itself.
        root: Folder in which the paths begin; ``None``: that of the table.
    """

    image: str = "image"
    root: str | None = None

    modality: ClassVar[str] = "image"

    @property
    def _published(self) -> str:
        return self.hub or "images"

    def check(self) -> None:
        super().check()
        if self.image in columns_of("label", self.label):
            raise UserError(f"dataset.label={self.image} is the column of dataset.image= too; name that of the labels")
        if self.root is not None and not Path(self.root).is_dir():
            raise UserError(f"dataset.root={self.root} is no folder; give that in which the paths of pictures begin")
        if self.class_weights is not None and self.is_mixed:
            raise UserError(
                "dataset.class_weights= does not go with dataset.mixup= and dataset.cutmix=, whose pictures are of two "
                "classes; drop one of them"
            )
        if (folders := self._folders()) is not None:
            self._check_folders(folders)

    def _check_folders(self, folders: ClassFolders) -> None:
        """Refuses options of tables, and data of one class."""
        default = {field.name: field.default for field in fields(self)}
        for option in OF_TABLES:
            if getattr(self, option) != default[option]:
                raise UserError(
                    f"dataset.{option}={getattr(self, option)} has no effect, as {self.path} is a folder of classes; "
                    "drop it, or name a table by dataset.path="
                )
        if self.task not in ("auto", "classification"):
            raise UserError(f"dataset.task={self.task} needs a table with labels; {self.path} is a folder of classes")
        if len(folders.classes) < 2:
            raise UserError(
                f"{folders.train} has one class, {folders.classes[0]}, and classification needs 2 or more; give a "
                "folder for each class"
            )

    def preflight(self) -> int | None:
        self.find()
        if self.path is None:
            return None
        pictures = self._pictures()
        self._image_task(pictures)
        for column in pictures.columns:
            column.check_all()
        refuse_damaged((pictures.train, pictures.evaluation), MAX_DECODED)
        return len(pictures.train)

    def load(self, wanted: ImageFormat | TextFormat) -> Data:
        assert isinstance(wanted, ImageFormat)
        pictures = self._pictures()
        task, weights = self._image_task(pictures)
        wanted = replace(wanted, num_channels=wanted.num_channels or pictures.train.num_channels)
        note = self._note(pictures.labels, bool(pictures.columns))
        data = self._data(pictures.train, pictures.evaluation, pictures.eval_name, task, wanted, weights, note)
        return replace(data, warnings=(*data.warnings, *pictures.warnings, *pictures.labels.warnings))

    def _unlabelled_pictures(self, source: Path) -> tuple[list[dict[str, Any]], ImageSource]:
        from pipetransformer.data.tables.files import FORMATS
        from pipetransformer.data.tables.rows import read_files

        if source.is_dir() or source.suffix.lower() not in FORMATS:
            return super()._unlabelled_pictures(source)
        rows = read_files((source,), self._delimiter)
        column = self._column(rows, str(source))
        column.check_all()
        return column.names(), column.source(np.zeros(len(rows), dtype=np.int64))

    def _image_task(self, pictures: Pictures) -> tuple[Task, np.ndarray | None]:
        """Returns the task of the labels with a head for pictures, and the weight of each class."""
        if pictures.labels.task == "regression" and self.is_mixed:
            raise UserError("dataset.mixup= and dataset.cutmix= mix classes, and the labels are values; set both to 0")
        task, weights = self._task(pictures.labels, pictures.train.labels)
        return replace(task, head=replace(task.head, kind="image")), weights

    def _pictures(self) -> Pictures:
        folders = self._folders()
        return self._of_tables(self.tables()) if folders is None else self._of_folders(folders)

    def _folders(self) -> ClassFolders | None:
        """Returns the folders of classes in ``path``; ``None`` where it has tables."""
        if self.path is None:
            return None
        labels = tuple(map(str, self.labels or ()))  # as folders are called
        return class_folders(Path(self.path), self.train_split, self.eval_split, labels)

    def _of_folders(self, folders: ClassFolders) -> Pictures:
        from pipetransformer.data.tables.labels import LabelOptions, Labels

        train, others = folders.pictures(folders.train)
        if folders.evaluation is None:
            option = "dataset.eval_fraction"
            kept, held_out = hold_out(train.labels, self.eval_fraction, option, folders.classes)
            train, evaluation, name = train.take(kept), train.take(held_out), HELD_OUT
        else:
            (evaluation, of_evaluation), name = folders.pictures(folders.evaluation), folders.evaluation.name
            others += of_evaluation
        labels = Labels(LabelOptions(("the folder",)), "classification", folders.classes)
        limited = (train, self.max_train_samples), (evaluation, self.max_eval_samples)
        train, evaluation = (source.take(subsample(len(source), most)) for source, most in limited)
        warnings = *folders.warnings(self._held_out if folders.evaluation is None else name), *others
        return Pictures(train=train, evaluation=evaluation, eval_name=name, labels=labels, warnings=warnings)

    def _of_tables(self, tables: Tables) -> Pictures:
        train = self._column(tables.train, self.path)
        evaluation = self._column(tables.evaluation, self.eval_path or self.path)
        labels = self._find_labels(tables.known)
        return Pictures(
            train=train.source(labels.targets(tables.train)),
            evaluation=evaluation.source(labels.targets(tables.evaluation)),
            eval_name=tables.eval_name,
            labels=labels,
            columns=(train, evaluation),
            warnings=tables.warnings,
        )

    def _column(self, rows: Rows, path: str | None) -> PictureColumn:
        from pipetransformer.data.images.picture_column import PictureColumn

        if self.root is not None:
            folders = [Path(self.root)]
        elif path is not None:
            folders = [Path(path) if Path(path).is_dir() else Path(path).parent]
        else:
            assert self.hub is not None
            folders = download_folders(self.hub)
        return PictureColumn(rows, self.image, folders, is_published=path is None)
