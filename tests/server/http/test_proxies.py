"""Identities of clients behind proxies, over real sockets."""

import socket

import httpx
import pytest

HERE = ("127.0.0.1",)
BODY = {"model": "m", "prompt": "Hi", "max_tokens": 2}


async def clients_of(serving, engine, forwarded, proxies, host="127.0.0.1"):
    """Return the name under which the engine knows the sender of each request with these X-Forwarded-For headers."""

    async def during(port):
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
            for each in forwarded:
                headers = [("X-Forwarded-For", text) for text in ([each] if isinstance(each, str) else each)]
                assert (await http.post("/v1/completions", json=BODY, headers=headers)).status_code == 200
            page = (await http.get("/metrics")).text
            names = [line for line in page.splitlines() if line.startswith("transect_client_requests_total")]
            assert names == [
                f'transect_client_requests_total{{client="(no key)",model_name="m"}} {float(len(forwarded))}'
            ]

    assert await serving(during, host=host, trusted_proxies=proxies) == 0
    return [client for client, _ in engine.clients]


@pytest.mark.parametrize(
    ("forwarded", "name"),
    [
        ("203.0.113.7", "203.0.113.7"),
        ("203.0.113.7:4711", "203.0.113.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("::ffff:203.0.113.7", "203.0.113.7"),
        # The client wrote the first address itself: the last one that is no trusted proxy counts.
        ("198.51.100.1, 203.0.113.7", "203.0.113.7"),
        ("203.0.113.7, 10.1.2.3, 10.9.9.9", "203.0.113.7"),
        (("198.51.100.1", "203.0.113.7, 10.1.2.3"), "203.0.113.7"),
        ("10.1.2.3", "10.1.2.3"),
        ("not an address", "local"),
        ((), "127.0.0.1"),
    ],
)
async def test_a_trusted_proxy_names_the_client(serving, engine, forwarded, name):
    assert await clients_of(serving, engine, [forwarded], (*HERE, "10.0.0.0/8")) == [name]


async def test_others_are_who_they_are(serving, engine):
    headers = ["203.0.113.7", "127.0.0.1", ""]
    assert await clients_of(serving, engine, headers, ("10.0.0.0/8",)) == ["127.0.0.1"] * 3


async def test_no_proxies_are_trusted_unless_named(serving, engine):
    assert await clients_of(serving, engine, ["203.0.113.7"], ()) == ["127.0.0.1"]


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no such sockets")
@pytest.mark.parametrize("proxies", [("127.0.0.1",), ("127.0.0.0/8",), ("127.0.0.9/8",)])
async def test_a_proxy_on_a_socket_for_both_kinds_of_addresses(serving, engine, proxies):
    assert await clients_of(serving, engine, ["203.0.113.7"], proxies, host="::") == ["203.0.113.7"]


async def test_clients_of_a_proxy_are_apart_in_the_engine_and_together_in_metrics(serving, engine):
    many = [f"203.0.113.{number}" for number in range(40)]
    assert await clients_of(serving, engine, many, HERE) == many
