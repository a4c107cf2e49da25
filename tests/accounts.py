"""Users and virtual hosts of a broker, for as long as a test needs them.

They are made by the management API: `rabbitmqctl` starts an Erlang of its own for each order.
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
    """Make a virtual host and give its URL, with which everything is allowed there."""
    order(broker, "PUT", f"vhosts/{quote(name, safe='')}")
    url = str(URL(broker.url).with_path(f"/{name}"))
    try:
        permit(broker, url, ".*", ".*", ".*")
        yield url
    finally:
        order(broker, "DELETE", f"vhosts/{quote(name, safe='')}")


@contextmanager
def account(broker: Broker, *permissions: str, vhost: str = "/") -> Iterator[str]:
    """Make a user and give the URL with which it logs in.

    `permissions` are the patterns of what it may configure, write and read; without them it may not
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
    """Let the user of a URL do what these patterns match in its virtual host, and no more."""
    vhost = quote(URL(url).path.removeprefix("/") or "/", safe="")
    place = f"permissions/{vhost}/{URL(url).user}"
    order(broker, "PUT", place, configure=configure, write=write, read=read)


def order(broker: Broker, method: str, place: str, **body: str) -> None:
    """Change something of the broker by its management API."""
    url = f"{broker.management_url}/api/{place}"
    with httpx.Client(
        auth=("guest", "guest"), trust_env=False, verify=NO_AUTHORITIES, timeout=30
    ) as client:
        client.request(method, url, json=body).raise_for_status()
