"""Whether the queues and exchanges are there, with the arguments that they need."""

from bridge.config import TopologyMode
from bridge.operators.checks.set_up import ConnectedBroker
from bridge.operators.finding import Finding
from bridge.topology.comparison import compare
from bridge.topology.declarations import name_of
from bridge.topology.differences import Difference, is_unusable


async def check_topology(broker: ConnectedBroker) -> list[Finding]:
    """Compare the queues and exchanges with what the roles need."""
    topology = broker.set_up.topology
    mode = broker.set_up.settings.rabbitmq.topology
    findings = [
        _judge(difference, mode) async for difference in compare(broker.connection, topology)
    ]
    if not any(finding.result == "fail" for finding in findings):
        count = len(topology.declarable) - len({finding.subject for finding in findings})
        if count:
            findings.insert(0, Finding("topology", "ok", f"{count} queues and exchanges are right"))
    return findings


def _judge(difference: Difference, mode: TopologyMode) -> Finding:
    subject, text, fix = name_of(difference.entity), difference.text, difference.fix
    match difference.kind, mode:
        case "not_compared", _:
            return Finding(subject, "ok", "exists; its arguments were not compared: no permission")
        case "missing", "declare":
            return Finding(
                subject,
                "warn",
                "is missing; its role declares it when it starts",
                "start the role, or run `sms-bridge topology declare`",
            )
        case "missing", _:
            fix = "run `sms-bridge topology declare`, or set rabbitmq.topology to declare"
            return Finding(subject, "fail", "is missing", fix)
        case _, "off":
            return Finding(subject, "warn", text, fix)
        case _:
            return Finding(subject, "fail" if is_unusable(difference, mode) else "warn", text, fix)
