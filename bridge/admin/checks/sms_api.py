"""Check whether the SMS API answers, its certificate and its clock.

The check is a HEAD request to its root without the key, which cannot send a message.
"""

import contextlib
import socket
import ssl
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
from yarl import URL

from bridge.admin.checks.findings import (
    WAIT_SECONDS,
    Finding,
    SetUp,
    judge_certificate,
    judge_clock,
)
from bridge.admin.management import clock_skew_seconds
from bridge.config import SmsApiSettings
from bridge.credentials import load_authorities
from bridge.deadline import Deadline
from bridge.errors import causes_of


async def check_sms_api(set_up: SetUp) -> list[Finding]:
    """Try the API as far as possible without sending a message."""
    if "worker" not in set_up.roles:
        return []
    api = set_up.settings.sms_api
    subject = f"SMS API {URL(api.base_url or '').host}"
    started = time.monotonic()
    try:
        async with Deadline(WAIT_SECONDS), _ask(api) as answer:
            milliseconds = round((time.monotonic() - started) * 1000)
            text = f"answers {answer.status_code} to HEAD in {milliseconds} ms"
            return [
                Finding(subject, "ok", f"{text}; only a message shows whether it accepts the key"),
                *_judge_tls(subject, answer),
                *judge_clock(subject, clock_skew_seconds(answer.headers.get("Date"))),
            ]
    except (httpx.HTTPError, OSError, TimeoutError) as error:
        return [_judge_failure(subject, error)]


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
        text = "http: the key and the texts are sent unencrypted"
        return [Finding(subject, "warn", text, "use https in sms_api.base_url")]
    stream: Any = answer.extensions.get("network_stream")
    secure = None if stream is None else stream.get_extra_info("ssl_object")
    certificate = None if secure is None else secure.getpeercert()
    return [judge_certificate(subject, certificate)] if certificate else []


def _judge_failure(subject: str, error: Exception) -> Finding:
    for cause in causes_of(error):
        if isinstance(cause, socket.gaierror):
            fix = "check sms_api.base_url, sms_api.proxy and the resolver"
            return Finding(subject, "fail", "its name cannot be resolved", fix)
        if isinstance(cause, ssl.SSLCertVerificationError):
            why = cause.verify_message or "not trusted"
            fix = "check sms_api.ca_file, or the service's certificate"
            return Finding(subject, "fail", f"its certificate is refused: {why}", fix)
        if isinstance(cause, ssl.SSLError):
            return Finding(
                subject, "fail", "the server does not speak TLS", "check sms_api.base_url"
            )
    timed_out = isinstance(error, TimeoutError | httpx.TimeoutException)
    text = "no answer in time" if timed_out else f"no connection ({type(error).__name__})"
    return Finding(subject, "fail", text, "check sms_api.base_url, the network and the proxy")
