"""ReeFL: exits of a ViT that share one classifier."""

import math
from pathlib import Path

import pytest
import torch
from torch import nn

import incofl
from incofl.client import ClientInput, Local, LocalSettings
from incofl.errors import ConfigError
from incofl.methods.reefl import ReeFL, taught
from incofl.models.vit import SharedExit, VisionTransformer
from tests.federations import run_rounds, tiny_config, tiny_federation
from tests.methods.test_depthfl import module_of
from tests.methods.test_identities import same

VIT = ("model.name=tiny-vit", "model.patch=2")


def test_distillation_by_hand() -> None:
    """Teacher (3/4, 1/4) and two students that say the reverse: log 3 / 2 each; the teacher has no gradient."""
    log3 = math.log(3)
    a, b = torch.tensor([[log3, 0.0]], requires_grad=True), torch.tensor([[0.0, log3]], requires_grad=True)
    loss = taught([b, a, b], 1)
    assert float(loss.detach()) == pytest.approx(log3, abs=1e-6)
    loss.backward()  # type: ignore[no-untyped-call]
    assert a.grad is None
    assert b.grad is not None


def test_the_teacher_comes_first_in_the_divergence() -> None:
    """Teacher (3/4, 1/4), student (1/2, 1/2): 3/4 log 3/2 + 1/4 log 1/2; the other way round log 2 - log 3 / 2."""
    teacher, student = torch.tensor([[math.log(3), 0.0]]), torch.zeros(1, 2)
    assert float(taught([teacher, student], 0)) == pytest.approx(0.75 * math.log(1.5) - 0.25 * math.log(2), abs=1e-6)
    assert float(taught([teacher, student], 1)) == pytest.approx(math.log(2) - math.log(3) / 2, abs=1e-6)


def test_the_weight_of_the_distillation_rises() -> None:
    """With lambda exp(-5 / 4) in the middle of the rise, times the factor; the rise is three tenths of the rounds."""
    teacher, student, y = torch.tensor([[math.log(3), 0.0]]), torch.zeros(1, 2), torch.tensor([0])

    class Fixed(nn.Module):
        def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
            return [student, teacher]

    local = Local(Fixed(), ClientInput({}, round=5), LocalSettings())
    losses, divergence = math.log(2) + math.log(4 / 3), float(taught([student, teacher], 1))
    for factor in (1.0, 0.3, 0.0):
        found = float(ReeFL(rise=10, distil=factor).loss(local, torch.zeros(1), y))
        assert found == pytest.approx(losses + factor * math.exp(-5 / 4) * divergence, abs=1e-6)
    assert [ReeFL().for_run(rounds, 5).rise for rounds in (1000, 1)] == [300, 1]


def test_the_best_exit_teaches() -> None:
    """Running losses: after (1, 2) and (3, 1) they are 1.4 and 1.8: the first still teaches; after (9, 1) the second.

    Logits (x, 0) for the class 0 have the loss log(1 + e^-x).
    """

    class Fixed(nn.Module):
        losses = (1.0, 2.0)

        def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
            return [torch.tensor([[-math.log(math.exp(loss) - 1), 0.0]]) for loss in self.losses]

    model = Fixed()
    local, y = Local(model, ClientInput({}, round=10), LocalSettings()), torch.tensor([0])
    for losses, running, teacher in (
        ((1.0, 2.0), (1.0, 2.0), 0),
        ((3.0, 1.0), (1.4, 1.8), 0),
        ((9.0, 1.0), (2.92, 1.64), 1),
    ):
        model.losses = losses
        found = float(ReeFL(rise=10).loss(local, torch.zeros(1), y))
        assert local.scratch["running"].tolist() == pytest.approx(running, abs=1e-5)
        assert found == pytest.approx(sum(losses) + float(taught(model(y), teacher)), abs=1e-5)


@pytest.mark.usefixtures("double")
def test_levels_hold_the_blocks_before_their_exit_and_the_shared_classifier() -> None:
    federation = tiny_federation("method=reefl", *VIT)
    x = torch.randn(4, 1, 8, 8)
    logits = []
    for level in range(3):
        module = module_of(federation, level)
        assert isinstance(module, VisionTransformer)
        every = module.train()(x)
        assert [tuple(o.shape) for o in every] == [(4, 10)] * (level + 1)
        sum(o.square().sum() for o in every).backward()
        assert all(parameter.grad is not None for parameter in module.parameters())
        answer = module.eval()(x)
        assert isinstance(answer, torch.Tensor)
        assert torch.allclose(answer, every[-1], atol=1e-12)
        logits.append(every)
    for level in (1, 2):  # a smaller level is the beginning of a larger one
        for small, large in zip(logits[level - 1], logits[level], strict=False):
            assert torch.allclose(small, large, atol=1e-12)
    held = [federation.slice(level, 0).index.keys() for level in range(3)]
    assert {"shared.token", "exits.0.position"} <= held[0]
    assert "exits.1.position" in held[1] - held[0]
    assert not any(name.startswith(("norm.", "head.")) for name in held[2])


def test_an_exit_sees_the_earlier_ones() -> None:
    """The second exit changes with the class token of the first, which it attends to."""
    federation = tiny_federation("method=reefl", *VIT)
    module, x = module_of(federation, 2).train(), torch.randn(4, 1, 8, 8)
    before = module(x)
    with torch.no_grad():
        place = module.get_parameter("exits.0.position")
        place.add_(torch.randn(place.shape, generator=torch.Generator().manual_seed(0)))
    after = module(x)
    assert not torch.allclose(before[2], after[2], atol=1e-6)


def test_the_shared_classifier_reads_its_own_token() -> None:
    """ReeFL's sizes: 8 heads of 2 channels, 1.35 times the stream. Where the layer adds nothing, inputs count not."""
    shared = SharedExit(20, 3)
    shapes = [tuple(shared.get_parameter(f"block.{key}.weight").shape) for key in ("attn.qkv", "attn.proj", "mlp.fc1")]
    assert shapes == [(48, 20), (20, 16), (27, 20)]
    assert shared.block.attn.head_dim == 2
    x = torch.randn(2, 4, 20)
    assert not torch.equal(shared(x)[0], shared(x)[1])
    for key in ("attn.proj", "mlp.fc2"):
        nn.init.zeros_(shared.get_parameter(f"block.{key}.weight"))
    expected = shared.head(shared.norm(shared.token[:, 0]))
    assert torch.allclose(shared(x), expected.expand(2, -1), atol=1e-6)


def test_one_exit_is_cross_entropy() -> None:
    """Then there is nobody to teach, and the factor of the distillation means nothing."""
    runs = [
        run_rounds(tiny_federation("method=reefl", *VIT, "split.levels=1", f"reefl.distil={distil}"), 1)[-1].shared
        for distil in (0, 1)
    ]
    assert same(*runs)


def test_an_exit_can_be_used(tmp_path: Path) -> None:
    incofl.run(tiny_config("method=reefl", *VIT, "rounds=1"), tmp_path / "run")
    x = torch.randn(2, 1, 8, 8)
    whole = incofl.load_model(tmp_path / "run")
    early = incofl.load_model(tmp_path / "run", exit=1)
    assert torch.allclose(early(x), whole.train()(x)[1], atol=1e-6)
    assert sum(p.numel() for p in early.parameters()) < sum(p.numel() for p in whole.parameters())


def test_other_models_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"model.name: ResNet cannot have a shared exit, expected a ViT or a model"):
        tiny_federation("method=reefl")
