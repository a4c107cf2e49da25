"""Formats of the topology: a table, RabbitMQ definitions, Kubernetes custom resources.

All of them come from `bridge.topology`, so that entities created by hand equal the declared ones.
"""

import re
from collections.abc import Iterator
from typing import Any, Final

from bridge.topology.declarations import Topology

_POLICY: Final = "sms-bridge"


def rows(topology: Topology) -> Iterator[tuple[str, str, str]]:
    for queue in topology.queues:
        facts = (f"{key.removeprefix('x-')}={value}" for key, value in queue.arguments.items())
        yield "queue", queue.name, "durable " + " ".join(facts)
    for exchange in topology.exchanges:
        yield "exchange", exchange.name, "durable topic"
    for binding in topology.bindings:
        yield "binding", f"{binding.exchange} -> {binding.queue}", f"key {binding.routing_key}"


def definitions(topology: Topology, *, vhost: str, policy: bool) -> dict[str, Any]:
    """Return the document for `rabbitmqctl import_definitions`; the vhost must exist.

    `policy` lifts the delivery limit of RabbitMQ 4; RabbitMQ 3 refuses such a policy.
    """
    common = {"vhost": vhost, "durable": True, "auto_delete": False}
    made: dict[str, Any] = {
        "queues": [
            {"name": queue.name, **common, "arguments": dict(queue.arguments)}
            for queue in topology.queues
        ],
        "exchanges": [
            {"name": one.name, "type": "topic", **common, "internal": False, "arguments": {}}
            for one in topology.exchanges
        ],
        "bindings": [
            {
                "source": binding.exchange,
                "destination": binding.queue,
                "destination_type": "queue",
                "routing_key": binding.routing_key,
                "arguments": {},
                "vhost": vhost,
            }
            for binding in topology.bindings
        ],
    }
    if policy:
        lifted = _lift_delivery_limit(topology)
        made["policies"] = [lifted | {"apply-to": "quorum_queues", "vhost": vhost}]
    return made


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

    Deleting a resource keeps its queue. `namespace` is that of the RabbitmqCluster `cluster`, if it
    differs from that of the resources. `policy` is as in `definitions`.
    """
    reference = {"name": cluster} | ({"namespace": namespace} if namespace else {})
    common = {"vhost": vhost, "rabbitmqClusterReference": reference}
    lasting = {"durable": True, "autoDelete": False}
    for queue in topology.queues:
        arguments = dict(queue.arguments)
        # The operator adds the argument for the type itself.
        spec: dict[str, Any] = {
            "name": queue.name,
            "type": arguments.pop("x-queue-type"),
            **lasting,
        }
        spec |= {"arguments": arguments} if arguments else {}
        yield _resource("Queue", queue.name, spec | {"deletionPolicy": "retain"} | common)
    for exchange in topology.exchanges:
        spec = {"name": exchange.name, "type": "topic", **lasting}
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
    # Kubernetes names: lower case letters, digits and dashes, at most 253 characters.
    valid = re.sub("[^a-z0-9]+", "-", name.lower())[:253].strip("-")
    return {
        "apiVersion": "rabbitmq.com/v1beta1",
        "kind": kind,
        "metadata": {"name": valid},
        "spec": spec,
    }
