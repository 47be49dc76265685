"""CKA against its definition, and what it must not depend on."""

import pytest
import torch
from torch import Tensor

from incofl.analysis.similarity import cka_matrix, debiased_matrix, gram
from incofl.engine.federation import Federation
from incofl.errors import ConfigError
from incofl.methods.moon import with_features
from incofl.server import Server
from incofl.split import submodel
from tests.federations import run_rounds, tiny_federation


def linear_cka(x: Tensor, y: Tensor) -> float:
    return float(cka_matrix([gram(x), gram(y)])[0, 1])


def feature_cka(x: Tensor, y: Tensor) -> float:
    """The feature form: ||Y'X||^2 / (||X'X|| ||Y'Y||) of centred columns."""
    x, y = (z - z.mean(0) for z in (x, y))
    norms = [float(torch.linalg.matrix_norm(a.T @ b)) for a, b in ((y, x), (x, x), (y, y))]
    return norms[0] ** 2 / (norms[1] * norms[2])


def kernel_cka(x: Tensor, y: Tensor) -> float:
    """The definition: tr(K H L H) / sqrt(tr(K H K H) tr(L H L H)) with H = I - 1/n."""
    n = len(x)
    h = torch.eye(n, dtype=x.dtype) - 1 / n
    K, L = x @ x.T, y @ y.T
    return float((K @ h @ L @ h).trace() / ((K @ h @ K @ h).trace() * (L @ h @ L @ h).trace()).sqrt())


def unbiased_hsic(x: Tensor, y: Tensor) -> float:
    """Song et al.'s formula: (tr(KL) + 1'K1 1'L1 / ((n-1)(n-2)) - 2 1'KL1 / (n-2)) / (n(n-3)), diagonals 0."""
    n = len(x)
    K, L = ((z @ z.T).fill_diagonal_(0) for z in (x, y))
    one = torch.ones(n, dtype=x.dtype)
    terms = (
        (K @ L).trace() + (one @ K @ one) * (one @ L @ one) / ((n - 1) * (n - 2)) - 2 * (one @ K @ L @ one) / (n - 2)
    )
    return float(terms / (n * (n - 3)))


def related(n: int, p: int, q: int, offset: float = 3.0) -> tuple[Tensor, Tensor]:
    """Two noisy linear images of one random cause, far from 0."""
    g = torch.Generator().manual_seed(n + p + q)
    cause = torch.randn(n, 3, generator=g, dtype=torch.float64)
    x, y = (
        cause @ torch.randn(3, size, generator=g, dtype=torch.float64)
        + torch.randn(n, size, generator=g, dtype=torch.float64)
        + offset
        for size in (p, q)
    )
    return x, y


def rotation(size: int) -> Tensor:
    g = torch.Generator().manual_seed(size)
    q: Tensor = torch.linalg.qr(torch.randn(size, size, generator=g, dtype=torch.float64)).Q
    return q


def test_by_hand() -> None:
    """X = (1, -1, 0), Y = (1, 0, -1): ||Y'X||^2 = 1, ||X'X|| = ||Y'Y|| = 2, so CKA = 1/4."""
    x, y = torch.tensor([[1.0], [-1.0], [0.0]]), torch.tensor([[1.0], [0.0], [-1.0]])
    assert linear_cka(x, y) == pytest.approx(0.25, abs=1e-15)


@pytest.mark.parametrize("shape", [(40, 7), (7, 40)], ids=["many examples", "many features"])
def test_one_for_rotations_scalings_and_shifts(shape: tuple[int, int]) -> None:
    x, _ = related(*shape, 3)
    rotated = x @ rotation(shape[1])
    for other in (x, rotated, -4 * x, 0.01 * rotated + 5):
        assert linear_cka(x, other) == pytest.approx(1, abs=1e-12)


def test_not_one_for_other_maps_and_near_zero_for_unrelated() -> None:
    """CKA forgives rotations alone: stretching one feature changes it."""
    x, _ = related(2000, 6, 3)
    assert linear_cka(x, x * torch.tensor([9, 1, 1, 1, 1, 1])) < 0.95
    g = torch.Generator().manual_seed(5)
    noise = torch.randn(2000, 6, generator=g, dtype=torch.float64)
    assert linear_cka(x, noise) < 0.02


