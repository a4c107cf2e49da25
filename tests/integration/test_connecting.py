"""What is said when there is no connection to the broker: each cause has its own sentence."""

import asyncio
from contextlib import closing

import pytest
from pydantic import SecretStr
from yarl import URL

from bridge.amqp.connecting import open_connection, open_first_connection
from bridge.config import RabbitMQSettings
from bridge.errors import ConnectError
from bridge.sandbox.broker import Broker
from tests.accounts import account, virtual_host


async def _refusal(url: str, **settings: object) -> ConnectError:
    given = RabbitMQSettings.model_validate({"url": url, "connect_timeout_seconds": 1} | settings)
    with pytest.raises(ConnectError) as caught:
        await open_connection(given, SecretStr(url), name="test", ask_http=True)
    return caught.value


async def test_a_name_that_is_not_found() -> None:
    """A host without an address is told as that, with where to look."""
    error = await _refusal("amqp://no-such-host.invalid/")

    assert error.fault == "refused"
    assert str(error) == (
        "no connection to no-such-host.invalid:5672 (its name cannot be resolved); "
        "check the host in rabbitmq.url and the resolver"
    )


async def test_the_port_of_the_management_page(managed_broker: Broker) -> None:
    port = URL(managed_broker.management_url or "").port
    error = await _refusal(f"amqp://guest:guest@127.0.0.1:{port}/")

    assert str(error) == (
        f"no connection to 127.0.0.1:{port} (the port speaks HTTP, not AMQP); "
        "correct the port in rabbitmq.url: it is usually 5672, with TLS 5671"
    )


@pytest.mark.parametrize(
    ("scheme", "answer", "said"),
    [
        ("amqp", b"HTTP/1.1 400 Bad Request\r\n\r\n", "the port speaks HTTP, not AMQP"),
        ("amqp", b"\x15\x03\x03\x00\x02\x02\x46", "the port uses TLS); write amqps://"),
        ("amqp", b"SSH-2.0-OpenSSH_9.7\r\n", "the server there is not RabbitMQ"),
        ("amqps", b"AMQP\x00\x00\x09\x01", "the port does not use TLS); write amqp://"),
    ],
    ids=["http", "tls", "ssh", "no_tls"],
)
async def test_a_port_of_something_else(scheme: str, answer: bytes, said: str) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer):
            await reader.read(1)
            writer.write(answer)
            await writer.drain()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        error = await _refusal(f"{scheme}://guest:guest@127.0.0.1:{port}/")

    assert str(error).startswith(f"no connection to 127.0.0.1:{port} ({said}")


async def test_each_of_several_brokers_is_told() -> None:
    """When none answers, each has its own fault, in the order of the setting, without its login."""
    hosts = ["no-such-host.invalid", "127.0.0.1:1", "no-such-host.invalid"]
    urls = [f"amqp://someone:a-password@{host}/" for host in hosts]
    settings = RabbitMQSettings.model_validate({"url": urls, "connect_timeout_seconds": 5})
    with pytest.raises(ConnectError) as caught:
        await open_first_connection(settings, name="test")

    assert str(caught.value) == (
        "no connection to no-such-host.invalid:5672 (its name cannot be resolved); "
        "check the host in rabbitmq.url and the resolver; "
        "no connection to 127.0.0.1:1 (refused); "
        "check that RabbitMQ runs and that rabbitmq.url names its host and port"
    )


@pytest.mark.parametrize("vhost", ["nowhere", "foreign"])
async def test_a_virtual_host_is_told_as_that(managed_broker: Broker, vhost: str) -> None:
    """One that is not there, or is not the user's, is told in the broker's words, to commands too.

    They ask a silent port whether it speaks HTTP; a broker that has said why it refuses is none.
    """
    with account(managed_broker) as url, virtual_host(managed_broker, "foreign"):
        there = str(URL(url).with_path(f"/{vhost}"))
        error = await _refusal(there, connect_timeout_seconds=10)

    assert error.fault == "auth_failed"
    assert "NOT_ALLOWED" in str(error)
    assert vhost in str(error)
    assert str(error).endswith(
        "; check rabbitmq.username, rabbitmq.password and the vhost in rabbitmq.url"
    )


async def test_a_broker_that_is_slow(amqp_url: str) -> None:
    broker = URL(amqp_url)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer):
            said = await reader.read(8)
            if said.startswith(b"AMQP"):
                await reader.read()
                return
            # What a real one says to what is no AMQP.
            theirs, ours = await asyncio.open_connection(broker.host, broker.port)
            with closing(ours):
                ours.write(said)
                writer.write(await theirs.read(8))
                await writer.drain()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        error = await _refusal(f"amqp://guest:guest@127.0.0.1:{port}/")

    assert (error.fault, "(timeout)" in str(error)) == ("timeout", True)
