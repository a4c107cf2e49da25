"""Checks on this computer: the settings alone, and the roles that run here."""

import itertools
from typing import Final

from bridge.admin.admin_port_client import local_port, open_client, read_health, read_metrics
from bridge.admin.checks.findings import Finding, SetUp
from bridge.errors import BridgeError

_CLOCK: Final = "compare this computer's clock with the service's"
_REFUSED_FIXES: Final = {
    "mismatch": "compare {endpoint}.secret_files with the secret at the service and, if its "
    "scheme signs the address, public_url with the address that it calls",
    "malformed": "compare {endpoint}.preset and .signature with what the service sends",
    "stale": _CLOCK,
    "future": _CLOCK,
}


def judge_base_url(set_up: SetUp) -> list[Finding]:
    """Warn of a base URL that contains the path which the worker appends."""
    api = set_up.settings.sms_api
    url, path = api.base_url or "", api.path
    steps = itertools.accumulate(path.split("/")[1:], lambda way, name: f"{way}/{name}", initial="")
    if "worker" not in set_up.roles or not url.endswith(tuple(filter(None, steps))):
        return []
    fix = f"remove {path} from sms_api.base_url: the worker appends it"
    return [Finding("SMS API", "warn", f"messages will be posted to {url}{path}", fix)]


def judge_repeats(set_up: SetUp) -> list[Finding]:
    """Explain what follows an uncertain attempt if the service cannot recognise repeats."""
    api, worker = set_up.settings.sms_api, set_up.settings.worker
    if "worker" not in set_up.roles or api.knows_repeats:
        return []
    text = (
        "accepts no idempotency key (sms_api.idempotency is none), so a retry may send a second "
        f"text; worker.on_uncertain is {worker.on_uncertain}: a message that may have been sent "
        "becomes"
    )
    if worker.on_uncertain == "park":
        return [Finding("SMS API", "ok", f"{text} a dead letter `uncertain` and is not retried")]
    times = worker.max_uncertain_attempts
    fix = "set worker.on_uncertain to park, or leave it out"
    return [Finding("SMS API", "warn", f"{text} up to {times} texts", fix)]


def judge_receipts(set_up: SetUp) -> list[Finding]:
    """Say if receipts will have no `message_id`, because no address for them is known."""
    settings = set_up.settings
    is_asked = "callback" in settings.sms_api.request.placeholders
    if "worker" not in set_up.roles or not is_asked or settings.callback_url is not None:
        return []
    text = (
        "requests name no address for receipts, so receipts will have no message_id; set "
        f"public_url of the webhook endpoint with preset {settings.sms_api.preset}, "
        "for the worker and the receiver"
    )
    return [Finding("SMS API", "ok", text)]


async def check_answers(set_up: SetUp) -> list[Finding]:
    """Warn of HTML answers that the worker on this computer counted as sent."""
    settings = set_up.settings
    if "worker" not in set_up.roles:
        return []
    try:
        async with open_client() as client:
            scrape = await read_metrics(client, local_port(settings.admin))
    except BridgeError:
        return []
    # A worker of another queue may have another service.
    is_ours = any(scrape.samples("sms_bridge_worker_consumer_up", queue=settings.worker.queue))
    pages = int(scrape.total("sms_bridge_worker_provider_pages_total")) if is_ours else 0
    if not pages:
        return []
    text = (
        f"{pages} of its answers to the worker on this computer were HTML pages with a 2xx status, "
        "which count as sent"
    )
    fix = (
        "check sms_api.base_url and sms_api.path; if they are right, describe an acceptance in "
        "sms_api.response.accepted"
    )
    return [Finding("SMS API", "warn", text, fix)]


async def check_webhooks(set_up: SetUp) -> list[Finding]:
    """Warn of endpoints of the receiver on this computer that refuse every webhook."""
    port = local_port(set_up.settings.admin)
    if "webhook" not in set_up.roles or port.port == 0:
        return []
    try:
        async with open_client() as client:
            health = await read_health(client, port)
    except BridgeError:
        return []
    return [
        Finding(
            one.endpoint,
            "warn",
            f"every webhook of the last hour was refused, {one.refused} of them ({one.why})",
            _REFUSED_FIXES.get(one.why, _REFUSED_FIXES["mismatch"]).format(endpoint=one.endpoint),
        )
        for one in (() if health.webhook is None else health.webhook.refused)
    ]
