"""Formats of the topology: a table, JSON, RabbitMQ definitions, Kubernetes custom resources.

All come from `bridge.topology`, so that entities made by hand equal those that the bridge declares.
"""

import re
from collections.abc import Iterator
from typing import Any, Final

from bridge.topology.declarations import Binding, Exchange, Queue, Topology

_OPERATOR: Final = "rabbitmq.com/v1beta1"
_POLICY: Final = "sms-bridge"


def rows(topology: Topology) -> Iterator[tuple[str, str, str]]:
    """Yield kind, name and facts of each entity, for a table."""
    for queue in topology.queues:
        facts = (f"{key.removeprefix('x-')}={value}" for key, value in queue.arguments.items())
        yield "queue", queue.name, "durable " + " ".join(facts)
    for exchange in topology.exchanges:
        yield "exchange", exchange.name, "durable topic"
    for binding in topology.bindings:
        yield "binding", f"{binding.exchange} -> {binding.queue}", f"key {binding.routing_key}"


def definitions(topology: Topology, *, vhost: str, policy: bool) -> dict[str, Any]:
    """Make the document that `rabbitmqctl import_definitions` takes; the vhost must exist.

    With `policy`, RabbitMQ 4's delivery limit is lifted; RabbitMQ 3 refuses that.
    """
    made: dict[str, Any] = {
        "queues": [_queue(queue) | {"vhost": vhost} for queue in topology.queues],
        "exchanges": [_exchange(exchange) | {"vhost": vhost} for exchange in topology.exchanges],
        "bindings": [_binding(binding) | {"vhost": vhost} for binding in topology.bindings],
    }
    if policy:
        lifted = _lift_delivery_limit(topology)
        made["policies"] = [lifted | {"apply-to": "quorum_queues", "vhost": vhost}]
    return made


def plain(topology: Topology) -> dict[str, Any]:
    """Make plain data: the definitions without a vhost."""
    return {
        "queues": [_queue(queue) for queue in topology.queues],
        "exchanges": [_exchange(exchange) for exchange in topology.exchanges],
        "bindings": [_binding(binding) for binding in topology.bindings],
    }


def _queue(queue: Queue) -> dict[str, Any]:
    return {
        "name": queue.name,
        "durable": True,
        "auto_delete": False,
        "arguments": dict(queue.arguments),
    }


def _exchange(exchange: Exchange) -> dict[str, Any]:
    return {
        "name": exchange.name,
        "type": "topic",
        "durable": True,
        "auto_delete": False,
        "internal": False,
        "arguments": {},
    }


def _binding(binding: Binding) -> dict[str, Any]:
    return {
        "source": binding.exchange,
        "destination": binding.queue,
        "destination_type": "queue",
        "routing_key": binding.routing_key,
        "arguments": {},
    }


def _lift_delivery_limit(topology: Topology) -> dict[str, Any]:
    names = "|".join(re.escape(queue.name) for queue in topology.queues)
    return {
        "name": _POLICY,
        "pattern": f"^({names})$",
        "definition": {"delivery-limit": -1},
        "priority": 0,
    }


def custom_resources(
    topology: Topology, *, vhost: str, cluster: str, namespace: str | None, policy: bool
) -> Iterator[dict[str, Any]]:
    """Yield the resources of RabbitMQ's messaging topology operator, one for each entity.

    A queue is kept when its resource is deleted. `cluster` is the RabbitmqCluster; its `namespace`
    is needed only if it is not that of the resources. `policy` as in `definitions`.
    """
    reference = {"name": cluster} | ({"namespace": namespace} if namespace else {})
    common = {"vhost": vhost, "rabbitmqClusterReference": reference}
    for queue in topology.queues:
        spec = _queue(queue)
        del spec["auto_delete"]
        arguments = spec.pop("arguments")
        # The operator sets the argument for the type itself.
        spec |= {"type": arguments.pop("x-queue-type"), "autoDelete": False}
        spec |= {"arguments": arguments} if arguments else {}
        yield _resource("Queue", queue.name, spec | {"deletionPolicy": "retain"} | common)
    for exchange in topology.exchanges:
        spec = {"name": exchange.name, "type": "topic", "durable": True, "autoDelete": False}
        yield _resource("Exchange", f"{exchange.name}-exchange", spec | common)
    for binding in topology.bindings:
        spec = {
            "source": binding.exchange,
            "destination": binding.queue,
            "destinationType": "queue",
            "routingKey": binding.routing_key,
        }
        yield _resource("Binding", f"{binding.exchange}-to-{binding.queue}", spec | common)
    if policy:
        spec = _lift_delivery_limit(topology) | {"applyTo": "quorum_queues"}
        yield _resource("Policy", _POLICY, spec | common)


def _resource(kind: str, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": _OPERATOR,
        "kind": kind,
        "metadata": {"name": _resource_name(name)},
        "spec": spec,
    }


def _resource_name(name: str) -> str:
    """Make a valid Kubernetes name: lower case, digits, dashes, at most 253 characters."""
    return re.sub("[^a-z0-9]+", "-", name.lower())[:253].strip("-")
