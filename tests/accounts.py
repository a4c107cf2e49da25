"""Temporary users and virtual hosts of a broker.

They are created over the management API, because `rabbitmqctl` starts an Erlang VM each time.
"""

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import quote

import httpx
from yarl import URL

from bridge.sandbox.broker import Broker
from tests.plain_http import NO_AUTHORITIES


@contextmanager
def virtual_host(broker: Broker, name: str) -> Iterator[str]:
    """Create a virtual host, and yield a URL with all permissions for it."""
    order(broker, "PUT", f"vhosts/{quote(name, safe='')}")
    url = str(URL(broker.url).with_path(f"/{name}"))
    try:
        permit(broker, url, ".*", ".*", ".*")
        yield url
    finally:
        order(broker, "DELETE", f"vhosts/{quote(name, safe='')}")


@contextmanager
def account(broker: Broker, *permissions: str, vhost: str = "/") -> Iterator[str]:
    """Create a user, and yield its URL.

    `permissions` are the patterns for configure, write and read. Without them, the user may not
    even use the virtual host.
    """
    user = uuid.uuid4().hex
    order(broker, "PUT", f"users/{user}", password="secret", tags="")
    try:
        login = URL(broker.url).with_user(user).with_password("secret")
        url = str(login if vhost == "/" else login.with_path(f"/{vhost}"))
        if permissions:
            permit(broker, url, *permissions)
        yield url
    finally:
        order(broker, "DELETE", f"users/{user}")


def permit(broker: Broker, url: str, configure: str, write: str, read: str) -> None:
    """Replace the permissions of a URL's user."""
    vhost = quote(URL(url).path.removeprefix("/") or "/", safe="")
    place = f"permissions/{vhost}/{URL(url).user}"
    order(broker, "PUT", place, configure=configure, write=write, read=read)


def order(broker: Broker, method: str, place: str, **body: str) -> None:
    """Send a change to the management API."""
    url = f"{broker.management_url}/api/{place}"
    with httpx.Client(
        auth=("guest", "guest"), trust_env=False, verify=NO_AUTHORITIES, timeout=30
    ) as client:
        client.request(method, url, json=body).raise_for_status()
