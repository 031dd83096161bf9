"""Ports of the embedded fleet: free ones are really free, chosen ones are checked before anything starts."""

import random
import socket

import pytest

from headrace.local.errors import LocalFleetError
from headrace.local.ports import FIRST_PORT, LAST_PORT, LOOPBACK, free_ports, is_free, require_free
from headrace.local.run import PortOptions, settle_ports


@pytest.fixture
def used_port() -> "socket.socket":
    listener = socket.socket()
    listener.bind((LOOPBACK, 0))
    listener.listen()
    return listener


def test_free_ports_are_different_free_and_below_the_kernels_own_range() -> None:
    ports = free_ports(8)
    assert len(set(ports)) == 8
    assert all(FIRST_PORT <= port <= LAST_PORT and is_free(port) for port in ports)


def test_a_search_that_starts_at_the_end_of_the_range_goes_on_at_its_beginning() -> None:
    class LastPort(random.Random):
        def randrange(self, *_: object, **__: object) -> int:
            return LAST_PORT - FIRST_PORT

    ports = free_ports(2, chance=LastPort())
    assert len(ports) == 2
    assert any(port < LAST_PORT for port in ports)


def test_taken_ports_are_never_handed_out() -> None:
    chance = random.Random(1)
    first = free_ports(5, chance=random.Random(1))
    assert not set(free_ports(5, first, chance=chance)) & set(first)


def test_a_used_port_is_named_with_the_option_that_changes_it(used_port: socket.socket) -> None:
    port = used_port.getsockname()[1]
    with used_port, pytest.raises(LocalFleetError, match=f"port {port} .* in use: .* --http-port") as error:
        require_free(port, what="gateway's HTTP API", option="--http-port")
    assert error.value.exit_code == 2


def test_a_used_middle_port_of_a_triton_is_found_before_anything_starts() -> None:
    http, admin, *others = free_ports(20)
    grpc = next(port for port in others if is_free(port - 1) and port - 1 not in (http, admin))
    with socket.create_server((LOOPBACK, grpc)):
        with pytest.raises(LocalFleetError, match=f"port {grpc} for the Triton server triton-a is in use"):
            settle_ports(PortOptions(http, admin, triton_a=grpc - 1))


def test_one_port_for_two_parts_is_refused() -> None:
    http, admin = free_ports(2)
    with pytest.raises(LocalFleetError, match="given to both --http-port and --llama-port"):
        settle_ports(PortOptions(http, admin, llama=http))


def test_chosen_ports_are_kept_and_the_others_are_different() -> None:
    http, admin, llama = free_ports(3)
    ports = settle_ports(PortOptions(http, admin, llama=llama))
    tritons = [
        port for triton in (ports.triton_a, ports.triton_b) for port in (triton.http, triton.grpc, triton.metrics)
    ]
    everything = [ports.http, ports.admin, ports.valkey, ports.llama, *tritons]
    assert (ports.http, ports.admin, ports.llama) == (http, admin, llama)
    assert len(set(everything)) == 10
