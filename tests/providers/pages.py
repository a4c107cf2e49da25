"""Generates parts of docs/providers: requests, answers, webhooks and the index.

python -m tests.providers.pages
"""

import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

from bridge.admin.rendering import Rendering, render
from bridge.config import EndpointSettings, Settings, WebhookSettings, load_settings
from bridge.config.presets import PRESETS, Preset, documented_webhooks, webhook_repeats
from bridge.webhook.normalize import EventFields, normalize
from bridge.webhook.signatures.schemes import SCHEMES
from bridge.webhook.signatures.verify import Verified
from tests import markdown
from tests.markdown import table

PROJECT: Final = Path(__file__).parents[2]
FOLDER: Final = PROJECT / "docs" / "providers"
INDEX: Final = FOLDER / "README.md"
# Each preset has a page, except `generic`, which the other documents describe.
SERVICES: Final = tuple(preset for preset in PRESETS if preset != "generic")
# The number is reserved for fiction.
BODY: Final = json.dumps({"to": "+447700900123", "from": "Acme", "text": "Your code is 1234"})
# Package of each service's official client, with which tests/services tests the preset.
CLIENTS: Final[dict[Preset, str]] = {
    "twilio": "twilio",
    "vonage": "vonage",
    "vonage-sms": "vonage",
    "telnyx": "telnyx",
    "messagebird": "messagebird",
    "sinch": "sinch",
    "plivo": "plivo",
    "infobip": "infobip-api-python-client",
    "android-sms-gateway": "android-sms-gateway",
}
_BLOCK = re.compile(r"^```yaml\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def page_of(preset: Preset) -> Path:
    """Return the page of a preset's service."""
    return FOLDER / f"{preset}.md"


def yaml_blocks(text: str) -> list[str]:
    """Return the YAML blocks of a page, each a part of config.yaml."""
    return _BLOCK.findall(text)


def settings_of(block: str, folder: Path) -> Settings:
    """Load a block as the bridge does, with its secret files in a temporary folder."""
    for name in re.findall(r"/run/secrets/([a-z-]+)", block):
        (folder / name).write_text("a-secret", encoding="utf-8")
    config = folder / "config.yaml"
    config.write_text(block.replace("/run/secrets", str(folder)), encoding="utf-8")
    return load_settings(config, {})


def title_of(preset: Preset) -> str:
    """Return the service's name on a page."""
    return page_of(preset).read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")


def rendering_of(preset: Preset, folder: Path) -> Rendering:
    """Render the example with the settings of a page."""
    first = yaml_blocks(page_of(preset).read_text(encoding="utf-8"))[0]
    return render(settings_of(first, folder), BODY)


def request_part(rendering: Rendering) -> str:
    """Show the request, as `sms-bridge check --render` prints it."""
    headers = (f"{name}: {value}" for name, value in rendering.headers.items())
    lines = ["```text", f"POST {rendering.url}", *headers, "", rendering.body, "```"]
    return "\n".join(lines)


def answers_part(rendering: Rendering, title: str) -> str:
    """Make the table of documented answers, with a link to other error codes."""
    shown = table(
        ("Meaning", "Status", "Code", "Result"),
        (
            (str(answer.means), str(answer.status), as_code(answer.code), in_words(answer.becomes))
            for answer in rendering.answers
            if answer.status is not None
        ),
    )
    if all(answer.status is not None for answer in rendering.answers):
        return shown
    anchor = re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")
    service = title.partition(" (")[0]
    return f"{shown}\n\nFor more {service} codes, see [Error codes](../error-codes.md#{anchor})."


def in_words(becomes: str) -> str:
    """Format a result as text. The command puts the reason after a colon."""
    text = re.sub(r": (\w+)$", r" with the reason `\1`", becomes)
    return text[:1].upper() + text[1:].replace(", then dead", ", then a dead")


def webhooks_part(preset: Preset) -> str:
    """Make the table of documented webhooks and their events."""
    endpoint = EndpointSettings.model_validate({"path": "/webhooks", "preset": preset})
    return table(
        ("Event", "Service's type", "Published as"),
        (_event_row(example, endpoint) for example in documented_webhooks(preset)),
    )


def _event_row(example: Mapping[str, Any], endpoint: EndpointSettings) -> tuple[str, ...]:
    content_type = example.get("content_type", "application/json")
    is_form = content_type != "application/json"
    text = urlencode(example["body"]) if is_form else json.dumps(example["body"])
    events = normalize(
        text.encode(),
        content_type,
        Verified(0, None, None),
        EventFields(endpoint),
        now=0,
    )
    return (
        example["means"],
        as_code(example["type"]),
        ", ".join(as_code(event.type) for event in events),
    )


def index_part(folder: Path) -> str:
    return table(
        (
            "Service",
            "Preset",
            "Requests compared with",
            "Idempotency key",
            "Webhook signature",
            "Receipts",
            "Opt-out",
            "Media",
        ),
        (_row(preset, folder) for preset in SERVICES),
    )


def repeats_part() -> str:
    """Make the table of the services' repeats of webhooks that are not answered 200."""
    return table(
        ("Service", "When the service repeats a webhook", "How the bridge responds"),
        (_repeats_row(preset) for preset in SERVICES),
    )


def _repeats_row(preset: Preset) -> tuple[str, ...]:
    endpoint = EndpointSettings.model_validate({"path": "/webhooks", "preset": preset})
    seconds = endpoint.response_timeout_seconds or WebhookSettings().response_timeout_seconds
    ours = f"Within {seconds:g} s"
    if endpoint.unsigned != 401:
        ours += ", with a 503 if the signature is missing, unreadable or stale"
    return (f"[{title_of(preset)}]({page_of(preset).name})", webhook_repeats(preset), f"{ours}.")


def _row(preset: Preset, folder: Path) -> tuple[str, ...]:
    first = yaml_blocks(page_of(preset).read_text(encoding="utf-8"))[0]
    api = settings_of(first, folder).sms_api
    client = CLIENTS.get(preset)
    endpoint = EndpointSettings.model_validate({"path": "/webhooks", "preset": preset})
    return (
        f"[{title_of(preset)}]({page_of(preset).name})",
        f"`{preset}`",
        f"`{client}` {_locked_version(client)}" if client else "the server's source code",
        f"`{api.idempotency}`" if api.knows_repeats else "none",
        _signature(endpoint),
        _receipts(preset, endpoint),
        "yes" if endpoint.opt_out.keyword_pointers else "-",
        "yes" if endpoint.message.media else "-",
    )


def _signature(endpoint: EndpointSettings) -> str:
    if not endpoint.knows_signature:
        return "none"
    scheme = SCHEMES[endpoint.signature.preset]
    is_public = scheme.algorithm == "ed25519"
    kind = "Ed25519" if is_public else f"HMAC-{scheme.algorithm.upper()}"
    token = "JWT, " if scheme.format == "jwt" else ""
    return f"{token}{kind} in `{scheme.header}`"


def _receipts(preset: Preset, endpoint: EndpointSettings) -> str:
    if not endpoint.receipts.status_pointers:
        return "none"
    return "by `message_id`" if _returns_our_id(preset) else "by `provider_id`"


def _returns_our_id(preset: Preset) -> bool:
    return any("message_id" in example for example in documented_webhooks(preset))


def _locked_version(package: str) -> str:
    lock = tomllib.loads((PROJECT / "uv.lock").read_text(encoding="utf-8"))
    (version,) = (one["version"] for one in lock["package"] if one["name"] == package)
    return str(version)


def as_code(text: str | None) -> str:
    """Format a code, or its absence."""
    return f"`{text}`" if text else "-"


def with_part(text: str, name: str, part: str) -> str:
    """Replace the generated part of a page."""
    return markdown.with_part(text, name, part, target="provider-pages")


def pages(folder: Path) -> dict[Path, str]:
    """Generate every page, by path. `folder` is for secret files."""
    made = {}
    for preset in SERVICES:
        rendering = rendering_of(preset, folder)
        text = page_of(preset).read_text(encoding="utf-8")
        text = with_part(text, "request", request_part(rendering))
        text = with_part(text, "answers", answers_part(rendering, title_of(preset)))
        made[page_of(preset)] = with_part(text, "webhooks", webhooks_part(preset))
    index = INDEX.read_text(encoding="utf-8")
    index = with_part(index, "services", index_part(folder))
    return made | {INDEX: with_part(index, "repeats", repeats_part())}


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as secrets:
        for path, text in pages(Path(secrets)).items():
            path.write_text(text, encoding="utf-8")
