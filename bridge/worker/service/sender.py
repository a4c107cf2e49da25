"""Post one request to the SMS API; retry quickly only if it was never sent."""

import asyncio
import functools
import re
import time
from collections.abc import Callable
from typing import Final, get_args

from pydantic_core import to_json
from tenacity import (
    AsyncRetrying,
    retry_if_result,
    stop_after_attempt,
    stop_before_delay,
    wait_random_exponential,
)
from yarl import URL

from bridge.config import SmsApiSettings
from bridge.credentials import load_authorities
from bridge.errors import PostError
from bridge.telemetry.logs import Log
from bridge.worker.delivery import Delivery
from bridge.worker.fates import Answer, Fate, Result, judge_failure
from bridge.worker.metrics import PROVIDER_CODES, WorkerMetrics
from bridge.worker.request import SendRequest
from bridge.worker.service.shape import Shape
from bridge.worker.service.transport import ApiTransport, Transport
from bridge.worker.spans import WorkerSpans, end_post

log = Log(__name__)

QUICK_POSTS: Final = 3
QUICK_SECONDS: Final = 10.0
_REMEDY_OF_PAGES: Final = (
    "check sms_api.base_url and sms_api.path; describe acceptances in sms_api.response.accepted"
)
# Shorter words and digits identify nobody, and occur in many texts by chance.
MIN_WORD_CHARACTERS: Final = 3
MIN_DIGITS: Final = 4
# A shorter number may occur in an id by chance.
MIN_NUMBER_DIGITS: Final = 7

_DIGITS: Final = re.compile(rf"[0-9]{{{MIN_DIGITS},}}")
_NO_DIGITS: Final = re.compile("[^0-9]+")
_BETWEEN_WORDS: Final = re.compile("[^0-9a-z]+")


