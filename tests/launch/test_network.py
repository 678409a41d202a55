"""The way to other machines."""

from __future__ import annotations

from pathlib import Path

import pytest

from fuel_parallel.errors import LaunchError
from fuelrun.launch import network
from fuelrun.launch.network import Choice, Interface, choose, rank_variables

HERE = (
    Interface("lo", "127.0.0.1", 8),
    Interface("docker0", "172.17.0.1", 16),
    Interface("eth0", "192.168.3.7", 24),
    Interface("ib0", "10.1.0.7", 16),
)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A machine with those interfaces; the dictionary says from which address another one is reached."""
    ways: dict[str, str] = {}
    monkeypatch.setattr(network, "interfaces", lambda: HERE)
    monkeypatch.setattr(network, "resolve", lambda name: name)
    monkeypatch.setattr(network, "_source_towards", lambda address, name: ways[address])
    return ways


def test_the_way_to_the_first_other_machine_is_taken(machine: dict[str, str]) -> None:
    machine |= {"10.1.0.8": "10.1.0.7", "other": "192.168.3.7"}
    choice = choose(("10.1.0.8", "other"))
    assert choice == Choice(HERE[3], "by it 10.1.0.8 is reached")
    assert choice.interface.network == "10.1.0.0/16"


@pytest.mark.parametrize("address", ["172.17.0.1", "127.0.0.1"])
def test_bridges_and_loopback_are_never_taken(machine: dict[str, str], address: str) -> None:
    machine["n2"] = address
    with pytest.raises(LaunchError, match="which leads to nothing outside of this machine"):
        choose(("n2",))


@pytest.mark.parametrize(
    ("name", "inside"),
    [
        *((name, True) for name in ("lo", "docker0", "virbr0", "virbr0-nic", "br-1a2b3c4d5e6f", "veth1", "cni0")),
        *((name, False) for name in ("eth0", "br0", "ens3", "bond0", "ib0", "hsn0")),
    ],
)
def test_which_interfaces_lead_nowhere(name: str, inside: bool) -> None:
    assert bool(network.INSIDE.fullmatch(name)) is inside


@pytest.mark.parametrize(
    ("wanted", "name"), [("ib0", "ib0"), ("10.1.0.0/16", "ib0"), ("192.168.3.7", "eth0"), ("docker0", "docker0")]
)
def test_a_user_may_name_interface_or_network(machine: dict[str, str], wanted: str, name: str) -> None:
    assert choose(("n2",), wanted).interface.name == name


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ("eth9", "there is no such interface; this machine has lo (127.0.0.1/8), docker0"),
        ("10.9.0.0/16", "no interface of this machine is in that network"),
    ],
)
def test_a_wrong_interface_is_refused_with_those_that_exist(machine: dict[str, str], wanted: str, said: str) -> None:
    with pytest.raises(LaunchError) as error:
        choose(("n2",), wanted)
    assert said in str(error.value)


def test_a_rank_tells_its_libraries_by_the_name_on_its_machine(machine: dict[str, str], tmp_path: Path) -> None:
    environ = {"FUEL_NETWORK": "10.1.0.0/16", "GLOO_SOCKET_IFNAME": "mine"}
    found = rank_variables(environ, tmp_path / "none")
    assert found == {"FI_TCP_IFACE": "ib0", "NCCL_SOCKET_IFNAME": "=ib0", "UCX_NET_DEVICES": "ib0"}
    (tmp_path / "mlx5_0").mkdir()
    assert "UCX_NET_DEVICES" not in rank_variables(environ, tmp_path)  # it would shut the fast cards out
    assert rank_variables({}, tmp_path) == {}


def test_this_machine_has_a_loopback() -> None:
    assert Interface("lo", "127.0.0.1", 8) in network.interfaces()
