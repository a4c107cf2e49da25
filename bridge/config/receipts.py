"""Which events are delivery receipts, and where things stand in them."""

from collections.abc import Iterator
from typing import Annotated, Final

from pydantic import BeforeValidator, Field, StringConstraints, model_validator

from bridge.config.fields import List, Name, Pointer, write_number
from bridge.config.section import Section

MAX_VALUES: Final = 50

# A service's own word for what became of a message; some are numbers.
StatusValue = Annotated[
    str, StringConstraints(min_length=1, max_length=64), BeforeValidator(write_number)
]
StatusValues = Annotated[tuple[StatusValue, ...], List, Field(max_length=MAX_VALUES)]
Pointers = Annotated[tuple[Pointer, ...], List, Field(max_length=10)]


class ReceiptSettings(Section):
    """How a delivery receipt is recognised and read; without `status_pointers` no event is one.

    Of each list of pointers the first that leads to something counts. With `list_pointer` an event
    may hold many receipts, and the other pointers begin at each member of that list.
    """

    type_values: Annotated[tuple[Name, ...], List, Field(max_length=MAX_VALUES)] = ()
    list_pointer: Pointer | None = None
    status_pointers: Pointers = ()
    delivered: StatusValues = ()
    failed: StatusValues = ()
    pending: StatusValues = ()
    provider_id_pointers: Pointers = ()
    message_id_pointers: Pointers = ()
    code_pointers: Pointers = ()

    @model_validator(mode="after")
    def _can_be_read(self) -> "ReceiptSettings":
        for fault in self._faults():
            raise ValueError(fault)
        return self

    def _faults(self) -> Iterator[str]:
        named = (*self.delivered, *self.failed, *self.pending)
        if self.status_pointers and not (self.delivered or self.failed):
            yield "delivered: is empty, and so is failed; list the service's words for them"
        if named and not self.status_pointers:
            yield "status_pointers: is empty; say where the service's word for the delivery stands"
        twice = sorted(word for word in set(named) if named.count(word) > 1)
        if twice:
            yield "delivered, failed, pending: a word is there twice; leave it where it belongs"
