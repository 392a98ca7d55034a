import numpy as np
import pytest
import timm.data
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from pipetransformer.data.base import ImageFormat
from pipetransformer.data.images.sources import ImageSource, from_arrays, from_list
from pipetransformer.data.images.split import ImageSplit, crop_and_flip
from pipetransformer.data.tasks import image_classification

GENERATOR = np.random.default_rng(1)
ONE, TWO = image_classification(1), image_classification(2)
RAW = ImageFormat(mean=(0.0,), std=(1.0,))


def pictures(*shape: int) -> ImageSource:
    images = GENERATOR.integers(0, 256, shape, dtype=np.uint8)
    return from_arrays(images, np.arange(len(images)) % 2)


def of_sizes(*sizes: tuple[int, int]) -> ImageSource:
    images = [GENERATOR.integers(0, 256, (*size, 3), dtype=np.uint8) for size in sizes]
    return from_list(images, np.zeros(len(images), dtype=np.int64))


def test_pixels_are_scaled_and_normalised_per_channel() -> None:
    source = from_arrays(np.array([[[[0, 51, 255]]]], dtype=np.uint8), np.zeros(1))
    wanted = ImageFormat(mean=(0.5, 0.2, 0.0), std=(0.5, 1.0, 2.0))
    values = ImageSplit("test", source, wanted, ONE).inputs([0], None)
    assert values.dtype == torch.float32
    assert values.flatten().tolist() == pytest.approx([-1.0, 0.0, 0.5])


def test_grey_becomes_colour_and_colour_becomes_grey() -> None:
    grey, colour = pictures(2, 4, 4), pictures(2, 4, 4, 3)
    second = np.array([1])
    three = ImageSplit("test", grey, ImageFormat(num_channels=3, mean=(0.0,), std=(1.0,)), TWO).inputs([1], None)
    one = ImageSplit("test", colour, ImageFormat(num_channels=1, mean=(0.0,), std=(1.0,)), TWO).inputs([1], None)
    torch.testing.assert_close(three[0], torch.from_numpy(grey.decode(second)[0, ..., 0] / 255).float().expand(3, 4, 4))
    torch.testing.assert_close(one[0, 0], torch.from_numpy(colour.decode(second)[0].mean(-1) / 255).float())


def test_channels_that_do_not_convert_are_refused() -> None:
    with pytest.raises(ValueError, match="the pictures have 3 channels and the model wants 4"):
        ImageSplit("test", pictures(2, 4, 4, 3), ImageFormat(num_channels=4), TWO)


def test_a_normalisation_for_other_channels_is_refused() -> None:
    with pytest.raises(ValueError, match="the normalisation has 3 values for 1 channels"):
        ImageSplit("test", pictures(2, 4, 4), ImageFormat(mean=(0.1, 0.2, 0.3)), TWO)


@given(st.integers(3, 40), st.integers(3, 40), st.integers(1, 32))
def test_every_picture_gets_the_wanted_size(height: int, width: int, size: int) -> None:
    split = ImageSplit("test", of_sizes((height, width)), ImageFormat(size=size), ONE)
    assert split.inputs([0], None).shape == (1, *split.input_shape) == (1, 3, size, size)


@pytest.mark.parametrize("size", [7, 16, 33])
@pytest.mark.parametrize("shape", [(9, 16), (16, 9), (11, 11), (31, 20), (101, 67), (64, 97), (33, 34), (7, 30)])
@pytest.mark.parametrize("num_channels", [1, 3])
def test_pictures_look_as_timm_shows_them_to_a_model(shape: tuple[int, int], size: int, num_channels: int) -> None:
    picture = GENERATOR.integers(0, 256, (*shape, num_channels), dtype=np.uint8)
    wanted = ImageFormat(size, 3, (0.1, 0.2, 0.3), (0.5, 0.6, 0.7))
    (found,) = ImageSplit("test", from_list([picture], np.zeros(1, dtype=np.int64)), wanted, ONE).inputs([0], None)
    transform = timm.data.create_transform(
        (3, size, size), is_training=False, interpolation="bilinear", crop_pct=1.0, mean=wanted.mean, std=wanted.std
    )
    image = Image.fromarray(picture if num_channels == 3 else picture[..., 0]).convert("RGB")
    assert torch.equal(found, transform(image))


def test_resizing_keeps_the_aspect_and_takes_the_middle() -> None:
    image = np.zeros((8, 24, 1), dtype=np.uint8)
    image[:, 8:16] = 255
    split = ImageSplit("test", from_arrays(image[None], np.zeros(1)), ImageFormat(4, None, (0.0,), (1.0,)), ONE)
    values = split.inputs([0], None)[0, 0]
    assert values[:, 1:3].min() == 1  # the bright middle fills the picture up to the smoothed borders
    assert values.min() > 0.8


