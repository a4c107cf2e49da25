"""What the fault tests share: a broker, a service, and a world for each test."""

import functools
import hashlib
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest

from bridge.sandbox.broker import Broker
from bridge.sandbox.processes import Guard, guarded
from tests.ears import logging_kept
from tests.faults.bench import Bench, Service, open_bench, open_service
from tests.faults.http_proxy import HttpProxy, open_http_proxy
from tests.forked import prepare
from tests.plain_http import NO_AUTHORITIES

# Each worker names its set-up with it, which takes as long as all else that it does to start.
_scrypt = functools.cache(hashlib.scrypt)


@pytest.fixture(scope="session", autouse=True)
def imports() -> None:
    """Have what is forked imported while the broker starts."""
    prepare()


@pytest.fixture(scope="module", autouse=True)
def setups_named_once() -> Iterator[None]:
    """Name the same set-up once, as it is named by the workers that are processes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hashlib, "scrypt", _scrypt)
        yield


@pytest.fixture(scope="session")
def broker(own_broker: Broker) -> Broker:
    """Lend the broker of this process, to be killed, frozen and starved."""
    return own_broker


@pytest.fixture(scope="module")
async def service() -> AsyncIterator[Service]:
    """Run a stand-in SMS service."""
    async with open_service() as ours:
        yield ours


@pytest.fixture
async def bench(broker: Broker, service: Service) -> AsyncIterator[Bench]:
    """Lend a test its own queues, proxy and client."""
    async with open_bench(broker, service) as ours:
        yield ours


@pytest.fixture
async def api(bench: Bench) -> AsyncIterator[HttpProxy]:
    """Put a proxy in front of the SMS service."""
    async with open_http_proxy(bench.service.url) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def guard() -> Iterator[Guard]:
    """Let no process outlive the tests."""
    with guarded() as ours:
        yield ours


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    """Lend an HTTP client with patience."""
    async with httpx.AsyncClient(trust_env=False, verify=NO_AUTHORITIES, timeout=30) as ours:
        yield ours


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """Undo what a bridge does to the process's logging."""
    with logging_kept():
        yield
