"""Whether the SMS API answers, with a certificate and a clock that can be trusted.

A HEAD request to its root, without the key, cannot send anything.
"""

import asyncio
import contextlib
import itertools
import ssl
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
from yarl import URL

from bridge.admin.admin_port import local_port, open_client, read_metrics
from bridge.admin.checks.certificates import judge_certificate
from bridge.admin.checks.clock import judge_clock
from bridge.admin.checks.set_up import WAIT_SECONDS, SetUp
from bridge.admin.clock_skew import clock_skew_seconds
from bridge.admin.finding import Finding
from bridge.config import SmsApiSettings
from bridge.credentials import load_authorities
from bridge.deadline import Deadline
from bridge.errors import BridgeError, causes_of


def judge_base_url(set_up: SetUp) -> list[Finding]:
    """Warn of a base URL that already has the path that the worker adds; no request is made."""
    api = set_up.settings.sms_api
    url, path = api.base_url or "", api.path
    steps = itertools.accumulate(path.split("/")[1:], lambda way, name: f"{way}/{name}", initial="")
    if "worker" not in set_up.roles or not url.endswith(tuple(filter(None, steps))):
        return []
    fix = f"leave {path} out of sms_api.base_url: the worker adds it"
    return [Finding("SMS API", "warn", f"messages will be posted to {url}{path}", fix)]


def judge_repeats(set_up: SetUp) -> list[Finding]:
    """Say what becomes of an uncertain attempt at a service that cannot tell a repeat."""
    api, worker = set_up.settings.sms_api, set_up.settings.worker
    if "worker" not in set_up.roles or api.knows_repeats:
        return []
    text = (
        "takes no idempotency key (sms_api.idempotency is none), so what is sent again may be a "
        f"second text; worker.on_uncertain is {worker.on_uncertain}: a message that may have been "
        "sent becomes"
    )
    if worker.on_uncertain == "park":
        return [Finding("SMS API", "ok", f"{text} a dead letter `uncertain` and is not repeated")]
    times = worker.max_uncertain_attempts
    fix = "set worker.on_uncertain to park, or leave it out"
    return [Finding("SMS API", "warn", f"{text} up to {times} texts", fix)]


async def check_answers(set_up: SetUp) -> list[Finding]:
    """Tell of web pages that the worker on this computer was answered and counted as sent."""
    settings = set_up.settings
    if "worker" not in set_up.roles:
        return []
    try:
        async with open_client() as client:
            scrape = await read_metrics(client, local_port(settings.admin))
    except BridgeError:
        return []
    # Another queue's worker may have another service.
    is_ours = any(scrape.samples("sms_bridge_worker_consumer_up", queue=settings.worker.queue))
    pages = int(scrape.total("sms_bridge_worker_provider_pages_total")) if is_ours else 0
    if not pages:
        return []
    text = (
        f"{pages} of its answers to the worker on this computer were web pages behind a 2xx, and "
        "count as sent"
    )
    fix = (
        "check sms_api.base_url and sms_api.path; where they are right, say in "
        "sms_api.response.accepted what means yes"
    )
    return [Finding("SMS API", "warn", text, fix)]


async def check_sms_api(set_up: SetUp) -> list[Finding]:
    """Try the API that the worker posts to, as far as that is possible without a message."""
    if "worker" not in set_up.roles:
        return []
    api = set_up.settings.sms_api
    url = URL(api.base_url or "")
    subject = f"SMS API {url.host}"
    if api.proxy is None and not await _is_resolved(url):
        fix = "check sms_api.base_url and the resolver"
        return [Finding(subject, "fail", "its name is not found", fix)]
    started = time.monotonic()
    try:
        async with Deadline(WAIT_SECONDS), _ask(api) as answer:
            milliseconds = round((time.monotonic() - started) * 1000)
            text = f"answers {answer.status_code} to HEAD in {milliseconds} ms"
            return [
                Finding(subject, "ok", f"{text}; whether it takes the key, only a message shows"),
                *_judge_tls(subject, answer),
                *judge_clock(subject, clock_skew_seconds(answer.headers.get("Date"))),
            ]
    except (httpx.HTTPError, OSError, TimeoutError) as error:
        return [_judge_failure(subject, error)]


async def _is_resolved(url: URL) -> bool:
    try:
        async with Deadline(WAIT_SECONDS):
            await asyncio.get_running_loop().getaddrinfo(url.host, url.port)
    except (OSError, TimeoutError):
        return False
    return True


@contextlib.asynccontextmanager
async def _ask(api: SmsApiSettings) -> AsyncIterator[httpx.Response]:
    proxy = None if api.proxy is None else api.proxy.get_secret_value()
    context = load_authorities("sms_api.ca_file", api.ca_file)
    async with (
        httpx.AsyncClient(
            verify=context, proxy=proxy, timeout=api.connect_timeout_seconds, trust_env=False
        ) as client,
        client.stream("HEAD", f"{api.base_url}/") as answer,
    ):
        yield answer


def _judge_tls(subject: str, answer: httpx.Response) -> list[Finding]:
    if answer.url.scheme == "http":
        if answer.url.host in {"localhost", "127.0.0.1", "::1"}:
            return []
        text = "http: the key and the texts travel in clear"
        return [Finding(subject, "warn", text, "use https in sms_api.base_url")]
    stream: Any = answer.extensions.get("network_stream")
    secure = None if stream is None else stream.get_extra_info("ssl_object")
    certificate = None if secure is None else secure.getpeercert()
    return [judge_certificate(subject, certificate)] if certificate else []


def _judge_failure(subject: str, error: Exception) -> Finding:
    for cause in causes_of(error):
        if isinstance(cause, ssl.SSLCertVerificationError):
            why = cause.verify_message or "not trusted"
            fix = "check sms_api.ca_file, or the service's certificate"
            return Finding(subject, "fail", f"its certificate is refused: {why}", fix)
        if isinstance(cause, ssl.SSLError):
            return Finding(subject, "fail", "no TLS is spoken there", "check sms_api.base_url")
    timed_out = isinstance(error, TimeoutError | httpx.TimeoutException)
    text = "no answer in time" if timed_out else f"no connection ({type(error).__name__})"
    return Finding(subject, "fail", text, "check sms_api.base_url, the network and the proxy")
