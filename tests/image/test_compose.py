"""compose.yaml fits the Compose specification, and what it says about the bridge is true."""

import json
import re
from pathlib import Path
from typing import Any

import compose_spec
import pytest
import typer
import yaml

from bridge.__main__ import app as cli
from bridge.app import CLOSE_SECONDS
from bridge.config import Role, Settings, load_settings
from bridge.topology import bridge_topology
from tests.image.dockerfile import PROJECT

TEXT = (PROJECT / "compose.yaml").read_text()
COMPOSE = yaml.safe_load(TEXT)
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
ROLES: tuple[Role, ...] = ("worker", "webhook")
OURS = (*ROLES, "sandbox")


def settings(role: str) -> Settings:
    """Load the settings that a service gives the bridge."""
    return load_settings(None, SERVICES[role]["environment"])


def content(name: str) -> Any:
    """Read a configuration that stands in the file."""
    return yaml.safe_load(COMPOSE["configs"][name]["content"])


def test_it_fits_the_specification() -> None:
    """Every key is one of the Compose specification, and every name that is used exists."""
    # With the anchors resolved, which the library does not do.
    compose = compose_spec.PyCompose.from_yaml(json.dumps(COMPOSE))
    compose.validate()

    assert set(compose.service_names()) == {
        *OURS,
        *("rabbitmq", "prometheus", "grafana"),
    }
    with pytest.raises(ValueError, match="imag"):
        compose_spec.PyCompose.from_yaml("services:\n  a:\n    imag: x\n")


@pytest.mark.parametrize("name", SERVICES)
def test_every_file_that_is_mounted_exists(name: str) -> None:
    """A folder or file of the project that a service mounts is there, and cannot be written."""
    for volume in SERVICES[name].get("volumes", []):
        source, _, rest = volume.partition(":")
        if source.startswith("."):
            assert (PROJECT / source).exists()
            assert rest.endswith(":ro")
        else:
            assert source in COMPOSE["volumes"]


@pytest.mark.parametrize("name", SERVICES)
def test_nobody_else_reaches_it(name: str) -> None:
    """Every port listens on this computer alone."""
    assert all(port.startswith("127.0.0.1:") for port in SERVICES[name].get("ports", []))


@pytest.mark.parametrize("name", OURS)
def test_the_bridge_runs_as_it_does_in_kubernetes(name: str) -> None:
    """Its commands and options exist, its root is read-only, and it has no capability."""
    service = SERVICES[name]
    command, *words = service["command"]
    known = typer.main.get_command(cli).commands[command]  # type: ignore[attr-defined]
    options = {option for parameter in known.params for option in parameter.opts}

    assert {word.partition("=")[0] for word in words} <= options
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["build"] == "."


@pytest.mark.parametrize("role", ROLES)
def test_a_role_has_the_settings_that_it_needs(role: str) -> None:
    """The bridge accepts the variables, and takes the broker's own user."""
    loaded = settings(role)
    (user,) = content("rabbitmq-definitions")["users"]
    password = loaded.rabbitmq.password

    assert loaded.rabbitmq.username == user["name"]
    assert password is not None
    assert password.get_secret_value() == user["password"]


def test_the_broker_drops_no_message_that_came_back_often() -> None:
    """RabbitMQ 4's limit of 20 deliveries is lifted from every queue, from the first start on."""
    definitions = content("rabbitmq-definitions")
    (policy,) = definitions["policies"]
    topology = bridge_topology(settings("worker"), ROLES)
    mounted = {
        config["target"]: COMPOSE["configs"][config["source"]]["content"]
        for config in SERVICES["rabbitmq"]["configs"]
    }
    (setting,) = [text for path, text in mounted.items() if path.endswith(".conf")]
    name, _, file = setting.strip().partition(" = ")

    assert policy["definition"] == {"delivery-limit": -1}
    assert policy["apply-to"] == "queues"
    assert all(re.search(policy["pattern"], queue.name) for queue in topology.queues)
    assert name == "load_definitions"
    assert file in mounted


def test_worker_sandbox_and_webhook_know_each_other() -> None:
    """The worker calls the sandbox with its key; the sandbox signs with the webhook's secret."""
    options = dict(
        word.removeprefix("--").split("=") for word in SERVICES["sandbox"]["command"][1:]
    )
    worker, webhook = settings("worker"), settings("webhook")
    key = worker.sms_api.key

    assert key is not None
    assert key.get_secret_value() == options["key"]
    assert worker.sms_api.base_url == f"http://sandbox:{options['port']}"
    assert options["webhook-url"] == f"http://webhook:{webhook.webhook.port}{webhook.webhook.path}"
    assert json.loads(SERVICES["webhook"]["environment"]["SMS_BRIDGE_WEBHOOK__SECRETS"]) == [
        options["webhook-secret"]
    ]


@pytest.mark.parametrize("role", ROLES)
def test_a_role_has_the_time_to_stop(role: str) -> None:
    """Docker waits longer than the drain and the closing take."""
    seconds = float(SERVICES[role]["stop_grace_period"].removesuffix("s"))
    loaded = settings(role)

    assert seconds > getattr(loaded, role).shutdown_timeout_seconds + CLOSE_SECONDS


def test_prometheus_reads_both_roles_and_the_alerts() -> None:
    """Prometheus scrapes the admin port of each role, and loads the chart's alerts."""
    prometheus = content("prometheus")
    targets = {
        t
        for job in prometheus["scrape_configs"]
        for s in job["static_configs"]
        for t in s["targets"]
    }
    mounted = {v.split(":")[1] for v in SERVICES["prometheus"]["volumes"]}

    assert targets == {f"{role}:{settings(role).admin.port}" for role in ROLES}
    assert set(prometheus["rule_files"]) <= mounted


def test_grafana_shows_the_dashboards() -> None:
    """Grafana reads its dashboards where they are mounted, and Prometheus where it is."""
    (provider,) = content("grafana-dashboards")["providers"]
    (source,) = content("grafana-datasources")["datasources"]
    (volume,) = SERVICES["grafana"]["volumes"]
    folder, target, _ = volume.split(":")
    home = Path(SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])

    assert provider["options"]["path"] == target == str(home.parent)
    assert (PROJECT / folder / home.name).exists()
    assert source["url"] == "http://prometheus:9090"
