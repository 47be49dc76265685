"""Augmentation on tensors does what the paper's transforms do to each image."""

import pytest
import torch
from torch.nn import functional

from incofl.client import LocalSettings
from incofl.data import DATASETS, Examples
from incofl.data.pipeline import ImagePipeline, cutout, eval_batches, local_batches, random_crop, random_resized_crop


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_normalisation_by_hand() -> None:
    """(51/255 - 0.1) / 0.5 = 0.2 and (255/255 - 0.5) / 0.25 = 2"""
    pipeline = ImagePipeline(mean=(0.1, 0.5), std=(0.5, 0.25))
    x = torch.tensor([51, 255], dtype=torch.uint8).view(1, 2, 1, 1)
    assert pipeline.test(x).flatten().tolist() == pytest.approx([0.2, 2.0])
    words = "`examples / 255`, then `(x - mean) / std` of each channel, mean [0.1, 0.5], std [0.5, 0.25]"
    assert pipeline.formula == words
    shown = ImagePipeline(maximum=16, resize=8, channels=3)
    assert shown.formula == "`examples / 16`, resized to 8 x 8 pixels (bilinear), repeated in 3 channels"
    assert x.flatten().tolist() == [51, 255]


def test_constants_of_the_paper() -> None:
    cifar, fashion = (DATASETS[name].view(None).pipeline for name in ("cifar10", "fashion-mnist"))
    assert isinstance(cifar, ImagePipeline)
    assert cifar.mean == (0.49139968, 0.48215827, 0.44653124)
    assert cifar.std == (0.24703233, 0.24348505, 0.26158768)
    assert (cifar.pad, cifar.flip, cifar.cutout, cifar.resize) == (4, True, 16, None)
    assert fashion == ImagePipeline(resize=32)


def test_every_crop_is_a_window_of_the_padded_image() -> None:
    x = torch.arange(1, 65, dtype=torch.uint8).view(1, 1, 8, 8).repeat(200, 2, 1, 1)
    crops = random_crop(x, 2, rng())
    padded = functional.pad(x[0], (2, 2, 2, 2))
    windows = {(y, x): padded[:, y : y + 8, x : x + 8] for y in range(5) for x in range(5)}
    seen = {place for crop in crops for place, window in windows.items() if torch.equal(crop, window)}
    assert seen == set(windows)


def test_cutout_is_one_clipped_square_per_image() -> None:
    """Side 4 on 10x10: rows [c - 2, c + 2) clipped, so 2 to 4 of them; all channels alike; each image its own."""
    mask = cutout(torch.ones(500, 2, 10, 10), 4, rng()) == 0
    assert torch.equal(mask[:, 0], mask[:, 1])
    rows, columns = mask[:, 0].any(2).sum(1), mask[:, 0].any(1).sum(1)
    assert torch.equal(mask[:, 0].sum((1, 2)), rows * columns)  # a full rectangle
    assert set(rows.tolist()) == set(columns.tolist()) == {2, 3, 4}
    assert len({tuple(m.flatten().tolist()) for m in mask[:, 0]}) > 80


def test_half_of_the_images_are_flipped() -> None:
    x = torch.arange(4, dtype=torch.uint8).view(1, 1, 1, 4).repeat(1000, 1, 1, 1)
    out = ImagePipeline(maximum=1, flip=True).train(x, rng())
    flipped = (out[:, 0, 0, 0] == 3).sum()
    assert 430 < int(flipped) < 570
    assert x[0].flatten().tolist() == [0, 1, 2, 3]


def test_cutout_sets_the_channel_mean_after_normalisation() -> None:
    pipeline = ImagePipeline(mean=(0.3,), std=(0.2,), cutout=2)
    out = pipeline.train(torch.full((50, 1, 4, 4), 255, dtype=torch.uint8), rng())
    assert sorted(set(out.flatten().tolist())) == pytest.approx([0.0, 3.5])


def test_resize_is_bilinear() -> None:
    x = torch.randint(0, 256, (2, 1, 28, 28), dtype=torch.uint8, generator=rng())
    out = ImagePipeline(resize=32).train(x, rng())
    assert out.shape == (2, 1, 32, 32)
    assert torch.equal(
        out, functional.interpolate(x.float() / 255, size=(32, 32), mode="bilinear", align_corners=False)
    )


def images(n: int) -> Examples:
    return Examples(torch.arange(n, dtype=torch.uint8).view(n, 1, 1, 1), torch.arange(n))


