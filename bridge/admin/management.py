"""Client of RabbitMQ's management API, read only: policies, bindings, members, nodes."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping
from email.utils import parsedate_to_datetime
from types import MappingProxyType
from typing import Any, Final, NamedTuple
from urllib.parse import quote

import httpx
from yarl import URL

from bridge.amqp.connecting import tls_context, with_credentials
from bridge.config import RabbitMQSettings
from bridge.deadline import Deadline
from bridge.errors import BrokerError, ConfigError
from bridge.topology.declarations import Topology
from bridge.topology.differences import Difference
from bridge.topology.queue_facts import QueueFacts

ANSWER_SECONDS: Final = 5.0
_PORTS: Final = {"amqp": ("http", 15672), "amqps": ("https", 15671)}
# The member of a queue that has the settings of its policies.
_IN_FORCE: Final = "effective_policy_definition"
# A new queue gets this member with the broker's next statistics.
POLICY_SECONDS: Final = 10.0
POLICY_POLL_SECONDS: Final = 0.5
# RabbitMQ 4 returns it at once if statistics are disabled; RabbitMQ 3 only with statistics.
_WITHOUT_STATISTICS: Final[Mapping[str, str]] = {"disable_stats": "true"}
_WITH_STATISTICS: Final[Mapping[str, str]] = {}


class Members(NamedTuple):
    """The nodes that hold a copy of a quorum queue, and those of them that are online."""

    nodes: tuple[str, ...]
    online: tuple[str, ...]


class Management:
    """The management API of one broker, for one vhost.

    `clock_skew_seconds` tells how far the broker's clock was ahead at the last answer.
    """

    def __init__(self, client: httpx.AsyncClient, url: URL, vhost: str) -> None:
        self.url = url
        self.vhost = vhost
        self.clock_skew_seconds: float | None = None
        self._client = client
        # The common deadline by which all queues must report their policies.
        self._policies_until: float | None = None

    async def read(self, *path: str, query: Mapping[str, str] = MappingProxyType({})) -> Any:  # noqa: ANN401  JSON
        """Read `/api/<path>`; None if it does not exist.

        Raises BrokerError with the reason if there is no answer.
        """
        address = (
            str(self.url).rstrip("/") + "/api/" + "/".join(quote(part, safe="") for part in path)
        )
        try:
            async with Deadline(ANSWER_SECONDS):
                answer = await self._client.get(address, params=dict(query))
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError) as error:
            raise BrokerError(f"no answer ({type(error).__name__})") from None
        self.clock_skew_seconds = clock_skew_seconds(answer.headers.get("Date"))
        if answer.status_code == httpx.codes.NOT_FOUND:
            return None
        if answer.status_code != httpx.codes.OK:
            # A user with only the tag `management` may not read the nodes.
            why = "wrong user or password, or the user lacks the tag `monitoring`"
            is_refused = answer.status_code == httpx.codes.UNAUTHORIZED
            raise BrokerError(why if is_refused else f"it answered {answer.status_code}")
        try:
            return answer.json()
        except ValueError:
            raise BrokerError("the answer is not JSON; another program is there") from None

    async def queue(self, name: str) -> QueueFacts | None:
        """Read a queue's arguments and its policy in force; None if the queue does not exist."""
        found = await self._read_with_policy(name)
        if found is None:
            return None
        policy = found.get(_IN_FORCE)
        return QueueFacts(
            name=name,
            type=found.get("type", "classic"),
            durable=bool(found.get("durable")),
            auto_delete=bool(found.get("auto_delete")),
            exclusive=bool(found.get("exclusive")),
            arguments=found.get("arguments") or {},
            # RabbitMQ writes an empty object as an empty list in places.
            policy=policy if isinstance(policy, dict) else {},
            policy_name=found.get("policy") or None,
            is_policy_known=_IN_FORCE in found,
        )

    async def _read_with_policy(self, name: str) -> dict[str, Any] | None:
        """Read a queue; wait for its policies, with one deadline for all queues."""
        clock = asyncio.get_running_loop().time
        while True:
            for query in (_WITHOUT_STATISTICS, _WITH_STATISTICS):
                found: dict[str, Any] | None
                found = await self.read("queues", self.vhost, name, query=query)
                if found is None or _IN_FORCE in found:
                    return found
            if self._policies_until is None:
                self._policies_until = clock() + POLICY_SECONDS
            if clock() >= self._policies_until:
                return found
            await asyncio.sleep(POLICY_POLL_SECONDS)

    async def members(self, name: str) -> Members | None:
        """Read the nodes of a quorum queue; None if it does not exist, or is of another type."""
        found = await self.read("queues", self.vhost, name)
        if found is None or found.get("type") != "quorum":
            return None
        return Members(tuple(found.get("members") or ()), tuple(found.get("online") or ()))

    async def bound_queues(self, exchange: str) -> dict[str, QueueFacts]:
        """Read the queues that are bound to an exchange, also through other exchanges."""
        bound: dict[str, QueueFacts] = {}
        seen, left = {exchange}, [exchange]
        while left:
            for binding in await self._read_all("exchanges", left.pop(), "bindings", "source"):
                name = binding["destination"]
                if binding["destination_type"] == "queue":
                    facts = bound.get(name) or await self.queue(name)
                    bound |= {} if facts is None else {name: facts}
                elif name not in seen:
                    seen.add(name)
                    left.append(name)
        return bound

    async def alternate_exchange(self, exchange: str) -> str | None:
        """Return the name of the exchange's alternate exchange, from its arguments or a policy."""
        found = await self.read("exchanges", self.vhost, exchange) or {}
        name = (found.get("arguments") or {}).get("alternate-exchange")
        if name is None and found.get("policy"):
            policy = await self.read("policies", self.vhost, found["policy"]) or {}
            name = (policy.get("definition") or {}).get("alternate-exchange")
        return name if isinstance(name, str) else None

    async def exists(self, exchange: str) -> bool:
        return await self.read("exchanges", self.vhost, exchange) is not None

    async def missing_bindings(self, topology: Topology) -> list[Difference]:
        """Return the missing bindings, which AMQP cannot show."""
        return [
            Difference(one, "missing", "is missing", "create it: sms-bridge topology declare")
            for one in topology.bindings
            if not any(
                found["routing_key"] == one.routing_key
                for found in await self._read_all("bindings", "e", one.exchange, "q", one.queue)
            )
        ]

    async def _read_all(self, kind: str, *path: str) -> list[Any]:
        found: list[Any] | None = await self.read(kind, self.vhost, *path)
        return found or []


