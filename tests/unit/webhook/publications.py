"""What a publisher has written, and what becomes of it, as the test says."""

import asyncio
from dataclasses import dataclass, field

from bridge.amqp.publication import Publication
from bridge.errors import Confirm
from bridge.http.messages import Request, Response
from bridge.telemetry.metrics import BridgeMetrics, new_registry
from bridge.webhook.receiver import Receiver

GUARD_SECONDS = 6.0
# One for all, because to make them takes longer than to use them.
PUBLISHED = BridgeMetrics(
    new_registry(), component="webhook", version="0", revision="0", exchanges=("sms.inbound",)
)


def write(
    fate: "Confirm | asyncio.Future[Confirm]" = "confirmed", routing_key: str = "message.received"
) -> Publication:
    if isinstance(fate, str):
        confirm: asyncio.Future[Confirm] = asyncio.get_running_loop().create_future()
        confirm.set_result(fate)
    else:
        confirm = fate
    return Publication(PUBLISHED, "sms.inbound", routing_key, confirm, 0.0)


async def answer_of(receiver: Receiver, request: Request) -> Response:
    """Have a request answered; wait for an answer that does not come at once."""
    answer = receiver.answer(request)
    return answer if isinstance(answer, Response) else await answer


@dataclass
class Gate:
    """Publishes whose fate the test tells, one after the other."""

    confirms: list["asyncio.Future[Confirm]"] = field(default_factory=list)

    async def __call__(self) -> Publication:
        return self.write()

    def write(self) -> Publication:
        self.confirms.append(asyncio.get_running_loop().create_future())
        return write(self.confirms[-1])

    async def until(self, count: int) -> None:
        async with asyncio.timeout(GUARD_SECONDS):
            while len(self.confirms) < count:  # noqa: ASYNC110  there is no event to wait for
                await asyncio.sleep(0.001)
