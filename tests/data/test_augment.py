import torch

from pipetransformer.data.augment import crop_and_flip

IMAGES = torch.arange(1, 1 + 6 * 2 * 16 * 16, dtype=torch.float32).reshape(6, 2, 16, 16)


def test_a_sample_looks_the_same_in_every_batch_of_an_epoch() -> None:
    together = crop_and_flip(IMAGES, 3, range(6))
    alone = torch.cat([crop_and_flip(IMAGES[[i]], 3, [i]) for i in (4, 1)])
    assert torch.equal(together[[4, 1]], alone)


def test_epochs_and_samples_differ() -> None:
    same_picture = IMAGES[:1].expand(6, -1, -1, -1)
    looks = [crop_and_flip(same_picture, epoch, range(6)) for epoch in (0, 1)]
    assert not torch.equal(*looks)
    assert len({look.sum().item() for look in looks[0]}) > 1


def test_every_look_is_a_shifted_perhaps_mirrored_picture() -> None:
    picture = IMAGES[:1]
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