def batch_sizes(n: int, **settings: object) -> list[int]:
    options = LocalSettings(**({"batch_size": 4, "epochs": 1} | settings))  # type: ignore[arg-type]
    return [len(y) for _, y in local_batches(images(200), torch.arange(n), ImagePipeline(maximum=1), options, rng())]


@pytest.mark.parametrize(
    ("n", "drop_last", "expected"),
    [
        (8, False, [4, 4]),
        (10, False, [4, 4, 2]),
        (10, True, [4, 4]),
        (9, False, [4, 4]),
        (3, True, [3]),
        (1, False, []),
    ],
)
def test_partial_batches(n: int, drop_last: bool, expected: list[int]) -> None:
    assert batch_sizes(n, drop_last=drop_last) == expected


def test_an_epoch_visits_every_example_once_in_a_new_order() -> None:
    indices = torch.tensor([3, 5, 8, 13, 21, 34, 55, 89])
    settings = LocalSettings(batch_size=4, epochs=2)
    batches = list(local_batches(images(200), indices, ImagePipeline(maximum=1), settings, rng()))
    first, second = (torch.cat([y for _, y in batches[i : i + 2]]).tolist() for i in (0, 2))
    assert sorted(first) == sorted(second) == indices.tolist()
    assert first != second
    assert all(torch.equal(x.flatten().long(), y) for x, y in batches)


def test_evaluation_sees_every_example_in_order() -> None:
    labels = torch.cat([y for _, y in eval_batches(images(25), ImagePipeline(maximum=1), size=10)])
    assert labels.tolist() == list(range(25))


def test_a_random_part_of_a_constant_image_is_constant() -> None:
    out = random_resized_crop(torch.full((20, 3, 32, 32), 0.25), 48, rng())
    assert out.shape == (20, 3, 48, 48)
    assert torch.allclose(out, torch.tensor(0.25))


def test_random_parts_interpolate_and_follow_from_the_generator() -> None:
    x = torch.rand(16, 3, 32, 32, generator=rng(1))
    out = random_resized_crop(x, 40, rng(2))
    low, high = x.amin((2, 3), keepdim=True), x.amax((2, 3), keepdim=True)
    assert bool((out >= low - 1e-6).all())
    assert bool((out <= high + 1e-6).all())
    assert torch.equal(out, random_resized_crop(x, 40, rng(2)))
    assert not torch.equal(out, random_resized_crop(x, 40, rng(3)))
    assert not torch.equal(out[0], random_resized_crop(x[:1].expand(2, -1, -1, -1), 40, rng(2))[1])


def test_random_parts_have_the_areas_and_shapes_they_should() -> None:
    """Images whose channels are the coordinates of each pixel in [0, 1]: what a part spans is seen in its values.

    Its first and last pixel of 64 lie half a pixel inside, so that it spans 64/63 of their distance.
    """
    side = 512
    across = ((torch.arange(side) + 0.5) / side).expand(side, side)
    x = torch.stack([across, across.T]).expand(400, -1, -1, -1)
    out = random_resized_crop(x, 64, rng())
    width, height = ((out[:, c].amax((1, 2)) - out[:, c].amin((1, 2))) * 64 / 63 for c in (0, 1))
    area, ratio = width * height, width / height
    assert 0.079 < float(area.min()) < 0.12
    assert 0.9 < float(area.max()) < 1.01
    assert 0.745 < float(ratio.min()) < 0.77
    assert 1.30 < float(ratio.max()) < 1.345
    assert 0.45 < float(out.mean()) < 0.55  # anywhere, not at one side


def test_a_part_of_the_whole_area_is_the_resized_image(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random numbers of 1 for the area and 1/2 for the shape: the whole image."""
    monkeypatch.setattr(
        torch, "rand", lambda *size, generator: torch.tensor([1.0, 0.5, 0.3, 0.9])[:, None].expand(size)
    )
    x = torch.randint(0, 256, (4, 3, 32, 32), generator=rng()).float() / 255
    expected = functional.interpolate(x, size=224, mode="bilinear", align_corners=False)
    assert torch.allclose(random_resized_crop(x, 224, rng()), expected, atol=1e-4)


def test_training_at_another_side_crops_mirrors_and_normalises() -> None:
    pipeline = DATASETS["svhn"].view(64).pipeline
    white = torch.full((3, 3, 32, 32), 255, dtype=torch.uint8)
    for out in (pipeline.train(white, rng()), pipeline.test(white)):
        assert out.shape == (3, 3, 64, 64)
        assert torch.allclose(out, torch.tensor(1.0))  # (1 - 0.5) / 0.5
