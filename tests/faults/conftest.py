"""Shared by the fault tests: a broker, an SMS service, and queues and proxies for each test."""

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

# Each worker identifies its settings with this, which takes half of its start.
_scrypt = functools.cache(hashlib.scrypt)


@pytest.fixture(scope="session", autouse=True)
def imports() -> None:
    """Import modules for forked processes while the broker starts."""
    prepare()


@pytest.fixture(scope="module", autouse=True)
def setups_named_once() -> Iterator[None]:
    """Compute the identity of the same settings only once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hashlib, "scrypt", _scrypt)
        yield


@pytest.fixture(scope="session")
def broker(own_broker: Broker) -> Broker:
    """Provide the broker of this process, which a test may kill or freeze."""
    return own_broker


@pytest.fixture(scope="module")
async def service() -> AsyncIterator[Service]:
    """Run a sandbox as SMS service."""
    async with open_service() as ours:
        yield ours


@pytest.fixture
async def bench(broker: Broker, service: Service) -> AsyncIterator[Bench]:
    """Provide a test's own queues, proxy and client."""
    async with open_bench(broker, service) as ours:
        yield ours


@pytest.fixture
async def api(bench: Bench) -> AsyncIterator[HttpProxy]:
    """Run a proxy in front of the SMS service."""
    async with open_http_proxy(bench.service.url) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def guard() -> Iterator[Guard]:
    """End all child processes after the tests."""
    with guarded() as ours:
        yield ours


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    """Provide an HTTP client with long timeouts."""
    async with httpx.AsyncClient(trust_env=False, verify=NO_AUTHORITIES, timeout=30) as ours:
        yield ours


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """Restore the process's logging."""
    with logging_kept():
        yield
