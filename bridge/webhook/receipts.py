"""Reads delivery receipts from event bodies. Does no I/O."""

import re
from collections.abc import Iterable, Sequence
from typing import Any, Final, Literal, NamedTuple

from bridge.config.webhook import ReceiptSettings
from bridge.json_pointer import as_text, find_all, find_code, find_id

DeliveryState = Literal["delivered", "failed", "pending"]

# A phone number has 7 to 15 digits (ITU-T E.164) in any grouping, and up to two more as a prefix to
# dial abroad. Digits after a + always count as a phone number.
_NUMBER: Final = re.compile(r"(?:[^0-9A-Za-z]*[0-9]){7,17}[^0-9A-Za-z]*")
_PLUS: Final = re.compile(r"\+[0-9]")


class Receipt(NamedTuple):
    """The delivery state of one message, as the service reports it.

    `delivery` is None if the service's word for it is unknown. `provider_id` is the service's id of
    the message, `message_id` our reference from the request, `code` the reason of a failure.
    """

    delivery: DeliveryState | None
    provider_id: str | None = None
    message_id: str | None = None
    code: str | None = None


def read_receipts(
    document: Any,  # noqa: ANN401  JSON
    event_type: str | None,
    settings: ReceiptSettings,
) -> tuple[Receipt, ...]:
    """Return the receipts in an event; empty if it is not a delivery receipt.

    Invalid ids (see `find_id`) and ids that look like phone numbers are left out.
    """
    if not settings.status_pointers:
        return ()
    if settings.type_values and event_type not in settings.type_values:
        return ()
    read = (_read_receipt(one, settings) for one in _documents(document, settings.list_pointer))
    return tuple(receipt for receipt in read if receipt is not None)


def _documents(document: Any, list_pointer: str | None) -> Iterable[Any]:  # noqa: ANN401  JSON
    return (document,) if list_pointer is None else find_all(document, f"{list_pointer}/*")


def _read_receipt(document: Any, settings: ReceiptSettings) -> Receipt | None:  # noqa: ANN401
    status = _find_status(document, settings.status_pointers)
    if status is None:
        return None
    provider_id = find_id(document, settings.provider_id_pointers)
    message_id = find_id(document, settings.message_id_pointers)
    delivery = _delivery(status, settings)
    return Receipt(
        delivery=delivery,
        # Many services use plain numbers as ids, so only an id with a + is taken for a phone
        # number.
        provider_id=None if provider_id is None or _PLUS.search(provider_id) else provider_id,
        message_id=None if message_id is None or _looks_like_number(message_id) else message_id,
        # Other receipts carry the service's code for "no error".
        code=_find_error(document, settings.code_pointers) if delivery == "failed" else None,
    )


def _find_error(document: Any, pointers: Sequence[str]) -> str | None:  # noqa: ANN401  JSON
    # Many services write zero for "no error".
    code = find_code(document, pointers) if pointers else None
    return None if code is None or not code.strip("0") else code


def _find_status(document: Any, pointers: Sequence[str]) -> str | None:  # noqa: ANN401  JSON
    for pointer in pointers:
        for found in find_all(document, pointer):
            status = as_text(found)
            if status is not None:
                return status
    return None


def _delivery(status: str, settings: ReceiptSettings) -> DeliveryState | None:
    if status in settings.delivered:
        return "delivered"
    if status in settings.failed:
        return "failed"
    return "pending" if status in settings.pending else None


def _looks_like_number(text: str) -> bool:
    return bool(_NUMBER.fullmatch(text) or _PLUS.search(text))