@contextlib.asynccontextmanager
async def open_management(settings: RabbitMQSettings, url: str | None) -> AsyncIterator[Management]:
    """Open a client with the user and password of the AMQP connection; makes no request yet.

    The default of `url` is the broker's host and RabbitMQ's usual port. Raises ConfigError if `url`
    is not a URL.
    """
    target = with_credentials(URL(settings.url[0].get_secret_value()), settings)
    try:
        scheme, port = _PORTS[target.scheme]
        usual = URL.build(scheme=scheme, host=target.host or "localhost", port=port)
        address = usual if url is None else URL(url)
    except ValueError:
        raise ConfigError("--management-url: is not a URL like http://host:15672") from None
    tls = tls_context(settings)
    user = (address.user or target.user or "guest", address.password or target.password or "guest")
    async with httpx.AsyncClient(
        auth=user, verify=tls, timeout=ANSWER_SECONDS, trust_env=False
    ) as client:
        yield Management(client, address.with_user(None), vhost_of(target))


def vhost_of(url: URL) -> str:
    """Name the vhost of an AMQP URL: `/` when there is none."""
    return url.path.removeprefix("/") or "/"


def clock_skew_seconds(date: str | None) -> float | None:
    """Return how many seconds a server's clock is ahead, from the Date header of a new answer.

    None if the header is missing or not a date.
    """
    try:
        theirs = parsedate_to_datetime(date or "").timestamp()
    except ValueError:
        return None
    # The header is truncated to whole seconds.
    return theirs + 0.5 - time.time()
