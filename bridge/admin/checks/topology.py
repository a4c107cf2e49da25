"""Whether the queues and exchanges are there, with the arguments that they need."""

from typing import Final

from bridge.admin.checks.set_up import ConnectedBroker
from bridge.admin.finding import Finding
from bridge.config import TopologyMode
from bridge.topology.comparison import compare
from bridge.topology.declarations import name_of
from bridge.topology.differences import Difference, is_unusable

_DECLARED_AT_START: Final = "a role declares what it needs when it starts"
_DECLARE: Final = "start the roles, or run `sms-bridge topology declare`"


async def check_topology(broker: ConnectedBroker) -> list[Finding]:
    """Compare the queues and exchanges with what the roles need."""
    topology = broker.set_up.topology
    mode = broker.set_up.settings.rabbitmq.topology
    differences = [one async for one in compare(broker.connection, topology)]
    missing = {name_of(one.entity) for one in differences if one.kind == "missing"}
    if mode == "declare" and len(missing) == len(topology.declarable):
        # As before the first start: one line, not one for each.
        text = f"none of the {len(missing)} queues and exchanges is there"
        return [Finding("topology", "warn", f"{text}; {_DECLARED_AT_START}", _DECLARE)]
    findings = [_judge(one, mode) for one in differences]
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
        case "hidden", _:
            return Finding(subject, "warn", text, fix)
        case "missing", "declare":
            return Finding(
                subject,
                "warn",
                f"is missing; {_DECLARED_AT_START}",
                _DECLARE,
            )
        case "missing", _:
            fix = "run `sms-bridge topology declare`, or set rabbitmq.topology to declare"
            return Finding(subject, "fail", "is missing", fix)
        case _, "off":
            return Finding(subject, "warn", text, fix)
        case _:
            return Finding(subject, "fail" if is_unusable(difference, mode) else "warn", text, fix)
