"""The contestants, and how each is started: the bridge as shipped, and its alternatives.

Every worker gets the same address, key and concurrency from its environment, and every receiver the
same secret and port.
"""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from bench.api import ACCOUNT
from bench.queues import EXCHANGE, OUTBOUND
from bridge import is_compiled
from bridge.config import ENV_PREFIX
from bridge.config.presets import Preset

FOLDER: Final = Path(__file__).parent / "contestants"
BUILT: Final = Path(__file__).parents[1] / ".bench"
# Built by `make redpanda-connect`, `make go-contestants` and `make compiled`.
REDPANDA: Final = BUILT / "redpanda-connect"
GO: Final = BUILT / "go"
COMPILED: Final = BUILT.parent / ".compiled" / "bin" / "python"
KEY: Final = "an-api-key-of-the-usual-length-0001"
SECRET: Final = "a-webhook-secret-of-the-usual-length"


@dataclass(frozen=True, slots=True)
class Contestant:
    """A program. `share` is the share of a run's messages that is enough to measure it.

    `environ` is added to the common environment. `has_metrics`: it serves metrics on the given
    port, and is scraped.
    """

    name: str
    what: str
    command: tuple[str, ...]
    share: float = 1.0
    has_metrics: bool = False
    environ: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Task:
    """The task of a program in a run."""

    amqp_url: str
    api_url: str = "http://127.0.0.1:1"
    ca_file: Path | None = None
    in_flight: int = 1
    port: int = 0


OURS: Final = "sms-bridge"
PLAIN: Final = "sms-bridge, plain"
BARE: Final = "bare loop"
STARLETTE: Final = "bare Starlette"


def _script(name: str) -> tuple[str, ...]:
    return (sys.executable, str(FOLDER / name))


def _redpanda(configuration: str) -> tuple[str, ...]:
    return (str(REDPANDA), "run", str(FOLDER / "redpanda_connect" / configuration))


# Features that take longer than a day to write.
_WITHOUT: Final = (
    "It has no dead letters, no log of deliveries and no deduplication, and ends when RabbitMQ "
    "goes away"
)
# The bridge in scenes with a single build of it: compiled if possible, as in the image.
MAIN: Final = OURS if COMPILED.exists() else PLAIN
# The bridge in scenes without other contestants: plain, or compiled with COMPILED=1.
HERE: Final = OURS if is_compiled() else PLAIN
# Otherwise, Python would import the plain modules in the working directory.
COMPILED_ENVIRON: Final = {"PYTHONSAFEPATH": "1"}
_COMPILED_WORKER: Final = (str(COMPILED), "-m", "bridge", "worker")
_PLAIN_WORKER: Final = (sys.executable, "-m", "bridge", "worker")
# Runs a program of the repository that is not a contestant.
PYTHON: Final = str(COMPILED) if MAIN == OURS else sys.executable
_OUR_WORKER: Final = _COMPILED_WORKER if MAIN == OURS else _PLAIN_WORKER

WORKERS: Final = (
    Contestant(
        OURS,
        "the compiled build of the image",
        _COMPILED_WORKER,
        has_metrics=True,
        environ=COMPILED_ENVIRON,
    ),
    Contestant(PLAIN, "the plain build that `pip` installs", _PLAIN_WORKER, has_metrics=True),
    Contestant(
        BARE,
        "aio-pika, aiohttp, uvloop and pydantic. It has no retries and no log, and loses the "
        "message on any failure",
        _script("bare_loop.py"),
    ),
    Contestant(
        "naive",
        "aio-pika, `httpx.AsyncClient`, tenacity and pydantic",
        _script("naive.py"),
        share=0.15,
    ),
    Contestant("FastStream", "FastStream and httpx", _script("faststream_worker.py"), share=0.15),
    Contestant(
        "expert's loop",
        f"aiormq, aiohttp, uvloop and pydantic, with one ack for several messages. {_WITHOUT}",
        _script("aiormq_worker.py"),
        has_metrics=True,
    ),
    Contestant(
        "Go program",
        f"amqp091-go and net/http, with one ack for several messages. {_WITHOUT}",
        (str(GO / "worker"),),
        has_metrics=True,
    ),
    Contestant(
        "Redpanda Connect",
        "its components `amqp_0_9` and `http_client` in Go, near their defaults",
        _redpanda("worker.yaml"),
        has_metrics=True,
    ),
)


def _with_preset(preset: Preset, what: str) -> Contestant:
    environ = {
        "SMS_API__PRESET": preset,
        "SMS_API__ACCOUNT": ACCOUNT,
        # The API identifies messages by this.
        "SMS_API__IDEMPOTENCY": "header:Idempotency-Key",
    }
    return Contestant(
        preset,
        what,
        _OUR_WORKER,
        has_metrics=True,
        environ={f"{ENV_PREFIX}{name}": value for name, value in environ.items()}
        | COMPILED_ENVIRON,
    )


