"""The sandbox that the chart brings to staging: what the worker sends to, and what it signs."""

import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from bridge.config import load_settings
from bridge.webhook.endpoint import Endpoint
from bridge.webhook.signatures.verify import verify
from tests.chart.rendering import (
    CI,
    MOUNTED,
    RenderError,
    Values,
    config,
    container,
    deployment,
    merged,
    nested,
    of_kind,
    render,
    secret_files,
)

SANDBOX = CI["sandbox"]
NAME = "rel-sms-bridge-sandbox"
SECRET = "a-webhook-secret"


def test_it_stands_above_an_existing_config_map() -> None:
    values = merged(CI["existing"], nested("smsApi", {"baseUrl": "", "preset": ""}))
    on = merged(values, nested("sandbox.enabled", True), nested("webhook.endpoints", []))
    variables = {one["name"]: one.get("value") for one in container(on, "worker")["env"]}

    assert variables["SMS_BRIDGE_SMS_API__BASE_URL"] == f"http://{NAME}:8025"
    assert variables["SMS_BRIDGE_SMS_API__PRESET"] == "generic"


def test_it_mounts_the_webhook_secret_alone() -> None:
    values = merged(
        SANDBOX, nested("webhookSecrets", {"existingSecret": "hooks", "secretKeys": ["a", "b"]})
    )
    pod = deployment(values, "sandbox")["spec"]["template"]
    own = secret_files(pod)
    webhook = secret_files(deployment(values, "webhook")["spec"]["template"])

    assert own == {f"{MOUNTED}/secrets/webhook/a": "hooks/a"}
    assert own.items() <= webhook.items()


def test_without_the_webhook_role_it_signs_nothing() -> None:
    """There is nobody to call, so it mounts no Secret."""
    values = merged(SANDBOX, nested("webhook.enabled", False), nested("webhookSecrets", {}))
    words = " ".join(container(values, "sandbox")["args"])

    assert "webhook" not in words
    assert secret_files(deployment(values, "sandbox")["spec"]["template"]) == {}


class _Receiver(BaseHTTPRequestHandler):
    """Keeps what is posted to it."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.posted.append((self.path, list(self.headers.items()), body))  # type: ignore[attr-defined]
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_args: Any) -> None:
        """Say nothing."""


@contextmanager
def receiver() -> Iterator[HTTPServer]:
    """Run something that is called as the webhook role would be."""
    with HTTPServer(("127.0.0.1", 0), _Receiver) as server:
        server.posted = []  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def sandbox(folder: Path, port: int) -> Iterator[str]:
    """Run what the chart would start, on this computer; yield its address."""
    _, *words = container(SANDBOX, "sandbox")["args"]
    words = [word.replace(MOUNTED, str(folder)) for word in words]
    words = [
        re.sub("^--port=.*", "--port=0", word.replace("=0.0.0.0", "=127.0.0.1")) for word in words
    ]
    words = [
        re.sub("^(--webhook-url=http://)[^/]*", rf"\g<1>127.0.0.1:{port}", word) for word in words
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "bridge", "sandbox", *words], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        yield process.stdout.readline().removeprefix("sandbox: ").strip()
    finally:
        process.terminate()
        process.communicate(timeout=30)


def test_the_webhook_role_takes_what_it_signs(tmp_path: Path) -> None:
    for path in secret_files(deployment(SANDBOX, "webhook")["spec"]["template"]):
        file = tmp_path / Path(path).relative_to(MOUNTED)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{SECRET}\n")
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config(SANDBOX)).replace(MOUNTED, str(tmp_path)))
    endpoint = Endpoint(load_settings(file, {}).webhook)
    with receiver() as called, sandbox(tmp_path, called.server_address[1]) as url:
        reply = httpx.post(
            f"{url}/sandbox/replies", json={"from": "+447700900123", "text": "YES"}, timeout=30
        )
        hosts = {
            host: httpx.get(f"{url}/sandbox/messages", headers={"Host": host}).status_code
            for host in (f"{NAME}:8025", f"{NAME}.sms.svc:8025", "127.0.0.1:8025", "a.example")
        }
    ((path, headers, body),) = called.posted  # type: ignore[attr-defined]

    assert reply.json() == {"answers": [200]}
    assert path == endpoint.path
    assert b"YES" in body
    raw = [(name.lower().encode(), value.encode()) for name, value in headers]
    verify(endpoint.scheme, endpoint.keys, raw, body, now=time.time())
    # By its names in the cluster, and by none of another site's.
    assert hosts == {
        f"{NAME}:8025": 200,
        f"{NAME}.sms.svc:8025": 200,
        "127.0.0.1:8025": 200,
        "a.example": 403,
    }


def test_policies_keep_it_inside() -> None:
    """Worker and toolbox reach it and no real service; it reaches the webhook role alone."""
    manifests = render(merged(SANDBOX, nested("toolbox.enabled", True)))
    policies = {
        name.removeprefix("rel-sms-bridge-"): found["spec"]
        for name, found in of_kind(manifests, "NetworkPolicy").items()
    }
    labels = {name: spec["podSelector"]["matchLabels"] for name, spec in policies.items()}

    def peers(rule: dict[str, Any], way: str) -> list[dict[str, str]]:
        return [peer.get("podSelector", {}).get("matchLabels") for peer in rule[way]]

    for sender in ("worker", "toolbox"):
        assert policies[sender]["egress"][-1]["ports"] == [{"port": 8025}]
        assert peers(policies[sender]["egress"][-1], "to") == [labels["sandbox"]]
        assert "ipBlock" not in str(policies[sender])
    (asked,) = policies["sandbox"]["ingress"]
    assert peers(asked, "from") == [labels["worker"], labels["toolbox"], {"app": "login-tests"}]
    assert policies["sandbox"]["egress"][-1]["ports"] == [{"port": 8080}]
    assert peers(policies["sandbox"]["egress"][-1], "to") == [labels["webhook"]]
    assert labels["sandbox"] in peers(policies["webhook"]["ingress"][1], "from")


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (
            nested("smsApi.baseUrl", "https://sms.example.com"),
            "smsApi.baseUrl (https://sms.example.com), a real service, are both set: remove",
        ),
        (
            nested("smsApi.preset", "telnyx"),
            "the preset telnyx (https://api.telnyx.com), a real service, are both set: remove",
        ),
        (nested("config.sms_api.preset", "infobip"), "the preset infobip, a real service, are"),
        (
            nested("config.sms_api.proxy", "http://proxy:3128"),
            "and config.sms_api.proxy are both set",
        ),
        (
            nested("config.webhook.signature", {"preset": "github"}),
            "and config.webhook.signature are both set: the sandbox signs as generic",
        ),
        (nested("config.webhook.preset", "twilio"), "and config.webhook.preset are both set"),
        (
            merged(
                nested("webhookSecrets.existingSecret", ""),
                nested("webhook.endpoints", [{"path": "/a", "existingSecret": "a"}]),
            ),
            "sandbox.enabled is true but webhookSecrets.existingSecret is empty",
        ),
    ],
)
def test_it_is_refused_beside_a_real_service(values: Values, sentence: str) -> None:
    """One sentence says which of the two to remove."""
    with pytest.raises(RenderError) as caught:
        render(merged(SANDBOX, values))

    assert sentence in str(caught.value)
    assert str(caught.value).count("\n- ") == 1
