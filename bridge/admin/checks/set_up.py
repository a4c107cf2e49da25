"""What a check is given: the set-up alone, with an open connection, or with the management API."""

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Final

from pydantic import SecretStr

from bridge.admin.management import Management
from bridge.amqp.client import Connection
from bridge.config import Role, Settings
from bridge.topology.declarations import Topology, bridge_topology

# The deadline of each wait of a check, unless it has a shorter one.
WAIT_SECONDS: Final = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SetUp:
    """The settings, and the roles that are to start with them.

    `management_url` is set when the management API is not on the broker's host and usual port.
    """

    settings: Settings
    roles: Collection[Role]
    management_url: str | None = None

    @property
    def topology(self) -> Topology:
        """What these roles need on the broker."""
        return bridge_topology(self.settings, self.roles)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectedBroker:
    """A broker of the set-up, and an open connection to it."""

    set_up: SetUp
    url: SecretStr
    connection: Connection

    @property
    def version(self) -> tuple[int, ...]:
        """RabbitMQ's version, as far as it is numbers: (4, 0, 5)."""
        transport = self.connection.transport
        told: Any = {} if transport is None else transport.connection.server_properties
        numbers = re.match("[0-9.]*", str(told.get("version", "")))
        return tuple(int(part) for part in numbers[0].split(".") if part) if numbers else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagedBroker:
    """A broker of the set-up, as its management API shows it."""

    set_up: SetUp
    management: Management
    version: tuple[int, ...]