class Sender:
    """Posts requests to the SMS API; `transport` must report whether a request was sent.

    While `is_held()`, an unsent request is not retried. `spans` is None if none are exported. No
    quick retry starts later than `quick_seconds` after the first POST.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        transport: ApiTransport,
        metrics: WorkerMetrics,
        is_held: Callable[[], bool] = lambda: False,
        spans: WorkerSpans | None = None,
        quick_seconds: float = QUICK_SECONDS,
    ) -> None:
        self._shape = shape
        self._quick_seconds = quick_seconds
        self._is_held = is_held
        self._transport = transport
        self._metrics = metrics
        self.spans = spans
        self._in_flight = 0
        metrics.provider_in_flight.set_function(lambda: self._in_flight)
        # Resolved once, because each message counts and a lookup by labels costs as much as
        # counting.
        results = get_args(Result)
        self._requests = {one: metrics.provider_requests.labels(one) for one in results}
        self._durations = {one: metrics.provider_duration.labels(one) for one in results}
        responses = metrics.provider_responses
        self._responses = {code: responses.labels(str(code)) for code in PROVIDER_CODES}
        self._other_responses = responses.labels("other")
        self._pages = metrics.provider_pages.labels()
        self._has_told_of_pages = False

    async def send(self, request: SendRequest, delivery: Delivery) -> Answer:
        """POST a delivery's request and return the answer; never raises for faults of the API.

        A request that was never sent is retried in place, at most three POSTs in ten seconds.
        Everything else is returned at once: the circuit breaker and the retry queues decide whether
        to repeat it.
        """
        started = time.monotonic()
        answer = await self._post(request, delivery, started)
        if answer.fate is not Fate.NOT_SENT:
            return answer

        async def sleep(seconds: float) -> None:
            with delivery.waits("retry_in_place"):
                await asyncio.sleep(seconds)

        # A new object for each call: a shared one can report success for a failed send (tenacity
        # issues 93 and 529).
        retrying = AsyncRetrying(
            stop=stop_after_attempt(QUICK_POSTS)
            | stop_before_delay(self._quick_seconds - (time.monotonic() - started)),
            wait=wait_random_exponential(multiplier=0.2, max=2),
            retry=retry_if_result(lambda last: last.fate is Fate.NOT_SENT),
            retry_error_callback=lambda _: answer,
            sleep=sleep,
        )
        posts = 0

        async def post_again() -> Answer:
            nonlocal answer, posts
            posts += 1
            if posts > 1 and not self._is_held():
                answer = await self._post(
                    request, delivery, time.monotonic(), posts_before=posts - 1
                )
            return answer

        return await retrying(post_again)

    async def aclose(self) -> None:
        await self._transport.aclose()

    async def _post(
        self, request: SendRequest, delivery: Delivery, started: float, *, posts_before: int = 0
    ) -> Answer:
        span = None
        if self.spans is not None:
            span = self.spans.begin_post(delivery, posts_before=posts_before)
        headers = None if span is None else span.headers
        asked = self._shape.encode(request, delivery.envelope, headers)
        answer: Answer | None = None
        self._in_flight += 1
        try:
            reply = await self._transport.post(asked.url, asked.headers, asked.body, asked.common)
            answer = self._shape.judge(reply)
            if answer.code is not None and self._is_echo(answer.code, request):
                answer = answer._replace(code=None, meaning=None)
            if answer.provider_id is not None and is_number(answer.provider_id, request):
                answer = answer._replace(provider_id=None)
        except PostError as error:
            answer = judge_failure(error.fault)
        finally:
            self._in_flight -= 1
            if span is not None:
                end_post(span, answer)
        self._count(answer, time.monotonic() - started, delivery.trace_id)
        return answer

    def _is_echo(self, code: str, request: SendRequest) -> bool:
        """Whether an unlisted code is part of the number, the text or a secret."""
        if self._shape.knows(code):
            return False
        return is_echo(code, request) or self._shape.login.is_repeated(code)

    def _count(self, answer: Answer, seconds: float, trace_id: str | None) -> None:
        self._requests[answer.result].inc()
        self._durations[answer.result].observe(seconds, trace_id)
        if answer.status is not None:
            self._responses.get(answer.status, self._other_responses).inc()
        if answer.code is not None:
            self._metrics.count_error(answer.code)
        if answer.is_page:
            self._count_page(answer.status)

    def _count_page(self, status: int | None) -> None:
        """Count a web page that counts as sent, and log the first one."""
        self._pages.inc()
        if not self._has_told_of_pages:
            self._has_told_of_pages = True
            log.warning("web_page_counts_as_sent", status=status, remedy=_REMEDY_OF_PAGES)


def is_echo(code: str, request: SendRequest) -> bool:
    """Whether a code consists of words of the message, or contains digits of its text or number.

    Separators are ignored on both sides: a one-time code `123-456` matches `123456`, and
    `Anna_Smith` matches `Anna Smith`.
    """
    said = f"{request.to} {request.sender} {request.text}"
    if request.model_extra:
        said += to_json(request.model_extra).decode()
    word = _joined(code)
    if len(word) >= MIN_WORD_CHARACTERS and not word.isdigit() and word in _joined(said):
        return True
    digits = _NO_DIGITS.sub("", said)
    runs = {_NO_DIGITS.sub("", code), *_DIGITS.findall(code)}
    # A national number starts with a 0 in place of the country code.
    runs |= {run.lstrip("0") for run in runs}
    return any(len(run) >= MIN_DIGITS and run in digits for run in runs)


def is_number(provider_id: str, request: SendRequest) -> bool:
    """Whether the id that a service returned contains the recipient's number."""
    digits = request.to.removeprefix("+")
    return len(digits) >= MIN_NUMBER_DIGITS and digits in provider_id


def _joined(text: str) -> str:
    return _BETWEEN_WORDS.sub("", text.lower())


def open_transport(settings: SmsApiSettings, *, max_connections: int) -> ApiTransport:
    """Create the transport to the SMS API: our own, or httpx's if a proxy is configured.

    Trusts the system's certificate authorities, or only those of `ca_file`; an http URL needs none.
    Raises ConfigError if that file cannot be used.
    """
    authorities = functools.partial(load_authorities, "sms_api.ca_file", settings.ca_file)
    if settings.proxy is not None:
        # Imported on demand: it takes a tenth of the time of all imports.
        from bridge.worker.service.httpx_transport import HttpxTransport  # noqa: PLC0415

        return HttpxTransport(
            timeout_seconds=settings.timeout_seconds,
            connect_timeout_seconds=settings.connect_timeout_seconds,
            tls=authorities(),
            proxy=settings.proxy.get_secret_value(),
        )
    # Loading the system's authorities takes as long as connecting to the broker.
    is_plain = URL(settings.base_url or "").scheme == "http"
    return Transport(
        timeout_seconds=settings.timeout_seconds,
        connect_timeout_seconds=settings.connect_timeout_seconds,
        tls=None if is_plain else authorities(),
        max_connections=max_connections,
    )
