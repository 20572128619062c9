"""Who a call is held to come from."""

import pytest

from pagoda_frontend.budget.caller import host_of_peer, network_of


@pytest.mark.parametrize(
    ("host", "network"),
    [
        ("10.0.0.7", "10.0.0.7"),
        ("::ffff:10.0.0.7", "10.0.0.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::9", "2001:db8:1:2::/64"),
        ("2001:db8:1:3::9", "2001:db8:1:3::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::1", "::/64"),
        ("testclient", "testclient"),
        ("", ""),
    ],
)
def test_an_address_stands_for_its_network(host: str, network: str) -> None:
    assert network_of(host) == network


@pytest.mark.parametrize(
    ("peer", "host"),
    [
        ("ipv4:10.0.0.7:50000", "10.0.0.7"),
        ("ipv6:%5B2001:db8::1%5D:50000", "2001:db8::1"),
        ("ipv6:[::1]:50000", "::1"),
        ("unix:", ""),
        ("", ""),
    ],
)
def test_the_host_of_a_grpc_peer_is_named_as_over_http(peer: str, host: str) -> None:
    assert host_of_peer(peer) == host
