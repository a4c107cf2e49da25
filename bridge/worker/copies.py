"""Build the properties of the copies that replace or move a message.

Properties and headers with which the broker would refuse, drop, reroute or count a copy are
removed; all others stay unchanged.
"""

import re
import time
from datetime import UTC, datetime
from typing import Any, Final

from bridge.amqp.field_values import as_they_came, header_bytes
from bridge.amqp.properties import Properties, write_properties
from bridge.telemetry.trace_context import TraceHeaders
from bridge.worker.envelope import (
    ATTEMPTS,
    CODE,
    COPIES,
    DEAD_AT,
    DETAIL,
    EARLIER_SPAN,
    EXPIRES_AT,
    FIRST_DELIVERED_AT,
    MEANING,
    MEMORY,
    OF_EVENTS,
    POSSIBLE_DUPLICATE,
    PREFIX,
    PRIORITY,
    QUEUE,
    REASON,
    SCHEDULED_AT,
    STATUS,
    UNCERTAIN_ATTEMPTS,
    Envelope,
    is_from_retry_queue,
    read_expiration,
    read_moment,
    write_moment,
)
from bridge.worker.outcomes import Dead, Retried

MAX_DETAIL_CHARACTERS: Final = 500
# Headers that the broker itself reads: to route a message, to describe its history, to find it in a
# stream. On a copy they would be wrong. If one `x-death` header has an unexpected type, RabbitMQ
# 3.10.8 returns no more messages from the retry queues of any virtual host.
_BROKERS_OWN: Final = re.compile(
    "B?CC|x-(delivery-count|acquired-count|(first-|last-)?death.*|received-from|shovelled.*"
    "|original-(cc|exchange|routing-key)|invalid-headers|routed-by|stream-filter-value|opt-.*)"
)
# The address for direct replies. The broker accepts it only on the channel of a client that waits
# for replies, and closes any other channel.
_DIRECT_REPLY: Final = "amq.rabbitmq.reply-to"


def copy_properties(
    properties: Properties,
    envelope: Envelope,
    outcome: Retried | Dead,
    *,
    queue: str,
    max_bytes: int,
    span: TraceHeaders = (),
) -> Properties:
    """Build the properties of the copy that replaces a delivery; `envelope` counts this attempt.

    `_to_publish_anew` removes some properties; the largest headers are dropped if the properties
    exceed `max_bytes`; the rest stays unchanged. A message without an id gets its key as id, so
    that all later attempts use the same idempotency key. `queue` is where the message came from; a
    dead letter names it, so that a replay returns the message there. `span` is the span of this
    delivery, to which the span of the copy's delivery links.
    """
    replaced, headers = _to_publish_anew(properties)
    replaced.message_id = envelope.id_of_copies
    # A retry copy keeps the status, code and meaning of its last answer. A publisher's own message
    # must not have headers of these names.
    not_ours = () if is_from_retry_queue(headers) else (STATUS, CODE, MEANING)
    for name in (DEAD_AT, QUEUE, SCHEDULED_AT, POSSIBLE_DUPLICATE, *not_ours, *OF_EVENTS):
        headers.pop(name, None)
    own: dict[str, Any] = {
        REASON: outcome.reason,
        DETAIL: outcome.detail[:MAX_DETAIL_CHARACTERS],
        ATTEMPTS: envelope.attempts,
        UNCERTAIN_ATTEMPTS: envelope.uncertain_attempts,
        FIRST_DELIVERED_AT: write_moment(envelope.first_delivered_at),
        COPIES: envelope.copies + 1,
    }
    if envelope.expires_at is not None:
        own[EXPIRES_AT] = write_moment(envelope.expires_at)
    if envelope.scheduled_at is not None:
        own[SCHEDULED_AT] = write_moment(envelope.scheduled_at)
    if envelope.has_been_copied:
        own[POSSIBLE_DUPLICATE] = True
    if span:
        own[EARLIER_SPAN] = span[0][1]
    if outcome.status is not None:
        own[STATUS] = outcome.status
        # The code and meaning belong to the status of an earlier answer.
        headers.pop(CODE, None)
        headers.pop(MEANING, None)
    if outcome.code is not None:
        own[CODE] = outcome.code
    if outcome.meaning is not None:
        own[MEANING] = outcome.meaning
    if isinstance(outcome, Dead):
        own[QUEUE] = queue
        own[DEAD_AT] = datetime.now(UTC).isoformat(timespec="milliseconds")
    return _fitted(replaced, headers, own, max_bytes)


