"""Which class a request is of: the urgent pass all others."""

from typing import Final

from bridge.amqp.properties import Properties
from bridge.worker.envelope import PRIORITY

# By the AMQP property, where no header says it: as quorum queues of RabbitMQ 4.0 to 4.2 divide
# their two priorities.
URGENT_FROM_PRIORITY: Final = 5


def is_urgent(properties: Properties) -> bool:
    """Say whether a request is urgent; the header comes before the property.

    What cannot be read is not: whoever sends it finds it invalid.
    """
    headers = properties.headers
    said = headers.get(PRIORITY) if headers else None
    if said is None:
        return (properties.priority or 0) >= URGENT_FROM_PRIORITY
    return said in ("urgent", b"urgent")
