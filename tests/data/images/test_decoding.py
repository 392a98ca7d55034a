"""Pillow's modes, and files that are damaged in different ways."""

import io
import struct
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps
from PIL.ExifTags import Base

from pipetransformer.data.images.decoding import check_file, check_picture, is_grey, read_file, read_picture, to_array

RAMP = np.linspace(0, 65_535, 12).round().astype(np.uint16).reshape(3, 4)
NOISE = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)


@pytest.mark.parametrize("mode", ["I;16", "I;16B", "I;16L", "I"])
def test_grey_of_16_bits_is_scaled_to_8(mode: str) -> None:
    order = {"I;16B": ">u2", "I": "<i4"}.get(mode, "<u2")
    image = Image.frombytes(mode, (4, 3), RAMP.astype(order).tobytes())
    assert image.mode == mode
    assert to_array(image)[..., 0].tolist() == np.round(RAMP / 257).astype(int).tolist()


def test_a_16_bit_png_keeps_its_brightness(tmp_path: Path) -> None:
    values = np.random.default_rng(0).integers(0, 65_536, (50, 50), dtype=np.uint16)
    Image.fromarray(values).save(tmp_path / "deep.png")
    assert read_file(tmp_path / "deep.png").mean() == pytest.approx(values.mean() / 257, abs=0.5)


@pytest.mark.parametrize(
    ("mode", "colour", "pixel"),
    [
        ("1", 1, [255]),
        ("L", 7, [7]),
        ("LA", (7, 0), [7]),
        ("La", (7, 255), [7]),
        ("RGB", (1, 2, 3), [1, 2, 3]),
        ("RGBA", (1, 2, 3, 0), [1, 2, 3]),
        ("CMYK", (0, 255, 255, 0), [255, 0, 0]),
        ("HSV", (0, 255, 255), [255, 0, 0]),
    ],
)
def test_every_mode_becomes_8_bits_of_grey_or_colour(mode: str, colour: object, pixel: list[int]) -> None:
    found = to_array(Image.new(mode, (4, 3), colour))  # pyright: ignore[reportArgumentType]
    assert (found.dtype, found.shape) == (np.uint8, (3, 4, len(pixel)))
    assert found[1, 2].tolist() == pixel


def stored(image: Image.Image, form: str, **options: object) -> Image.Image:
    """The image as it comes back from a file."""
    content = io.BytesIO()
    image.save(content, form, **options)  # pyright: ignore[reportArgumentType]
    return Image.open(content)


