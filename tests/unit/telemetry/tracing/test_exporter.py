"""Batches of spans on their way to a collector, which answers as it likes."""

import socket
import threading
from contextlib import closing

from bridge.telemetry.tracing.exporter import MAX_ANSWER_BYTES, Exporter
from bridge.telemetry.tracing.otlp import SpanWriter
from bridge.telemetry.tracing.recorded import RecordedSpan, TraceContext

CHUNK = b"10000\r\n" + b"x" * 65536 + b"\r\n"
# What lies in the buffers of both ends when one of them stops to read.
BUFFERED_BYTES = 16 * 1024 * 1024
GUARD_SECONDS = 20.0


def test_an_answer_without_end_is_not_read() -> None:
    """What a collector answers is read up to a bound, and the connection closed."""
    lost: list[int] = []
    written = 0

    def answer(listener: socket.socket) -> None:
        nonlocal written
        connection, _ = listener.accept()
        with closing(connection):
            connection.settimeout(GUARD_SECONDS)
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            try:
                while written < 4 * BUFFERED_BYTES:
                    connection.sendall(CHUNK)
                    written += len(CHUNK)
            except OSError:
                return

    with socket.create_server(("127.0.0.1", 0)) as listener:
        collector = threading.Thread(target=answer, args=(listener,))
        collector.start()
        exporter = Exporter(
            f"http://127.0.0.1:{listener.getsockname()[1]}",
            SpanWriter({}, version="1"),
            failed=lost.append,
        )
        RecordedSpan(
            "one",
            "client",
            {},
            context=TraceContext("1" * 32, "01"),
            on_end=lambda span: exporter.export([span]),
        ).end({})
        collector.join(GUARD_SECONDS)
        exporter.shutdown()

    assert lost == []
    assert MAX_ANSWER_BYTES <= written < BUFFERED_BYTES