def test_making_a_picture_smaller_averages_its_pixels() -> None:
    stripes = np.zeros((1, 32, 32), dtype=np.uint8)
    stripes[:, :, 3::8] = stripes[:, :, 4::8] = 255  # bright where plain sampling would look
    split = ImageSplit("test", from_arrays(stripes, np.zeros(1)), ImageFormat(4, None, (0.0,), (1.0,)), ONE)
    assert 0.2 < split.inputs([0], None).mean() < 0.6


def test_pictures_of_different_sizes_share_a_batch_once_resized() -> None:
    source = of_sizes((9, 12), (20, 10), (8, 8))
    split = ImageSplit("test", source, ImageFormat(size=8), ONE)
    together = split.inputs([0, 1, 2], None)
    assert torch.equal(together, torch.cat([split.inputs([index], None) for index in range(3)]))


def test_grey_pictures_of_different_sizes_are_read() -> None:
    images = [GENERATOR.integers(0, 256, (size, size, 1), dtype=np.uint8) for size in (5, 9)]
    for image in images:
        image.setflags(write=False)  # as they come from a decoder
    source = from_list(images, np.zeros(2, dtype=np.int64))
    assert ImageSplit("test", source, ImageFormat(size=4), ONE).inputs([0, 1], None).shape == (2, 1, 4, 4)


def test_a_sample_does_not_depend_on_its_batch() -> None:
    split = ImageSplit("train", pictures(6, 12, 12, 3), ImageFormat(size=16), TWO, augment=True)
    together = split.inputs([*range(6)], None)
    assert torch.equal(together[4], split.inputs([4], None)[0])


def test_pictures_of_different_sizes_need_a_wanted_size() -> None:
    split = ImageSplit("test", of_sizes((9, 12), (20, 10)), RAW, ONE)
    with pytest.raises(ValueError, match=r"20x10 pixels .* others of 9x12; have them resized with model\.image_size="):
        split.inputs([0, 1], None)


def test_augmentation_changes_with_the_epoch_only() -> None:
    split = ImageSplit("train", pictures(4, 8, 8), RAW, TWO, augment=True)
    first = split.inputs([0, 1, 2, 3], None)
    assert torch.equal(first, split.inputs([0, 1, 2, 3], None))
    assert not torch.equal(first, split.inputs([0, 1, 2, 3], None, epoch=1))


def test_targets_and_score_use_the_labels() -> None:
    split = ImageSplit("test", pictures(4, 2, 2), RAW, TWO)
    assert split.targets([3, 0]).tolist() == [1, 0]
    assert split.targets([0]).dtype == torch.int64
    assert split.score(np.array([0, 1, 0, 0])) == {"accuracy": 0.75}


@pytest.mark.parametrize("label", [-1, 2])
def test_a_label_out_of_range_is_refused(label: int) -> None:
    source = from_arrays(np.zeros((3, 2, 2), dtype=np.uint8), np.array([0, label, 1]))
    with pytest.raises(ValueError, match=rf"1 labels of the test split lie outside 0\.\.1, the first is {label}"):
        ImageSplit("test", source, RAW, TWO)


def test_an_empty_split_is_refused() -> None:
    with pytest.raises(ValueError, match="the train split has no pictures"):
        ImageSplit("train", from_arrays(np.zeros((0, 2, 2), dtype=np.uint8), np.zeros(0)), RAW, TWO)


DRAWN = torch.arange(1, 1 + 6 * 2 * 16 * 16, dtype=torch.float32).reshape(6, 2, 16, 16)


def test_a_sample_looks_the_same_in_every_batch_of_an_epoch() -> None:
    together = crop_and_flip(DRAWN, 3, range(6))
    alone = torch.cat([crop_and_flip(DRAWN[[i]], 3, [i]) for i in (4, 1)])
    assert torch.equal(together[[4, 1]], alone)


def test_epochs_and_samples_differ() -> None:
    same_picture = DRAWN[:1].expand(6, -1, -1, -1)
    looks = [crop_and_flip(same_picture, epoch, range(6)) for epoch in (0, 1)]
    assert not torch.equal(*looks)
    assert len({look.sum().item() for look in looks[0]}) > 1


def test_every_look_is_a_shifted_perhaps_mirrored_picture() -> None:
    picture = DRAWN[:1]
    padded = torch.nn.functional.pad(picture, [2] * 4)
    crops = [padded[..., top : top + 16, left : left + 16] for top in range(5) for left in range(5)]
    mirrored = [crop.flip(3) for crop in crops]
    seen = set()
    for epoch in range(200):
        look = crop_and_flip(picture, epoch, [0])
        matches = [number for number, crop in enumerate(crops + mirrored) if torch.equal(crop, look)]
        assert len(matches) == 1
        seen |= {*matches}
    assert len(seen) > 40  # of 50: shifts and mirroring are drawn independently
