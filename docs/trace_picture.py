"""Draws the traces of a message: `make pictures` writes docs/img/traces.svg.

The spans come from a real broker, worker and webhook receiver, and a sandbox that fails once. The
number and the text are invented.
"""

import asyncio
import json
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bridge.amqp.client import DeliveryMode, Message
from bridge.amqp.connecting import close_quietly
from bridge.sandbox.demo.environment import DemoEnvironment, open_environment
from tests.otlp import Received, Receiver, otlp_receiver

mpl.use("svg")
# Reproducible output.
mpl.rcParams["svg.hashsalt"] = "traces"

PICTURE = Path(__file__).parent / "img" / "traces.svg"
NUMBER = "+491713920001"
TRACE_ID, PUBLISHER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
# Long enough to be visible beside the second in the retry queue.
FAULTS = [
    {"to": NUMBER, "count": 1, "status": 503, "latency_seconds": 0.12},
    {"to": NUMBER, "count": 1, "latency_seconds": 0.08},
]
SECONDS = 30.0
SPANS_OF_MESSAGE, SPANS_OF_WEBHOOK = 4, 2
COLOURS = {"consumer": "#3274b5", "client": "#3f9b4f", "server": "#8255b0", "producer": "#e8771a"}
RED = "#d0342c"
# Share of the width for the name after a bar.
NAME_SHARE = 0.29


async def play(stage: DemoEnvironment, receiver: Receiver) -> tuple[float, list[Received]]:
    """Send a message at the second attempt, and reply to it. Return the time and all spans."""
    async with httpx.AsyncClient(
        base_url=stage.sandbox_url, trust_env=False, timeout=SECONDS
    ) as service:
        (await service.put("/sandbox/faults", json=FAULTS)).raise_for_status()
        published_at = await publish(stage)
        wanted = {"to": NUMBER, "wait_seconds": SECONDS}
        (await service.get("/sandbox/messages", params=wanted)).raise_for_status()
        reply = {"from": NUMBER, "text": "YES"}
        (await service.post("/sandbox/replies", json=reply)).raise_for_status()
    async with asyncio.timeout(SECONDS):
        while len(receiver.spans) < SPANS_OF_MESSAGE + SPANS_OF_WEBHOOK:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    return published_at, sorted(receiver.spans, key=lambda span: span.started_at)


async def publish(stage: DemoEnvironment) -> float:
    """Publish a request like a program with tracing. Return the time."""
    connection = await stage.connect("pictures")
    try:
        channel = await connection.channel()
        body = json.dumps({"to": NUMBER, "from": "Acme", "text": "Reply YES to confirm."}).encode()
        message = Message(
            body,
            delivery_mode=DeliveryMode.PERSISTENT,
            message_id="order-4711",
            headers={"traceparent": f"00-{TRACE_ID}-{PUBLISHER}-01"},
        )
        published_at = time.time()
        await channel.default_exchange.publish(message, stage.settings.worker.queue)
        return published_at
    finally:
        await close_quietly(connection)


def draw(published_at: float, spans: Sequence[Received]) -> Figure:
    """Draw a row for each span, with children below and to the right of their parent's name."""
    figure = Figure(figsize=(10, 3.9), layout="constrained")
    axes = figure.subplots()
    axes.plot([0], [0], marker="D", color="#555555")
    axes.text(0, 0, "   your program publishes", va="center", fontsize=9)
    rows: dict[str, int] = {PUBLISHER: 0}
    message = [span for span in spans if span.trace_id == TRACE_ID]
    others = [span for span in spans if span.trace_id != TRACE_ID]
    for row, span in enumerate((*message, *others), start=1):
        rows[span.span_id] = row
        draw_span(axes, span, row, span.started_at - published_at)
    height = len(message) + 0.5
    axes.axhline(height, color="#999999", lw=0.8, ls=":")
    last = max(span.ended_at for span in spans) - published_at
    where = {"transform": axes.get_yaxis_transform(), "ha": "right", "fontsize": 8}
    axes.text(0.995, 0, f"trace {TRACE_ID[:8]}...", va="center", color="#555555", **where)
    webhook = f"the reply's own trace {others[0].trace_id[:8]}..."
    axes.text(0.4, height + 0.5, webhook, va="center", color="#555555", **where)
    axes.set_xlim(-0.03 * last, 1.45 * last)
    axes.set_ylim(len(spans) + 0.6, -0.6)
    for span in message:
        for _, linked in span.links:
            draw_link(axes, span, rows[span.span_id], rows[linked])
    axes.set_yticks([])
    axes.set_xlabel("seconds since the publish")
    for side in ("left", "right", "top"):
        axes.spines[side].set_visible(False)
    return figure


def draw_span(axes: Axes, span: Received, row: int, begin: float) -> None:
    """Draw a span's bar, with its name and outcome after it."""
    width = max(span.ended_at - span.started_at, 0.004)
    colour = RED if span.is_error else COLOURS[span.kind]
    axes.barh(row, width, left=begin, height=0.55, color=colour)
    status = span.attributes.get("http.response.status_code")
    outcome = span.attributes.get("sms_bridge.outcome")
    said = outcome or (None if span.kind == "producer" else status)
    text = f" {span.name}" + ("" if said is None else f"  ({said})")
    milliseconds = (span.ended_at - span.started_at) * 1000
    axes.text(begin + width, row, f"{text}  {milliseconds:.0f} ms", va="center", fontsize=9)


def draw_link(axes: Axes, span: Received, row: int, linked_row: int) -> None:
    """Draw the link from a retried delivery to the one before."""
    bar, linked = axes.patches[row - 1], axes.patches[linked_row - 1]
    style = {"arrowstyle": "->", "color": "#555555", "ls": "--"}
    # From the bar up to the end of the other name.
    style["connectionstyle"] = "angle,angleA=90,angleB=0,rad=6"
    begin = (bar.get_x() + bar.get_width() / 4, row - 0.35)
    behind_its_name = linked.get_x() + linked.get_width() + NAME_SHARE * axes.get_xlim()[1]
    axes.annotate("", xy=(behind_its_name, linked_row), xytext=begin, arrowprops=style)
    before = span.attributes["sms_bridge.attempts"] - 1
    text = f"linked to attempt {before} "
    axes.text(begin[0], linked_row + 0.6, text, fontsize=8, ha="right", color="#555555")


def main() -> None:
    """Run the processes, and write the picture."""
    with otlp_receiver() as receiver:
        tracing = {"TRACING__OTLP_ENDPOINT": receiver.url, "TRACING__SAMPLE_RATIO": "1"}
        with open_environment(tracing) as stage:
            stage.start()
            figure = draw(*asyncio.run(play(stage, receiver)))
    figure.savefig(PICTURE, metadata={"Date": None})


if __name__ == "__main__":
    main()
