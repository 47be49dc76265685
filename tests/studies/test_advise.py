"""From a fleet to a recommendation: who trains what, what each option costs, and what was gained."""

import json
from pathlib import Path

import pytest

from incofl.config import make_config
from incofl.costs import Cost, DeviceClass
from incofl.engine.build import levels_of_fleet, outline
from incofl.errors import ConfigError
from incofl.methods import BASELINES, METHODS, SLICES
from incofl.studies.advise import ASSUMED_EXAMPLES, OPTIONS, Advice, advise
from tests.shell import Shell

# Three levels of a small network: (1,), (2,), (3,) blocks of one width.
BASE = [
    "model.name=tiny-resnet",
    "data.name=digits",
    "data.limit=120",
    "eval.limit=40",
    "local.epochs=2",
    "local.batch_size=16",
    "cohort=4",
    "rounds=2",
]


def costs_of(method: str) -> list[Cost]:
    return outline(make_config(None, [*BASE, f"method={method}"])).costs


def tablet_memory() -> int:
    """Memory for the second level under every option, and for more under some."""
    return costs_of("fedfloor")[1].memory


@pytest.fixture(scope="module")
def fleet() -> list[DeviceClass]:
    """Watches hold nothing, phones the smallest level, tablets the second, workstations all."""
    return [
        DeviceClass("watch", 3, memory=1000),
        DeviceClass("phone", 6, memory=costs_of("heteroavg")[0].memory, speed=10**9),
        DeviceClass("tablet", 4, memory=tablet_memory()),
        DeviceClass("workstation", 2, speed=10**6),
    ]


@pytest.fixture(scope="module")
def advice(fleet: list[DeviceClass]) -> Advice:
    return advise(devices=fleet, overrides=BASE)


def test_options_are_methods_in_plain_words() -> None:
    assert set(OPTIONS) <= set(METHODS)
    assert OPTIONS == {**BASELINES, **SLICES}


def test_a_device_gets_the_largest_level_that_fits_under_every_option(advice: Advice) -> None:
    """FedFloor needs the memory of the smallest path as well: a tablet with just enough for the largest misses it."""
    largest = len(advice.levels) - 1
    levels = [each.level for each in advice.fleet]
    assert levels[0] is None
    assert levels[1] == 0
    assert levels[2] == 1
    assert levels[3] == largest
    plain = advise(devices=[each.device for each in advice.fleet], overrides=BASE, methods=["allsmall", "heteroavg"])
    assert (
        plain.fleet[2].level == max(cost.level for cost in costs_of("heteroavg") if cost.memory <= tablet_memory()) > 1
    )
    needs = advice.fleet[0].why
    assert needs.startswith("the smallest level needs memory ")
    assert needs.endswith(", has 1 kB")


def test_what_is_left_out_is_no_client(advice: Advice) -> None:
    assert advice.config.data.clients == 12
    assert sum(advice.counts) == 12
    assert advice.counts[0] == 6
    assert advice.counts[-1] == 2


def test_the_costs_of_a_round_by_hand(advice: Advice) -> None:
    """120 examples of 12 clients are 10 each, 2 epochs, 3 passes: 60 forward passes of an example a turn."""
    options = {option.method: option for option in advice.options}
    assert list(options) == list(OPTIONS)
    small, large = advice.levels[0], advice.levels[-1]
    assert (options["allsmall"].devices, options["largestonly"].devices, options["heteroavg"].devices) == (12, 2, 12)
    assert options["allsmall"].bytes == 4 * (small.bytes_down + small.bytes_up)
    assert options["largestonly"].bytes == 2 * (large.bytes_down + large.bytes_up)  # a cohort of 4, but two devices
    middle = advice.levels[advice.fleet[2].level or 0]
    mean = sum(count * (c.bytes_down + c.bytes_up) for count, c in ((6, small), (4, middle), (2, large))) / 12
    assert options["heteroavg"].bytes == pytest.approx(4 * mean)
    assert options["heteroavg"].memory == large.memory
    # The workstations, a thousand times slower than the phones, take longest.
    assert options["allsmall"].seconds == pytest.approx(60 * small.macs / 10**6)
    assert options["largestonly"].seconds == pytest.approx(60 * large.macs / 10**6)
    beyond = 90 * large.macs  # three epochs more, without the smallest path
    assert options["fedfloor"].seconds == pytest.approx((60 * (large.macs + small.macs) + beyond) / 10**6)
    assert (advice.examples, advice.measured) == (10, True)


def test_without_devices_the_levels_are_the_fleet() -> None:
    found = advise(overrides=[*BASE, "data.clients=7", "split.counts=[4,0,3]"], methods=["allsmall", "fedfloor"])
    assert [(each.device.name, each.device.count, each.level) for each in found.fleet] == [
        ("level 0", 4, 0),
        ("level 2", 3, 2),
    ]
    assert found.counts == [4, 0, 3]
    assert all(option.seconds > 0 for option in found.options)


def test_devices_that_hold_one_level_share_its_name() -> None:
    placed = [(DeviceClass("phone", 2), 0), (DeviceClass("watch", 3), 0), (DeviceClass("pc", 1), 2)]
    names = 'split.names=["phone and watch", "level 1", "pc"]'
    assert levels_of_fleet(placed, 3) == ["data.clients=6", "split.counts=[5, 0, 1]", names]


