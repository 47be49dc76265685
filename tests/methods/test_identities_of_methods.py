"""In float64: which methods are the same, and when."""

import dataclasses
import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from incofl.client import ClientInput, Local, LocalSettings, Setting, Upload
from incofl.data.pipeline import eval_batches
from incofl.engine.executor import InProcess
from incofl.engine.store import ClientStore
from incofl.evaluate import evaluate
from incofl.methods.heterofl import HeteroFL, HeteroFLServer
from incofl.methods.moon import Moon, contrast, with_features
from incofl.methods.scalefl import ScaleFL, divergence, weighted_loss
from incofl.server import Server
from incofl.split import submodel
from incofl.task import CLASSIFICATION, Score
from tests.federations import run_rounds, tiny_federation
from tests.methods.quadratic import LAYOUT

EXACT = "aggregate.precision=float64"


def loss_of(score: Score) -> float:
    return CLASSIFICATION.values(score)["loss"]


def close(a: Server, b: Server, tolerance: float = 1e-12) -> bool:
    return all(
        torch.allclose(a.state(level)[name], b.state(level)[name], rtol=tolerance, atol=tolerance)
        for level in a.population
        for name in a.layout.parameters
    )


@pytest.mark.usefixtures("double")
class TestSameAsFedAvg:
    @pytest.mark.parametrize("form", ["", "hetero"])
    @pytest.mark.parametrize(("name", "settings"), [("prox", ["prox.mu=0"]), ("moon", ["moon.mu=0"])])
    def test_without_their_term(self, form: str, name: str, settings: list[str]) -> None:
        method = f"hetero{name}" if form else {"prox": "fedprox", "moon": "moon"}[name]
        ours = run_rounds(tiny_federation(f"method={method}", EXACT, *settings), 3)[-1]
        theirs = run_rounds(tiny_federation(f"method={form or 'fed'}avg", EXACT), 3)[-1]
        assert close(ours, theirs, 0)

    @pytest.mark.parametrize("form", ["", "hetero"])
    def test_scaffold_in_its_first_round_only(self, form: str) -> None:
        ours = run_rounds(tiny_federation(f"method={form}scaffold", EXACT), 2)
        theirs = run_rounds(tiny_federation(f"method={form or 'fed'}avg", EXACT), 2)
        assert close(ours[1], theirs[1])
        assert not close(ours[2], theirs[2])

    @pytest.mark.parametrize("form", ["fed", "hetero"])
    def test_fednova_with_equal_steps(self, form: str) -> None:
        """An IID partition of 300 examples over ten clients: two batches of 16 each, and the weights are the same."""
        same = ["data.partition=iid", EXACT, "aggregate.weighting=samples"]
        ours = run_rounds(tiny_federation(f"method={form}nova", *same), 2)[-1]
        theirs = run_rounds(tiny_federation(f"method={form}avg", *same), 2)[-1]
        assert close(ours, theirs)

    def test_fednova_with_unequal_steps_is_not(self) -> None:
        same = ["data.alpha=0.1", EXACT, "aggregate.weighting=samples"]
        ours = run_rounds(tiny_federation("method=heteronova", *same), 1)[-1]
        theirs = run_rounds(tiny_federation("method=heteroavg", *same), 1)[-1]
        assert not close(ours, theirs)

    def test_heterofl_at_full_width(self) -> None:
        """All clients at full width, without label rows, masks and their statistics."""
        full = ["split.kind=hetero", "split.levels=[1.0]", EXACT, "buffers=average"]
        plain = ["heterofl.mask=false", "heterofl.label_rows=false"]
        ours = run_rounds(tiny_federation("method=heterofl", *full, *plain), 2)[-1]
        theirs = run_rounds(tiny_federation("method=heteroavg", *full), 2)[-1]
        assert close(ours, theirs, 0)
        masked = run_rounds(tiny_federation("method=heterofl", *full, "data.alpha=0.1"), 2)[-1]
        assert not close(masked, theirs)


