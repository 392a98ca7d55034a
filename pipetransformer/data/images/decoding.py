"""Decoding of image files and of Pillow's images of any mode to uint8, and a check that mostly needs no decoding.

What a file may hold, and the pixels that it becomes, for training and evaluation alike:

==========================  ===========================================================================================
EXIF orientation            applied: the picture is upright, as viewers show it
grey                        repeated over red, green and blue; one channel where built-in or published data is all grey
16 bits, grey or colour     scaled to 8 bits, never clipped: colour by its upper byte, Pillow's way
alpha (RGBA, LA, palettes)  dropped, without a background: the stored colours stay, as in torchvision's ``ImageFolder``,
                            timm's ``ImageDataset`` and transformers' ``load_image``
palette                     its colours
CMYK, YCbCr, HSV, Lab       converted to RGB without a colour profile; Adobe's inverted CMYK JPEG is turned back
several frames or pages     the first one (GIF, APNG, WebP, TIFF)
floating-point numbers      refused: their range is not known
more than 16 bits           refused where a value lies outside of 0 to 65,535
one pixel wide or high      refused: it shows nothing
==========================  ===========================================================================================
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipetransformer.errors import UserError

if TYPE_CHECKING:
    from PIL.Image import Image

GREY_MODES = ("1", "L", "LA", "La")  # Pillow's, beside those of more than 8 bits, which begin with I
DECODING = "16 bits to 8 by 257, upright by EXIF"  # part of every identity: change it with what decoding gives
ORIENTATION, UPRIGHT = 274, 1  # the tag of EXIF, and a value of it
TURNS = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}
"""How to turn a picture upright, by its orientation: numbers of ``PIL.Image.Transpose``."""
JPEG_END = b"\xff\xd9"


def check_picture(stored: Path | bytes, name: str) -> None:
    """Raises UserError where a picture is cut short, damaged or not one, mostly without decoding it.

    A PNG has checksums, and a JPEG that is whole has an end; other formats, and a JPEG without its end, are decoded.

    Args:
        stored: The file, or its content.
        name: Of the picture, for the message.
    """
    with named(name), _opened(stored) as image:
        _check_mode(image)
        if image.format == "PNG":
            image.verify()
        elif image.format != "JPEG" or not _has_jpeg_end(stored):
            image.load()


def check_file(file: Path) -> None:
    """Raises UserError where a file is cut short, damaged or not an image; see :func:`check_picture`."""
    check_picture(file, str(file))


@contextmanager
def _opened(stored: Path | bytes) -> Iterator[Image]:
    from PIL import Image

    if not (len(stored) if isinstance(stored, bytes) else stored.stat().st_size):
        raise UserError("it has 0 bytes")
    with Image.open(BytesIO(stored) if isinstance(stored, bytes) else stored) as image:
        if min(image.size) < 2:
            raise UserError(f"it has {image.width}x{image.height} pixels and shows nothing")
        yield image


def _has_jpeg_end(stored: Path | bytes) -> bool:
    if isinstance(stored, bytes):
        return stored[-1024:].rstrip(b"\0").endswith(JPEG_END)
    with stored.open("rb") as content:
        content.seek(max(0, stored.stat().st_size - 1024))
        return content.read().rstrip(b"\0").endswith(JPEG_END)


def read_picture(stored: Path | bytes, name: str) -> np.ndarray:
    """Decodes a file or its content as colour and upright, (H, W, 3) of uint8."""
    with named(name), _opened(stored) as image:
        pixels = to_array(image)
    return pixels if pixels.shape[2] == 3 else np.repeat(pixels, 3, axis=2)


def read_file(file: Path) -> np.ndarray:
    """Decodes a file as colour and upright, (H, W, 3) of uint8."""
    return read_picture(file, str(file))


@contextmanager
def named(name: str) -> Iterator[None]:
    """Turns any error into a ValueError that names the image: Pillow raises its own, OSError, SyntaxError, ..."""
    try:
        yield
    except Exception as error:
        raise UserError(f"{name} cannot be read as a picture ({error}); repair or remove it") from error


def to_array(image: Image) -> np.ndarray:
    """Converts a Pillow image of any mode to uint8, (H, W, 1) of a grey one, else (H, W, 3).

    It is turned in place as the orientation in its EXIF data says, so that H and W are those of the upright picture.
    Grey of 16 bits is divided by 257, which takes 65,535 to 255. The docstring of this module lists all modes.

    Raises:
        UserError: The pixels have no known range, or more than 16 bits.
    """
    from PIL.Image import Transpose

    _check_mode(image)
    turned = TURNS.get(image.getexif().get(ORIENTATION, UPRIGHT))  # ImageOps writes all tags anew, and some cannot be
    image = image if turned is None else image.transpose(Transpose(turned))
    if image.mode.startswith("I"):
        return _from_16_bits(np.asarray(image).astype(np.int64))[..., None]
    if image.mode == "La":
        image = image.convert("LA")  # Pillow knows no direct way
    if image.mode in GREY_MODES:
        return np.asarray(image.convert("L"))[..., None]
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")  # Pillow warns of the direct way
    return np.asarray(image.convert("RGB"))


def _check_mode(image: Image) -> None:
    if image.mode == "F":
        raise UserError("its pixels are floating-point numbers without a known range, save it with 8 or 16 bits")


def _from_16_bits(pixels: np.ndarray) -> np.ndarray:
    if pixels.min() < 0 or pixels.max() > 65_535:
        raise UserError(
            f"its pixels go from {pixels.min()} to {pixels.max()}, 16 bits from 0 to 65535; save it with 8 or 16 bits"
        )
    return ((pixels + 128) // 257).astype(np.uint8)  # to the nearest


def is_grey(stored: dict[str, Any]) -> bool:
    """Reads the header of an image of the hub, its ``bytes`` or the file at its ``path``.

    One that cannot be read counts as grey and fails where it is decoded.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(BytesIO(stored["bytes"]) if stored["bytes"] else stored["path"]) as image:
            return image.mode in GREY_MODES or image.mode.startswith("I")
    except UnidentifiedImageError:
        return True
