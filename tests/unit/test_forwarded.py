"""The client's address is the right-most one that no trusted proxy has, however the header is written."""

import ipaddress

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.http.client_addresses import ClientAddresses, peer_address
from gateway.http.forwarded import MOST_HOPS, client_of, normal_address
from gateway.metrics import Metrics
from router.errors import ApiError
from router.spec.gateway import ClientsSpec

PROXY = "10.0.0.1"
XFF, FORWARDED = "x-forwarded-for", "forwarded"


def trusts(address: str) -> bool:
    return ipaddress.ip_address(address) in ipaddress.ip_network("10.0.0.0/8")


@pytest.mark.parametrize(
    ("header", "value", "client"),
    [
        (XFF, "203.0.113.7", "203.0.113.7"),
        (XFF, "198.51.100.1, 203.0.113.7", "203.0.113.7"),
        (XFF, "198.51.100.1,203.0.113.7 ,\t10.9.9.9", "203.0.113.7"),
        (XFF, "10.1.1.1, 10.2.2.2", "10.1.1.1"),
        (XFF, "203.0.113.7:51000", "203.0.113.7"),
        (XFF, "2001:DB8:0::7", "2001:db8::7"),
        (XFF, "[2001:db8::7]:51000", "2001:db8::7"),
        (XFF, "::ffff:203.0.113.7", "203.0.113.7"),
        (XFF, "", PROXY),
        (XFF, "unknown", PROXY),
        (XFF, "fe80::1%eth0", PROXY),
        (XFF, "203.0.113.7, nonsense, 10.2.2.2", "10.2.2.2"),
        (XFF, "203.0.113.7,", PROXY),
        (FORWARDED, "for=203.0.113.7", "203.0.113.7"),
        (FORWARDED, 'by=10.0.0.1;For="[2001:db8::7]:51000";proto=https', "2001:db8::7"),
        (FORWARDED, "for=198.51.100.1, for=203.0.113.7;by=x, for=10.3.3.3", "203.0.113.7"),
        (FORWARDED, 'for="198.51.100.1, for=203.0.113.7', "203.0.113.7"),
        (FORWARDED, 'for=198.51.100.1;host="a,b", for=203.0.113.7', "203.0.113.7"),
        (FORWARDED, 'for=203.0.113.7;host="a,for=198.51.100.1"', "203.0.113.7"),
        (FORWARDED, 'host="a;for=198.51.100.1;b";for=203.0.113.7', "203.0.113.7"),
        (FORWARDED, r'host="a\",for=198.51.100.1";for=203.0.113.7', "203.0.113.7"),
        (FORWARDED, "for=_hidden", PROXY),
        (FORWARDED, "by=203.0.113.7", PROXY),
        (FORWARDED, "notfor=203.0.113.7", PROXY),
    ],
)
def test_the_client_is_the_right_most_that_is_no_trusted_proxy(header: str, value: str, client: str) -> None:
    assert client_of(PROXY, header, value, trusts) == client


@given(st.text(st.characters(min_codepoint=32, max_codepoint=255), max_size=60), st.sampled_from([XFF, FORWARDED]))
@example('for="', FORWARDED)
@example('",', FORWARDED)
def test_what_a_client_writes_never_hides_what_the_proxy_adds(forged: str, header: str) -> None:
    added = "203.0.113.7" if header == XFF else "for=203.0.113.7"
    assert client_of(PROXY, header, f"{forged}, {added}", trusts) == "203.0.113.7"


def test_a_long_way_through_proxies_is_not_walked_to_its_end() -> None:
    asked = []

    def counts(address: str) -> bool:
        asked.append(address)
        return True

    client_of(PROXY, XFF, "10.0.0.1," * 1800, counts)
    client_of(PROXY, XFF, "203.0.113.7" + ",10.0.0.1" * 1800, counts)
    assert len(asked) <= 2 * MOST_HOPS


