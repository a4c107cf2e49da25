"""Publish the outcome of a request to its `reply_to` queue and to the outcome exchange."""

from bridge.amqp.properties import Properties
from bridge.amqp.publisher import Publisher
from bridge.errors import ExchangeRefusedError, PublishError
from bridge.outcome_event import OutcomeEvent, outcome_properties
from bridge.telemetry.logs import Log
from bridge.telemetry.trace_context import TraceHeaders
from bridge.worker.envelope import Envelope
from bridge.worker.outcomes import Dead, Outcome, Retried, Sent, attempts_after, name_of
from bridge.worker.sent_messages import Accepted

log = Log(__name__)


class Announcer:
    """Publishes each outcome event once; an event that cannot be published is lost and logged."""

    def __init__(self, publisher: Publisher, *, outcome_exchange: str | None) -> None:
        self._publisher = publisher
        self._outcome_exchange = outcome_exchange

    async def announce(
        self,
        properties: Properties,
        envelope: Envelope,
        outcome: Outcome,
        at: float,
        *,
        trace: TraceHeaders,
    ) -> None:
        """Publish a message's outcome to its `reply_to` queue and to the outcome exchange.

        `at` is the time of the outcome in unix seconds; `trace` is published with it. Nothing is
        published for a retry, which is not final.
        """
        has_asked = properties.reply_to or self._outcome_exchange is not None
        if not has_asked or isinstance(outcome, Retried):
            return
        targets = [("", properties.reply_to)]
        if self._outcome_exchange is not None:
            targets.append((self._outcome_exchange, name_of(outcome)))
        for exchange, routing_key in targets:
            if routing_key:
                event = _event(envelope, outcome, at)
                await self._publish(event, properties, trace, (exchange, routing_key))

    async def answer_repeat(
        self,
        properties: Properties,
        envelope: Envelope,
        first: Accepted | None,
        *,
        trace: TraceHeaders,
    ) -> None:
        """Answer a repeat with the outcome of the original message."""
        if first is None or not properties.reply_to:
            return
        envelope = envelope._replace(attempts=first.attempts - 1)
        event = _event(envelope, Sent(first.status, first.provider_id), first.at)
        event = event._replace(is_duplicate=True)
        await self._publish(event, properties, trace, ("", properties.reply_to))

    async def _publish(
        self,
        event: OutcomeEvent,
        properties: Properties,
        trace: TraceHeaders,
        target: tuple[str, str],
    ) -> None:
        exchange, routing_key = target
        try:
            await self._publisher.publish(
                event.body(),
                exchange=exchange,
                routing_key=routing_key,
                properties=outcome_properties(trace, properties.correlation_id),
            )
        except ExchangeRefusedError:
            pass  # the publisher logs this once for all events
        except PublishError as error:
            shown = exchange or "reply_to"
            log.warning("outcome_not_published", target=shown, fault=error.fault, why=error.why)
        except Exception:  # a bug in an outcome event concerns no message: it is acked already
            log.exception("internal_error", message_id=event.message_id)


def _event(envelope: Envelope, outcome: Sent | Dead, at: float) -> OutcomeEvent:
    event = OutcomeEvent(
        outcome=name_of(outcome),
        at=at,
        message_id=envelope.message_id or envelope.key,
        attempts=attempts_after(envelope.attempts, outcome),
        status=outcome.status,
    )
    if isinstance(outcome, Dead):
        return event._replace(reason=outcome.reason, code=outcome.code, meaning=outcome.meaning)
    return event._replace(provider_id=outcome.provider_id)