@pytest.mark.usefixtures("double")
def test_fedrolex_starts_as_heterofl() -> None:
    """Round 0 is the same, round 1 is not."""
    rolex, hetero = (run_rounds(tiny_federation(f"method={m}", EXACT), 2) for m in ("fedrolex", "heterofl"))
    assert all(torch.equal(rolex[1].shared[n], hetero[1].shared[n]) for n in rolex[1].layout.parameters)
    assert any(not torch.equal(rolex[2].shared[n], hetero[2].shared[n]) for n in rolex[2].layout.parameters)


@pytest.mark.usefixtures("double")
def test_fedrolex_weights_by_history_cancel() -> None:
    """A position was updated h times before, whoever holds it now: sum h x / sum h is the plain mean of the x."""
    federation = tiny_federation("method=fedrolex", EXACT)
    server = dataclasses.replace(federation.start(), round=3)
    layout, pieces = server.layout, [federation.slice(level, 3) for level in (0, 1, 1, 2)]
    history = {n: torch.randint(1, 9, layout.shapes[n]).double() for n in layout.parameters}
    total, weight = ({n: torch.zeros(layout.shapes[n]) for n in layout.parameters} for _ in range(2))
    uploads = []
    for client, piece in enumerate(pieces):
        update = {n: torch.randn(s) for n, s in piece.shapes.items() if n in layout.parameters}
        counts = piece.take(history)
        piece.put({n: counts[n] * update[n] for n in update}, total)
        piece.put(counts, weight)
        uploads.append(Upload(client, 0, piece, update, {}, 1, 1, 0.0))
    mean = federation.method.server.aggregate(server, [uploads]).shared.values
    for name, value in mean.items():
        torch.testing.assert_close(value, total[name] / weight[name].clamp(min=1), rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("double")
def test_fedrolex_is_evaluated_as_it_was_trained() -> None:
    """After two rounds (0 and 1) the sub-model of a level is that of round 1's window, not of the next."""
    federation = tiny_federation("method=fedrolex")
    server = dataclasses.replace(federation.start(), round=2)
    (score,) = InProcess(federation).evaluate(server, [0])
    losses = []
    for round in (1, 2):
        piece = federation.slice(0, round)
        module = submodel(federation.model.template, federation.model.layout, piece)
        batches = eval_batches(federation.data.test, federation.data.pipeline)
        losses.append(loss_of(evaluate(module, piece.take(server.state(0)), batches)))
    assert loss_of(score) == pytest.approx(losses[0], rel=1e-9)
    assert loss_of(score) != pytest.approx(losses[1], rel=1e-6)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("split", ["stage", "hetero"])
@pytest.mark.parametrize("name", ["heteroscaffold", "scaffold"])
def test_scaffolds_variate_is_the_mean_of_its_clients(name: str, split: str) -> None:
    """Over the population that holds each position, at all times; who has not trained yet has 0."""
    federation = tiny_federation(f"method={name}", f"split.kind={split}", EXACT)
    store, server = ClientStore(federation), federation.start()
    for _ in range(4):
        server = run_rounds(federation, 1, server=server, store=store)[-1]
        layout = server.layout
        for level in server.population if name == "scaffold" else (None,):
            sums = {n: torch.zeros(layout.shapes[n]) for n in layout.parameters}
            counts = {n: torch.zeros(layout.shapes[n]) for n in layout.parameters}
            for client in range(len(federation.levels)):
                if level is None or federation.level_of(client) == level:
                    piece = federation.slice(federation.level_of(client), 0)
                    held = {n: torch.ones(s) for n, s in piece.shapes.items() if n in layout.parameters}
                    piece.put(held, counts)
                    piece.put(store.get(client, piece), sums)
            table = server.extra["variate" if level is None else f"variate-{level}"]
            for n in layout.parameters:
                mean = sums[n] / counts[n].clamp(min=1)
                torch.testing.assert_close(table[n], mean, rtol=1e-12, atol=1e-12)
        assert any(value.abs().sum() > 0 for tensors in server.extra.values() for value in tensors.values())


@pytest.mark.usefixtures("double")
class TestMoon:
    def test_log_two(self) -> None:
        z = torch.randn(5, 7)
        for temperature in (0.1, 0.5, 3.0):
            assert float(contrast(z, z, z, temperature)) == pytest.approx(math.log(2), abs=1e-12)

    def test_by_hand(self) -> None:
        """cos(z, z_g) = 0 and cos(z, z_p) = 1 at T = 0.5: -log(1 / (1 + e^2))."""
        z, z_g = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 2.0]])
        assert float(contrast(z, z_g, 3 * z, 0.5)) == pytest.approx(math.log(1 + math.e**2), abs=1e-12)

    @pytest.mark.parametrize("mu", [0.1, 5.0])
    def test_the_loss_by_hand(self, mu: float) -> None:
        """A head of zeros: cross-entropy log 2. Features turned by a right angle since received: as above."""
        model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
        same, turned = torch.eye(2), torch.tensor([[0.0, -1.0], [1.0, 0.0]])
        states = [{"0.weight": features, "1.weight": torch.zeros(2, 2)} for features in (turned, same)]
        model.load_state_dict(states[1])
        local = Local(model, ClientInput(states[0], memory=states[1]), LocalSettings())
        rule = Moon(mu=mu, temperature=0.5)
        rule.begin(local)
        loss = rule.loss(local, torch.tensor([[1.0, 0.0]]), torch.tensor([0]))
        assert float(loss.detach()) == pytest.approx(math.log(2) + mu * math.log(1 + math.e**2), abs=1e-12)

    def test_no_term_before_the_first_training_and_one_after(self) -> None:
        """Everybody takes part: the first round is FedAvg's, the second is not."""
        everybody = ["data.clients=5", EXACT]
        moon = run_rounds(tiny_federation("method=heteromoon", *everybody), 2, cohort=5)
        fedavg = run_rounds(tiny_federation("method=heteroavg", *everybody), 2, cohort=5)
        assert close(moon[1], fedavg[1], 0)
        assert not close(moon[2], fedavg[2])

    def test_frozen_models_are_in_evaluation_mode(self) -> None:
        model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 2))
        state = {name: value.clone() for name, value in model.state_dict().items()}
        local = Local(model.train(), ClientInput(state, memory=state), LocalSettings())
        Moon().begin(local)
        x, y = torch.randn(6, 4), torch.tensor([0, 1] * 3)
        Moon().loss(local, x, y).backward()  # type: ignore[no-untyped-call]
        for which in ("received", "previous"):
            other = local.scratch[which]
            assert not other.training
            assert torch.equal(other[2].running_mean, state["2.running_mean"])
            assert all(not parameter.requires_grad for parameter in other.parameters())
        assert model.training

    def test_features_are_what_the_head_gets(self) -> None:
        model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
        x = torch.randn(6, 4)
        logits, z = with_features(model, x)
        assert torch.equal(z, model[:3](x))
        assert torch.equal(logits, model(x))
        assert not model[3]._forward_hooks

    def test_a_model_without_a_head_is_refused(self) -> None:
        from incofl.errors import ConfigError

        with pytest.raises(ConfigError, match="moon needs a model whose last layer is linear; Sequential has another"):
            Moon().check(Setting(nn.Sequential(nn.Linear(4, 3), nn.ReLU()), torch.zeros(2, 4), LAYOUT))

    def test_remembers_the_last_local_model(self) -> None:
        federation = tiny_federation("method=heteromoon", "data.clients=1", "cohort=1", EXACT, "split.levels=1")
        store = ClientStore(federation)
        server = run_rounds(federation, 1, cohort=1, store=store)[-1]
        piece = federation.slice(0, 0)
        memory = store.get(0, piece)
        assert memory.keys() == piece.index.keys()
        for name in server.layout.parameters:  # one client: the server is its model
            torch.testing.assert_close(memory[name], server.shared[name], rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("double")
class TestHeteroFL:
    def test_masked_logits_carry_no_gradient(self) -> None:
        """Classes 1 and 3 are absent: logits 0 there, so the loss is log(e^2 + e^1 + 2) - 2."""
        head = nn.Linear(1, 4, bias=False)
        with torch.no_grad():
            head.weight.copy_(torch.tensor([[2.0], [5.0], [1.0], [-7.0]]))
        local = Local(head, ClientInput({}, labels=torch.tensor([3, 0, 1, 0])), LocalSettings())
        loss = HeteroFL().loss(local, torch.ones(1, 1), torch.tensor([0]))
        assert float(loss.detach()) == pytest.approx(math.log(math.e**2 + math.e + 2) - 2, abs=1e-12)
        loss.backward()  # type: ignore[no-untyped-call]
        assert head.weight.grad is not None
        assert head.weight.grad[1].item() == head.weight.grad[3].item() == 0
        assert head.weight.grad[0].item() != 0

    def test_label_rows(self) -> None:
        """A class that only one client has moves by that client's update alone; one that nobody has stays."""
        federation = tiny_federation("method=heterofl", EXACT)
        server, piece = federation.start(), federation.slice(2, 0)
        uploads = []
        for value, classes in ((1.0, [0, 1]), (3.0, [1, 2])):
            labels = torch.zeros(10, dtype=torch.int64)
            labels[classes] = 5
            update = {n: torch.full(s, value) for n, s in piece.shapes.items() if n in server.layout.parameters}
            uploads.append(Upload(int(value), 2, piece, update, {}, 10, 1, 0.0, labels=labels))
        changes = HeteroFLServer(precision="float64").aggregate(server, [uploads])
        assert changes.shared.values["fc.bias"].tolist() == [1, 2, 3, *[0] * 7]
        assert changes.shared.values["fc.weight"][:, 0].tolist() == [1, 2, 3, *[0] * 7]
        assert bool((changes.shared.values["conv1.weight"] == 2.0).all())
        after = server.advance(changes)
        assert torch.equal(after.shared["fc.weight"][3:], server.shared["fc.weight"][3:])
        plain = HeteroFLServer(precision="float64", options=HeteroFL(label_rows=False))
        assert plain.aggregate(server, [uploads]).shared.values["fc.bias"].tolist() == [2.0] * 10

    def test_the_scaler_is_neutral_before_batch_norm(self) -> None:
        """But for eps: with a tiny one, two rounds agree to many digits."""
        results = []
        for scaler in ("true", "false"):
            federation = tiny_federation("method=heterofl", EXACT, f"heterofl.scaler={scaler}")
            for module in federation.model.template.modules():
                if isinstance(module, nn.BatchNorm2d):
                    module.eps = 1e-14
            results.append(run_rounds(federation, 1)[-1])
        assert close(results[0], results[1], 1e-4)

    def test_static_statistics_are_those_of_the_training_images(self) -> None:
        """Means over batches of all (300 < 5,000) training images, at each width, and they are used."""
        federation = tiny_federation("method=heterofl")
        server = run_rounds(federation, 1)[-1]
        measured = InProcess(federation).measure(server, [0, 2])
        for level in (0, 2):
            piece = federation.slice(level, 1)
            module = submodel(federation.model.template, federation.model.layout, piece)
            module.load_state_dict(piece.take(server.state(level)))
            batches = [x for x, _ in eval_batches(federation.data.train, federation.data.pipeline)]
            x = torch.cat(batches)
            expected = module.conv1(x).mean((0, 2, 3))  # type: ignore[operator]
            got = piece.take(measured[level])["bn1.running_mean"]
            torch.testing.assert_close(got, expected.detach(), rtol=1e-6, atol=1e-8)
        later = server.measured(measured)
        assert not torch.equal(later.state(0)["bn1.running_mean"], server.state(0)["bn1.running_mean"])
        ours, theirs = (loss_of(InProcess(federation).evaluate(state, [0])[0]) for state in (later, server))
        assert ours != theirs


class TestScaleFL:
    def test_one_exit_is_cross_entropy(self) -> None:
        logits, y = torch.randn(6, 4), torch.randint(4, (6,))
        assert torch.equal(weighted_loss([logits], y, 0.05, 3.0), functional.cross_entropy(logits, y))

    def test_later_exits_weigh_more(self) -> None:
        """1/6, 2/6 and 3/6 of three exits."""
        y = torch.tensor([0])
        exits = [torch.tensor([[float(k), 0.0]]) for k in (1, 2, 3)]
        losses = [float(functional.cross_entropy(logits, y)) for logits in exits]
        expected = (losses[0] + 2 * losses[1] + 3 * losses[2]) / 6
        assert float(weighted_loss(exits, y, 0.0, 3.0)) == pytest.approx(expected, rel=1e-6)

    def test_divergence_by_hand(self) -> None:
        """t = 1, q = (3/4, 1/4), p = (1/2, 1/2): (3/4 log 3/2 + 1/4 log 1/2) / 2 classes."""
        teacher, student = torch.tensor([[math.log(3.0), 0.0]]), torch.zeros(1, 2)
        expected = (0.75 * math.log(1.5) + 0.25 * math.log(0.5)) / 2
        assert float(divergence(teacher, student, 1.0)) == pytest.approx(expected, rel=1e-6)

    def test_earlier_exits_learn_from_the_last(self) -> None:
        """Exit (1/2, 1/2), last (3/4, 1/4), t = 1: (CE_1 + gamma / 2 (3/4 log 3/2 + 1/4 log 1/2) + 2 CE_2) / 3."""
        first, last, y = torch.zeros(1, 2), torch.tensor([[math.log(3), 0.0]]), torch.tensor([0])
        taught = (0.75 * math.log(1.5) - 0.25 * math.log(2)) / 2
        expected = (math.log(2) + 4 * taught + 2 * math.log(4 / 3)) / 3
        assert float(weighted_loss([first, last], y, 4.0, 1.0)) == pytest.approx(expected, rel=1e-6)
        assert ScaleFL().for_run(40, 5).distil_after == 10

    def test_divergence_grows_with_the_square_of_the_temperature(self) -> None:
        """t = 3, logits three times as large: the same q and p, and so 9 times the value."""
        teacher, student = torch.tensor([[3 * math.log(3.0), 0.0]]), torch.zeros(1, 2)
        expected = 9 * (0.75 * math.log(1.5) + 0.25 * math.log(0.5)) / 2
        assert float(divergence(teacher, student, 3.0)) == pytest.approx(expected, rel=1e-6)

    def test_the_teacher_is_not_trained_by_it(self) -> None:
        first, last = (torch.randn(3, 4, requires_grad=True) for _ in range(2))
        y = torch.randint(4, (3,))
        weighted_loss([first, last], y, 10.0, 3.0).backward()  # type: ignore[no-untyped-call]
        alone = last.detach().clone().requires_grad_()
        (2 * functional.cross_entropy(alone, y) / 3).backward()  # type: ignore[no-untyped-call]
        torch.testing.assert_close(last.grad, alone.grad)
        trained = last.detach().clone().requires_grad_()
        weighted_loss([first, trained], y, 10.0, 3.0, train_teacher=True).backward()  # type: ignore[no-untyped-call]
        assert trained.grad is not None
        assert not torch.allclose(trained.grad, alone.grad)  # type: ignore[arg-type]

    def test_distillation_starts_late(self) -> None:
        same = ["method=scalefl", "scalefl.distil_after=1"]
        with_it = run_rounds(tiny_federation(*same, "scalefl.gamma=5"), 2)
        without = run_rounds(tiny_federation(*same, "scalefl.gamma=0"), 2)
        assert all(torch.equal(with_it[1].shared[n], without[1].shared[n]) for n in with_it[1].shared)
        assert any(not torch.equal(with_it[2].shared[n], without[2].shared[n]) for n in with_it[2].shared)