@pytest.mark.parametrize("shape", [(60, 5, 8), (20, 50, 30), (20, 50, 6), (2, 3, 3)])
def test_it_is_the_kernel_form_and_the_feature_form(shape: tuple[int, int, int]) -> None:
    x, y = related(*shape, offset=100)
    expected = kernel_cka(x - x.mean(0), y - y.mean(0))  # the oracle itself loses digits far from 0
    assert linear_cka(x, y) == pytest.approx(expected, abs=1e-10)
    assert linear_cka(x, y) == pytest.approx(feature_cka(x, y), abs=1e-10)
    assert linear_cka(y, x) == pytest.approx(expected, abs=1e-10)


def test_float32_features_are_computed_with_in_float64() -> None:
    x, y = (z.float() for z in related(60, 9, 4, offset=50))
    assert linear_cka(x, y) == pytest.approx(kernel_cka(*(z.double() - z.double().mean(0) for z in (x, y))), abs=1e-10)


def test_columns_are_taken_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = related(30, 101, 40, offset=1000)
    expected = linear_cka(x, y)
    monkeypatch.setattr("incofl.analysis.similarity.COLUMNS", 7)
    assert linear_cka(x, y) == pytest.approx(expected, abs=1e-10)


def test_inputs_stay_as_they_are() -> None:
    x, y = related(10, 20, 20)
    before = x.clone()
    linear_cka(x, y)
    debiased_matrix([gram(x), gram(y)])
    assert torch.equal(x, before)


def test_the_unbiased_estimate_is_songs() -> None:
    x, y = related(25, 6, 9)
    hsic = [unbiased_hsic(a, b) for a, b in ((x, y), (x, x), (y, y))]
    assert float(debiased_matrix([gram(x), gram(y)])[0, 1]) == pytest.approx(
        hsic[0] / (hsic[1] * hsic[2]) ** 0.5, abs=1e-10
    )


def test_what_the_unbiased_estimate_is_for() -> None:
    """Noise of many features: the plain CKA of few examples is near 1, the unbiased one near 0."""
    g = torch.Generator().manual_seed(0)
    grams = [gram(torch.randn(50, 2000, generator=g)) for _ in range(2)]
    assert float(cka_matrix(grams)[0, 1]) > 0.9
    assert abs(float(debiased_matrix(grams)[0, 1])) < 0.05


def test_the_unbiased_estimate_on_a_real_layer() -> None:
    """The estimate from a few examples is near the plain CKA of all; of all examples both agree."""
    federation = tiny_federation("data.limit=1400", "model.width=1")
    servers = run_rounds(federation, 2)
    features = [pooled(federation, server) for server in (servers[0], servers[-1])]
    assert features[0].shape == (1400, 16)
    full = linear_cka(*features)
    parts = [debiased_matrix([gram(x[part]) for x in features]) for part in torch.arange(1400).tensor_split(20)]
    assert 0.1 < full < 0.95
    assert float(torch.stack(parts).mean(0)[0, 1]) == pytest.approx(full, abs=1e-2)
    assert float(parts[0][0, 0]) == pytest.approx(1)
    assert float(debiased_matrix([gram(x) for x in features])[0, 1]) == pytest.approx(full, abs=2e-3)


@torch.inference_mode()
def pooled(federation: Federation, server: Server) -> Tensor:
    """What the head of the largest level gets of each training example."""
    piece = federation.slice(2, 0)
    module = submodel(federation.model.template, federation.model.layout, piece)
    module.load_state_dict(piece.take(server.state(2)))
    return with_features(module.eval(), federation.data.pipeline.test(federation.data.train.x))[1]


@pytest.mark.parametrize("shapes", [((3, 2), (4, 2)), ((3,), (3,)), ((3, 2, 2), (3, 2))])
def test_refuses_what_are_no_representations_of_the_same_examples(shapes: tuple[tuple[int, ...], ...]) -> None:
    x, y = (torch.ones(shape) for shape in shapes)
    with pytest.raises(ConfigError, match="CKA: got"):
        linear_cka(x, y)


def test_refuses_too_few_examples() -> None:
    with pytest.raises(ConfigError, match="at least 2"):
        linear_cka(torch.ones(1, 1), torch.ones(1, 1))
    with pytest.raises(ConfigError, match="at least 4"):
        debiased_matrix([gram(torch.rand(3, 2))])