def test_the_names_of_a_config_are_those_of_its_fleet() -> None:
    given = [*BASE, "data.clients=7", "split.counts=[4,0,3]", "split.names=['small','middle','large']"]
    found = advise(overrides=given, methods=["allsmall"])
    assert [each.device.name for each in found.fleet] == ["small", "large"]
    with pytest.raises(ConfigError, match=r"--set split.names=\['a','b'\]: the fleet has 6 clients"):
        advise(devices=[DeviceClass("workstation", 6)], overrides=[*BASE, "split.names=['a','b']"])


def test_a_fleet_without_small_devices() -> None:
    """Nobody's largest level is the smallest, which everybody trains under some options."""
    found = advise(devices=[DeviceClass("workstation", 6)], overrides=BASE)
    assert found.counts == [0, 0, 6]
    assert [option.devices for option in found.options] == [6] * len(OPTIONS)
    assert all(option.seconds > 0 for option in found.options)
    # All are equal: nothing to divide, and the smallest level is smaller than anybody needs.
    assert found.recommended == "fedavg"
    assert found.words == "for all devices hold the same size, level 2; a larger model would fit, too"
    assert found.warnings[0].startswith("level 0, 1: every device holds more, but allsmall")


def test_what_an_option_takes_longer(advice: Advice) -> None:
    assert (advice.recommended, advice.warnings) == ("fedfloor", [])
    seconds = {option.method: option.seconds for option in advice.options}
    assert seconds["fedfloor"] > 2 * seconds["allsmall"]


def test_data_that_cannot_be_read_are_assumed(tmp_path: Path) -> None:
    given = ["data.name=mnist", f"data.root={str(tmp_path)!r}", "model.name=tiny-resnet", "data.clients=5"]
    found = advise(overrides=given, methods=["allsmall"])
    assert (found.examples, found.measured) == (ASSUMED_EXAMPLES, False)


def test_another_number_of_clients_than_the_devices_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--set data.clients=7: the fleet has 6 clients; leave it out, or change"):
        advise(devices=[DeviceClass("workstation", 6)], overrides=[*BASE, "data.clients=7"])


def test_a_fleet_that_can_hold_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="devices: no level fits any class; watch: the smallest level needs memory"):
        advise(devices=[DeviceClass("watch", 5, memory=10)], overrides=BASE)


DEVICES = """
[[device]]
name = "phone"
count = 4
memory = "{memory} B"
[[device]]
name = "brick"
count = 1
memory = "10 B"
[[device]]
name = "workstation"
count = 2
speed = "5 GMAC/s"
"""


def test_on_the_command_line(incofl: Shell, tmp_path: Path) -> None:
    file, given = tmp_path / "devices.toml", [word for key in BASE for word in ("--set", key)]
    file.write_text(DEVICES.format(memory=costs_of("heteroavg")[0].memory))
    code, out, err = incofl("advise", "--devices", file, *given)
    assert (code, err) == (0, "")
    assert "left out: the smallest level needs memory" in out
    assert "everybody trains the smallest size" in out
    assert "6 of 7" in out
    assert "recommended: " in out
    code, out, err = incofl("advise", "--devices", file, *given, "--json")
    assert (code, err) == (0, "")
    assert [each["level"] for each in json.loads(out)["devices"]] == [0, None, 2]


@pytest.mark.slow
def test_the_options_are_tried(incofl: Shell, tmp_path: Path) -> None:
    file, given = tmp_path / "devices.toml", [word for key in BASE for word in ("--set", key)]
    file.write_text(DEVICES.format(memory=costs_of("heteroavg")[0].memory))
    command = ["--devices", file, *given, "--seeds", "0,1", "--jobs", "2", "--out", tmp_path / "advice"]
    code, out, err = incofl("advise", *command, "--try", "--rounds", 1)
    assert (code, err) == (0, "")
    assert "that each device gets" in out
    assert "all devices" in out
    assert "nothing" in next(line for line in out.splitlines() if line.startswith("phone") and "±" in line)
    assert "against the best baseline" in out
    assert (tmp_path / "advice" / "comparison.md").read_text().split("\n")[0] in out
    page = tmp_path / "page.html"
    assert incofl("report", tmp_path / "advice", "-o", page)[0] == 0
    assert "The largest level that each device can hold under every option" in page.read_text()
    assert "left out: the smallest level needs memory" in page.read_text()
    assert "everybody trains the smallest size" in page.read_text()
    (tmp_path / "advice" / "advice.json").write_text('{"x": [["a"], ["b", "c"]], "y": 1}')  # damaged: nothing is said
    assert incofl("report", tmp_path / "advice", "-o", page)[0] == 0
    assert "Devices and options" not in page.read_text()
    code, out, err = incofl("advise", *command, "--try", "--rounds", 1, "--json")
    assert " computes " in json.loads(out)["answer"]
    head, *_ = (tmp_path / "advice" / "comparison.md").read_text().splitlines()[2:]
    assert "| phone | workstation |" in head
    many = [word for key in ("rounds=99", "data.limit=30", "model.name=tiny-mlp") for word in ("--set", key)]
    code, out, err = incofl("advise", *given, *many, "--seeds", "0", "--try", "--out", tmp_path / "small")
    assert code == 0, err
    assert "30 rounds of each option and seed instead of the config's; more: --rounds 99" in out
    assert "rounds = 30" in next((tmp_path / "small").glob("*/config.toml")).read_text()
    code, out, err = incofl("compare", "--methods", "heteroavg", *command)
    assert code == 0
    assert err.startswith("left out: 1 brick, the smallest level needs memory")