def deep_png(colour_type: int, pixels: list[tuple[int, ...]]) -> Image.Image:
    """One row of a PNG of 16 bits per channel, which Pillow reads and does not write."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", len(pixels), 1, 16, colour_type, 0, 0, 0)
    row = b"\0" + b"".join(struct.pack(f">{len(pixel)}H", *pixel) for pixel in pixels)
    chunks = chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(row)), chunk(b"IEND", b"")
    return Image.open(io.BytesIO(b"\x89PNG\r\n\x1a\n" + b"".join(chunks)))


@pytest.mark.parametrize(("colour_type", "alpha"), [(2, ()), (6, (0,))])
def test_colour_of_16_bits_is_scaled_to_8(colour_type: int, alpha: tuple[int, ...]) -> None:
    image = deep_png(colour_type, [(0, 0x80FF, 0xFFFF, *alpha), (0x1234, 0x0100, 0x00FF, *alpha)])
    assert to_array(image).tolist() == [[[0, 0x80, 255], [0x12, 1, 0]]]


@pytest.mark.parametrize("form", ["PNG", "WEBP", "TIFF"])
def test_colour_below_full_transparency_stays_as_it_is_stored(form: str) -> None:
    options = {"lossless": True, "exact": True} if form == "WEBP" else {}
    image = stored(Image.new("RGBA", (4, 3), (200, 100, 50, 0)), form, **options)
    assert image.mode == "RGBA"
    assert to_array(image)[1, 2].tolist() == [200, 100, 50], "neither black nor white"


def test_the_inverted_cmyk_of_adobe_jpeg_is_turned_back() -> None:
    image = stored(Image.new("CMYK", (16, 16), (0, 255, 255, 0)), "JPEG", quality=95)
    assert (image.mode, "adobe" in image.info) == ("CMYK", True)
    assert np.abs(to_array(image)[8, 8].astype(int) - [255, 0, 0]).max() <= 2, "no cyan: red"


@pytest.mark.parametrize("form", ["GIF", "PNG", "WEBP", "TIFF"])
def test_of_several_frames_the_first_is_read(form: str) -> None:
    red, green = (Image.new("RGB", (8, 8), colour) for colour in ((255, 0, 0), (0, 255, 0)))
    options = {"lossless": True} if form == "WEBP" else {}
    image = stored(red, form, save_all=True, append_images=[green], **options)
    assert getattr(image, "n_frames", 1) == 2
    assert to_array(image)[4, 4].tolist() == [255, 0, 0]


@pytest.mark.parametrize("transparency", [None, 0, b"\x00\x80"])
def test_a_palette_becomes_its_colours(transparency: object) -> None:
    image = Image.new("P", (4, 3), 1)
    image.putpalette([0, 0, 0, 10, 20, 30])
    if transparency is not None:
        image.info["transparency"] = transparency
    assert to_array(image)[1, 2].tolist() == [10, 20, 30]


def test_pixels_without_a_known_range_are_refused() -> None:
    with pytest.raises(ValueError, match="floating-point numbers without a known range"):
        to_array(Image.new("F", (4, 3), 0.5))
    with pytest.raises(ValueError, match="go from 0 to 70000, 16 bits from 0 to 65535"):
        to_array(Image.fromarray(np.array([[0, 70_000]], dtype=np.int32)))


QUARTERS = np.array([[0, 80, 160], [240, 120, 40]], dtype=np.uint8).repeat(16, 0).repeat(16, 1)  # flat, for JPEG


@pytest.mark.parametrize(("orientation", "turns"), [(1, 0), (3, 2), (6, 3), (8, 1)])
@pytest.mark.parametrize(
    ("suffix", "mode"), [("jpg", "L"), ("jpg", "RGB"), ("png", "L"), ("png", "P"), ("png", "I;16")]
)
def test_a_picture_is_turned_as_its_exif_orientation_says(
    suffix: str, mode: str, orientation: int, turns: int, tmp_path: Path
) -> None:
    exif = Image.Exif()
    exif[Base.Orientation] = orientation
    deep = Image.fromarray(QUARTERS.astype(np.uint16) * 257)
    image = deep if mode == "I;16" else Image.fromarray(QUARTERS).convert(mode)
    image.save(tmp_path / f"turned.{suffix}", exif=exif)
    check_file(tmp_path / f"turned.{suffix}")
    found = read_file(tmp_path / f"turned.{suffix}")[..., 0]
    expected = np.rot90(QUARTERS, turns)
    assert found.shape == expected.shape
    assert np.abs(found.astype(int) - expected).max() <= 2, "but for JPEG's rounding"


@pytest.mark.parametrize("orientation", range(10))
def test_every_orientation_is_turned_as_pillow_does(orientation: int) -> None:
    image = Image.fromarray(np.arange(6, dtype=np.uint8).reshape(2, 3))
    image.getexif()[Base.Orientation] = orientation
    assert to_array(image)[..., 0].tolist() == np.asarray(ImageOps.exif_transpose(image)).tolist()


def test_a_tag_of_another_type_than_it_should_have_does_not_matter(tmp_path: Path) -> None:
    """Pillow itself cannot write such a tag again, as which it would after it has turned the picture."""
    exif = Image.Exif()
    exif[Base.Orientation] = 6
    exif[Base.Make] = "72"
    stored = exif.tobytes().replace(Base.Make.to_bytes(2, "big"), Base.XResolution.to_bytes(2, "big"))
    assert stored != exif.tobytes()
    Image.fromarray(QUARTERS).save(tmp_path / "odd.jpg", exif=stored)
    check_file(tmp_path / "odd.jpg")
    assert read_file(tmp_path / "odd.jpg").shape == (*QUARTERS.shape[::-1], 3)


def test_a_picture_with_unreadable_exif_data_stays_as_it_is(tmp_path: Path) -> None:
    Image.fromarray(QUARTERS).save(tmp_path / "odd.jpg", exif=b"Exif\0\0garbage")
    assert read_file(tmp_path / "odd.jpg").shape == (*QUARTERS.shape, 3)


@pytest.mark.parametrize(("mode", "grey"), [("1", True), ("LA", True), ("I;16", True), ("P", False), ("RGB", False)])
def test_the_header_tells_grey_from_colour(mode: str, grey: bool) -> None:
    content = io.BytesIO()
    Image.new(mode, (4, 3)).save(content, "PNG")
    assert is_grey({"bytes": content.getvalue(), "path": None}) == grey


@pytest.mark.parametrize("suffix", ["png", "jpg", "bmp", "tif", "webp", "gif", "ppm"])
def test_a_whole_file_passes_and_one_cut_short_is_named(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"picture.{suffix}"
    Image.fromarray(NOISE).save(file)
    check_file(file)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(ValueError, match=rf"picture\.{suffix} cannot be read as a picture \(.+\); repair or remove it"):
        check_file(file)
    with pytest.raises(ValueError, match=rf"picture\.{suffix} cannot be read"):
        read_file(file)


@pytest.mark.parametrize("extra", [b"", b"\0" * 300, b"more"])
def test_what_follows_the_end_of_a_jpeg_does_not_matter(tmp_path: Path, extra: bytes) -> None:
    file = tmp_path / "picture.jpg"
    Image.fromarray(NOISE).save(file)
    file.write_bytes(file.read_bytes() + extra)
    check_file(file)


@pytest.mark.parametrize("content", [b"", b"hello", b"\x89PNG\r\n\x1a\n" + b"\0" * 40])
def test_a_file_that_is_no_picture_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "broken.png").write_bytes(content)
    with pytest.raises(ValueError, match=r"broken\.png cannot be read as a picture"):
        check_file(tmp_path / "broken.png")


@pytest.mark.parametrize("size", [(1, 1), (1, 9), (9, 1)])
def test_a_picture_of_one_pixel_in_width_or_height_is_named(tmp_path: Path, size: tuple[int, int]) -> None:
    Image.new("RGB", size).save(tmp_path / "dot.png")
    for use in (check_file, read_file):
        with pytest.raises(ValueError, match=rf"dot\.png cannot .* has {size[0]}x{size[1]} pixels and shows nothing"):
            use(tmp_path / "dot.png")


def test_a_file_of_no_bytes_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty.png").touch()
    with pytest.raises(ValueError, match=r"empty\.png cannot be read as a picture \(it has 0 bytes\)"):
        check_file(tmp_path / "empty.png")


@pytest.mark.parametrize("cut", [1, 2])
@pytest.mark.parametrize("form", ["PNG", "JPEG", "GIF"])
def test_the_content_of_a_file_is_checked_and_read_as_the_file(tmp_path: Path, form: str, cut: int) -> None:
    file = tmp_path / f"picture.{form.lower()}"
    Image.fromarray(NOISE).save(file)
    content = file.read_bytes()[: file.stat().st_size // cut]
    file.write_bytes(content)
    if cut == 1:
        check_picture(content, "row 3")
        assert np.array_equal(read_picture(content, "row 3"), read_file(file))
    else:
        for use in (check_picture, read_picture):
            with pytest.raises(ValueError, match="row 3 cannot be read as a picture"):
                use(content, "row 3")


def test_an_oversized_picture_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Image.new("1", (64, 64)).save(tmp_path / "large.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    for use in (check_file, read_file):
        with pytest.raises(ValueError, match=r"large\.png cannot be read as a picture \(.*4096 pixels.*\)"):
            use(tmp_path / "large.png")


def test_a_palette_file_with_transparency_is_read_without_a_warning(tmp_path: Path) -> None:
    image = Image.new("P", (4, 3), 1)
    image.putpalette([0, 0, 0, 10, 20, 30])
    image.save(tmp_path / "palette.png", transparency=b"\x00\x80")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_file(tmp_path / "palette.png")[0, 0].tolist() == [10, 20, 30]