def _fitted(
    properties: Properties, headers: dict[str, Any], own: dict[str, Any], max_bytes: int
) -> Properties:
    """Merge both groups of headers, dropping the largest if they do not fit into a frame."""
    properties.headers = headers | own
    if not properties.headers:
        # All other properties are short.
        return properties
    excess = len(write_properties(properties)) - max_bytes
    if excess > 0:
        properties.headers = _without_the_largest(headers, own, excess) | own
    return properties


def _without_the_largest(
    headers: dict[str, Any], own: dict[str, Any], excess: int
) -> dict[str, Any]:
    """Drop as many of the largest headers as necessary, the bridge's own headers last.

    A copy that exceeds the frame size could never be published. Without headers it always fits: all
    other properties are short, and the smallest frame of AMQP has 4,096 bytes.
    """
    sizes = {name: header_bytes(name, value) for name, value in headers.items() if name not in own}
    kept = dict(headers)
    for name in sorted(sizes, key=lambda name: (name.startswith(PREFIX), -sizes[name])):
        if excess <= 0:
            break
        del kept[name]
        excess -= sizes[name]
    return kept


def _to_publish_anew(properties: Properties) -> tuple[Properties, dict[str, Any]]:
    """Return properties and headers with which the broker accepts a message a second time.

    Without those with which it would refuse (`user_id`, a direct reply), drop (`expiration`),
    reroute or count the copy.
    """
    anew = properties.copy()
    anew.user_id = None
    anew.expiration = None
    anew.delivery_mode = 2
    if anew.reply_to == _DIRECT_REPLY:
        anew.reply_to = None
    headers = {
        name: value
        for name, value in as_they_came(properties.headers).items()
        if not _BROKERS_OWN.fullmatch(name)
    }
    return anew, headers


def moved_properties(properties: Properties) -> Properties:
    """Build the properties with which a message is published in another place, with its body.

    `_to_publish_anew` removes some properties. `expiration` becomes `sms-bridge-expires-at`, unless
    that header has an earlier time, or one that cannot be read and makes the message `invalid`.
    """
    moved, headers = _to_publish_anew(properties)
    expires_at = read_expiration(properties, time.time())
    if expires_at is not None:
        header_time = read_moment(headers, EXPIRES_AT)
        if EXPIRES_AT not in headers or (header_time is not None and expires_at < header_time):
            headers[EXPIRES_AT] = write_moment(expires_at)
    moved.headers = headers
    return moved


def renewed_properties(properties: Properties, *, is_repeated: bool, max_bytes: int) -> Properties:
    """Build the properties of a request moved to the end of its queue; its attempts stay the same.

    `is_repeated`: the message may have been sent already. The broker's redelivered flag, which says
    so, is not carried over to the copy.
    """
    renewed = moved_properties(properties)
    own: dict[str, Any] = {POSSIBLE_DUPLICATE: True} if is_repeated else {}
    return _fitted(renewed, renewed.headers or {}, own, max_bytes)


def replayed_properties(properties: Properties) -> Properties:
    """Build the properties with which a dead letter starts anew: no attempts, the same key.

    `sms-bridge-copies` stays: it distinguishes this copy from the one that became a dead letter.
    """
    replayed = moved_properties(properties)
    headers = replayed.headers or {}
    left_out = {*MEMORY, PRIORITY}
    replayed.headers = {name: headers[name] for name in headers if name not in left_out}
    return replayed