DEFAULT_PRESET: Final[Preset] = "generic"
SHAPES: Final = (
    _with_preset(DEFAULT_PRESET, "JSON with a Bearer key; any 2xx means accepted"),
    _with_preset("telnyx", "JSON with a Bearer key; any 2xx means accepted"),
    _with_preset("twilio", "form with Basic login; 201 means accepted"),
    _with_preset("vonage-sms", "form with Basic login; the answer's body decides"),
)
UNTRACED: Final = "none"


TRACED: Final = (
    Contestant(UNTRACED, "as shipped", _OUR_WORKER, has_metrics=True, environ=COMPILED_ENVIRON),
    *(
        Contestant(
            name,
            f"`tracing.sample_ratio: {ratio}`",
            _OUR_WORKER,
            has_metrics=True,
            environ={f"{ENV_PREFIX}TRACING__SAMPLE_RATIO": ratio, **COMPILED_ENVIRON},
        )
        for name, ratio in (("a tenth of all messages", "0.1"), ("all messages", "1"))
    ),
)


# Installed by `make perf-test`.
PERF_TEST: Final = BUILT / "perf-test"
# Java's client reads a URL that ends with a slash as an empty virtual host.
_PERF_TEST_COMMAND: Final = (
    f"exec java -cp '{PERF_TEST}/*' com.rabbitmq.perf.PerfTest --qos 100 --producers 0 "
    '--predeclared --queue "$BENCH_QUEUE" --uri "${BENCH_AMQP_URL}%2f"'
)
BROKER_LIMIT: Final = Contestant(
    "RabbitMQ's PerfTest",
    "consumers in Java that only ack, with 100 unacked messages each",
    (
        "/bin/sh",
        "-c",
        _PERF_TEST_COMMAND,
    ),
)

RECEIVERS: Final = (
    Contestant(
        OURS,
        "the compiled build of the image",
        (str(COMPILED), "-m", "bridge", "webhook"),
        has_metrics=True,
        environ=COMPILED_ENVIRON,
    ),
    Contestant(
        PLAIN,
        "the plain build that `pip` installs",
        (sys.executable, "-m", "bridge", "webhook"),
        has_metrics=True,
    ),
    Contestant(
        STARLETTE,
        "Starlette, uvicorn and aio-pika on uvloop",
        _script("starlette_webhook.py"),
    ),
    Contestant("FastAPI", "FastAPI and aio-pika on uvicorn", _script("fastapi_webhook.py")),
    Contestant(
        "Granian",
        "Granian (a server in Rust, with RSGI) and aiormq on uvloop",
        _script("granian_webhook.py"),
        has_metrics=True,
    ),
    Contestant(
        "Go program",
        "net/http and amqp091-go",
        (str(GO / "webhook"),),
        has_metrics=True,
    ),
    Contestant(
        "Redpanda Connect",
        "its components `http_server` and `amqp_0_9` in Go, near their defaults",
        _redpanda("webhook.yaml"),
        has_metrics=True,
    ),
)


def present(contestants: tuple[Contestant, ...]) -> list[Contestant]:
    """Return the installed contestants."""
    return [one for one in contestants if Path(one.command[0]).exists()]


def named(name: str) -> Contestant:
    """Return the worker with this name."""
    return next(one for one in WORKERS if one.name == name)


def environ_for(task: Task, metrics_port: int) -> Mapping[str, str]:
    """Make the environment of a process, with the settings of each program."""
    others = {k: v for k, v in os.environ.items() if not k.startswith(ENV_PREFIX)}
    ours = {
        "RABBITMQ__URL": task.amqp_url,
        "SMS_API__BASE_URL": task.api_url,
        "SMS_API__KEY": KEY,
        "WORKER__CONCURRENCY": str(task.in_flight),
        "WEBHOOK__HOST": "127.0.0.1",
        "WEBHOOK__PORT": str(task.port),
        "WEBHOOK__SECRETS": f'["{SECRET}"]',
        "ADMIN__HOST": "127.0.0.1",
        "ADMIN__PORT": str(metrics_port),
    }
    theirs = {
        "AMQP_URL": task.amqp_url,
        "API_URL": task.api_url,
        "API_KEY": KEY,
        "IN_FLIGHT": str(task.in_flight),
        "QUEUE": OUTBOUND,
        "EXCHANGE": EXCHANGE,
        "SECRET": SECRET,
        "PORT": str(task.port),
        "METRICS_PORT": str(metrics_port),
    }
    # OpenSSL, httpx and Go read the trusted certificates from here.
    trust = {} if task.ca_file is None else {"SSL_CERT_FILE": str(task.ca_file)}
    return {
        **others,
        **{f"{ENV_PREFIX}{name}": value for name, value in ours.items()},
        **{f"BENCH_{name}": value for name, value in theirs.items()},
        **trust,
    }
