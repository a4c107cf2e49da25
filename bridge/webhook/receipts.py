"""Reads delivery receipts from event bodies. Does no I/O."""

from typing import Any, Literal, NamedTuple

from bridge.callback import PLUS, looks_like_number, reference_in
from bridge.config import EndpointSettings
from bridge.config.presets import receipt_meanings
from bridge.config.webhook import ReceiptSettings
from bridge.json_pointer import as_text, find_all, find_code, find_id, find_text

DeliveryState = Literal["delivered", "failed", "pending"]


class Receipt(NamedTuple):
    """The delivery state of one message, as the service reports it.

    `delivery` is None if the service's word for it, `status`, is unknown. `provider_id` is the
    service's id of the message, `message_id` our reference from the request, `code` the reason of a
    failure, `meaning` our explanation of it.
    """

    delivery: DeliveryState | None
    provider_id: str | None = None
    message_id: str | None = None
    code: str | None = None
    meaning: str | None = None
    status: str | None = None


def read_receipts(
    document: Any,  # noqa: ANN401  JSON
    kind: str | None,
    endpoint: EndpointSettings,
    reference: str | None = None,
) -> list[Receipt]:
    """Return the receipts in an event of this type; empty if it is not a delivery receipt."""
    if not endpoint.receipts.status_pointers:
        return []
    pointer = endpoint.items_pointer
    items = [document] if pointer is None else find_all(document, f"{pointer}/*")
    read = [read_receipt(item, kind, endpoint, reference) for item in items]
    return [receipt for receipt in read if receipt is not None]


def read_receipt(
    document: Any,  # noqa: ANN401  JSON
    kind: str | None,
    endpoint: EndpointSettings,
    reference: str | None = None,
) -> Receipt | None:
    """Return the receipt in an event or an item of one; None if it is not a delivery receipt.

    Invalid ids (see `find_id`) and ids that look like phone numbers are left out. `reference` is
    our id of the message in the address that was called, for services that echo none in the body.
    """
    settings = endpoint.receipts
    if settings.type_values and kind not in settings.type_values:
        return None
    found = _find_status(document, settings.status_pointers)
    status = as_text(found)
    if status is None:
        return None
    message_id = find_id(document, settings.message_id_pointers)
    if message_id is not None and looks_like_number(message_id):
        message_id = None
    if message_id is None:
        message_id = _find_reference(document, settings.callback_pointers) or reference
    delivery = _delivery(status, settings)
    # Other receipts carry the service's code for "no error".
    code = _find_error(document, settings.code_pointers) if delivery == "failed" else None
    return Receipt(
        delivery=delivery,
        provider_id=find_provider_id(document, settings.provider_id_pointers),
        message_id=message_id,
        code=code,
        meaning=None if code is None else receipt_meanings(endpoint.preset).get(code),
        # A boolean is no word; the type of the event says more.
        status=kind if isinstance(found, bool) and kind is not None else status,
    )


def find_provider_id(document: Any, pointers: tuple[str, ...]) -> str | None:  # noqa: ANN401  JSON
    """Return the service's id of a message; None if it looks like a phone number."""
    provider_id = find_id(document, pointers)
    # Many services use plain numbers as ids, so only an id with a + is taken for a phone number.
    if provider_id is None or ("+" in provider_id and PLUS.search(provider_id)):
        return None
    return provider_id


def _find_error(document: Any, pointers: tuple[str, ...]) -> str | None:  # noqa: ANN401  JSON
    # Many services write zero for "no error".
    code = find_code(document, pointers) if pointers else None
    return None if code is None or not code.strip("0") else code


def _find_reference(document: Any, pointers: tuple[str, ...]) -> str | None:  # noqa: ANN401  JSON
    address = find_text(document, pointers) if pointers else None
    return None if address is None else reference_in(address)


def _find_status(document: Any, pointers: tuple[str, ...]) -> str | int | None:  # noqa: ANN401  JSON
    """Return the first text, integer or boolean at any of these pointers."""
    for pointer in pointers:
        for found in find_all(document, pointer):
            if isinstance(found, str | int) and as_text(found) is not None:
                return found
    return None


def _delivery(status: str, settings: ReceiptSettings) -> DeliveryState | None:
    if status in settings.delivered:
        return "delivered"
    if status in settings.failed:
        return "failed"
    return "pending" if status in settings.pending else None