@given(st.ip_addresses())
def test_an_address_is_one_however_it_is_written(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> None:
    normal = normal_address(str(address))
    assert normal is not None
    assert normal_address(normal) == normal
    if isinstance(address, ipaddress.IPv6Address):
        assert normal == normal_address(address.exploded.upper()) == normal_address(f"[{address}]:80")


def addresses(**fields: object) -> ClientAddresses:
    return ClientAddresses(ClientsSpec(**fields), Metrics())  # type: ignore[arg-type]


def test_only_trusted_proxies_are_believed_and_only_in_the_header_that_they_write() -> None:
    headers = {XFF: "203.0.113.7", FORWARDED: "for=198.51.100.1"}
    behind = addresses(trusted_proxies=["10.0.0.0/8", "fd00::/8"])
    assert behind.client(PROXY, headers) == behind.client("fd00::1", headers) == "203.0.113.7"
    assert behind.client("203.0.113.9", headers) == "203.0.113.9"
    assert behind.client(PROXY, {FORWARDED: "for=198.51.100.1"}) == PROXY
    other = addresses(trusted_proxies=["10.0.0.0/8"], address_header=FORWARDED)
    assert other.client(PROXY, headers) == "198.51.100.1"
    assert addresses().client(PROXY, headers) == PROXY


def test_an_address_has_as_much_at_a_time_as_it_may_and_gives_it_back() -> None:
    capped = addresses(connections_per_address=2, requests_per_address=1, trusted_proxies=[PROXY])
    first, second = capped.connected("203.0.113.7"), capped.connected("203.0.113.7")
    assert first is not None
    assert second is not None
    assert capped.connected("203.0.113.7") is None
    assert capped.connected("203.0.113.8") is not None
    first.leave()
    first.leave()
    assert capped.connected("203.0.113.7") is not None
    assert capped.connected("203.0.113.7") is None
    place = capped.asked("203.0.113.7")
    with pytest.raises(ApiError) as caught:
        capped.asked("203.0.113.7")
    assert (caught.value.status, caught.value.retry_after) == (429, 1)
    place.leave()
    capped.asked("203.0.113.7").leave()
    assert not capped._requests._held
    assert all(capped.connected(PROXY) is not None for _ in range(10))
    refused = capped._refusals.values
    assert (refused["connections",], refused["requests",]) == (2, 1)


def test_the_other_end_of_a_socket_is_known_by_its_address_alone() -> None:
    assert peer_address(("::ffff:203.0.113.7", 1, 0, 0)) == "203.0.113.7"
    assert peer_address(("fe80::1%eth0", 1, 0, 2)) == "fe80::1"
    assert peer_address(None) == ""
    assert not addresses(trusted_proxies=[PROXY]).trusts("")


def test_ipv6_addresses_of_one_network_count_as_one() -> None:
    capped = addresses(connections_per_address=1)
    assert capped.connected("2001:db8:0:1::1") is not None
    assert capped.connected("2001:db8:0:1:ffff::2") is None
    assert capped.connected("2001:db8:0:2::1") is not None


@given(st.lists(st.tuples(st.ip_addresses(v=4).map(str), st.booleans()), max_size=200))
def test_the_tables_hold_nothing_of_who_has_nothing(visits: list[tuple[str, bool]]) -> None:
    capped = addresses(connections_per_address=3)
    places = [(capped.connected(address), leaves) for address, leaves in visits]
    for place, leaves in places:
        if place is not None and leaves:
            place.leave()
    kept = sum(place is not None and not leaves for place, leaves in places)
    assert sum(capped._connections._held.values()) == kept
    for place, _ in places:
        if place is not None:
            place.leave()
    assert not capped._connections._held


def test_each_proxy_of_a_call_may_add_an_entry_of_its_own_to_its_metadata() -> None:
    spec = ClientsSpec(trusted_proxies=["127.0.0.1", "10.0.0.0/8"], address_header="forwarded")
    client = ClientAddresses(spec, Metrics()).rpc_client
    entries = [("forwarded", "for=6.6.6.6"), ("forwarded", "for=203.0.113.8"), ("forwarded", "for=10.0.0.1")]
    assert client("ipv4:127.0.0.1:5", entries) == "203.0.113.8"
    assert client("ipv4:127.0.0.1:5", []) == "127.0.0.1"
    assert client("ipv4:192.0.2.1:5", entries) == "192.0.2.1", "no proxy of ours"
