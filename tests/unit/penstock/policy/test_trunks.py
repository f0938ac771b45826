"""Convolutional trunks: which one is chosen, what fits, and how IMPALA's begins."""

import pytest
import torch
from torch import nn

from penstock.config.settings import PolicySection
from penstock.policy.networks import ImageEncoder, ResidualBlock
from penstock.policy.policy import build
from penstock.protocol.spaces import Dict, Discrete
from tests.support.experience.experience import box
from tests.unit.penstock.policy.test_policy import image

SIZES = [
    ("auto", (84, 84, 4), 512, 3),
    ("auto", (36, 40), 512, 3),
    ("auto", (35, 84, 1), 512, 2),
    ("nature", (4, 84, 84), 512, 3),
    ("small", (84, 84, 3), 512, 2),
    ("small", (1, 1, 3), 512, 2),
    ("impala", (72, 96, 3), 256, 15),
    ("impala", (10, 10), 256, 15),
    ("impala", (3, 8, 8), 256, 15),
]


@pytest.mark.parametrize(("trunk", "shape", "width", "convolutions"), SIZES)
def test_every_trunk_reads_every_layout(
    trunk: str, shape: tuple[int, ...], width: int, convolutions: int
) -> None:
    encoder = ImageEncoder("observation", image(*shape), trunk)
    with torch.no_grad():
        features = encoder(torch.randint(0, 256, (2, *shape), dtype=torch.uint8))
    assert features.shape == (2, encoder.width) == (2, width)
    assert sum(isinstance(layer, nn.Conv2d) for layer in encoder.modules()) == convolutions


def test_the_layout_decides_what_is_a_channel() -> None:
    last = ImageEncoder("observation", image(10, 12, 3), "impala")
    first = ImageEncoder("observation", image(3, 10, 12), "impala")
    first.load_state_dict(last.state_dict())
    seen = torch.randint(0, 256, (4, 10, 12, 3), dtype=torch.uint8)
    with torch.no_grad():
        torch.testing.assert_close(first(seen.permute(0, 3, 1, 2)), last(seen))


def test_the_number_of_parameters_is_that_of_the_papers() -> None:
    nature = ImageEncoder("observation", image(84, 84, 4), "nature")
    assert sum(p.numel() for p in nature.parameters()) == (
        (4 * 64 + 1) * 32 + (32 * 16 + 1) * 64 + (64 * 9 + 1) * 64 + (64 * 49 + 1) * 512
    )
    impala = ImageEncoder("observation", image(72, 96, 3), "impala")
    sections = [
        (before * 9 + 1) * after + 4 * (after * 9 + 1) * after
        for before, after in ((3, 16), (16, 32), (32, 32))
    ]
    assert sum(p.numel() for p in impala.parameters()) == sum(sections) + (32 * 9 * 12 + 1) * 256


def test_a_residual_block_begins_as_the_identity() -> None:
    policy = build(image(10, 10), Discrete(2), PolicySection(image_trunk="impala"), 0)
    blocks = [module for module in policy.modules() if isinstance(module, ResidualBlock)]
    assert len(blocks) == 12
    planes = torch.randn(2, blocks[0].first.in_channels, 5, 5)
    assert torch.equal(blocks[0](planes), planes)
    with torch.no_grad():
        nn.init.ones_(blocks[0].second.weight)
    assert not torch.equal(blocks[0](planes), planes)


@pytest.mark.parametrize(
    ("trunk", "size", "words"),
    [
        (
            "nature",
            35,
            r"'observation/camera'.*image_trunk='nature', which takes 36 .*use auto, small or impala",
        ),
        ("impala", 7, r"'observation/camera'.*image_trunk='impala', which takes 8 .*use auto or small"),
    ],
)
def test_an_image_too_small_for_its_trunk_is_refused_by_name(trunk: str, size: int, words: str) -> None:
    space = Dict((("arm", box(2)), ("camera", image(size, 84, 3))))
    with pytest.raises(ValueError, match=words):
        build(space, Discrete(2), PolicySection.model_validate({"image_trunk": trunk}), 0)
