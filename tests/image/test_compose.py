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
from bridge.topology.declarations import bridge_topology
from tests.chart.promql import promtool
from tests.image.dockerfile import PROJECT

TEXT = (PROJECT / "compose.yaml").read_text()
COMPOSE = yaml.safe_load(TEXT)
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
ROLES: tuple[Role, ...] = ("worker", "webhook")
OURS = (*ROLES, "sandbox")


def settings(role: str) -> Settings:
    return load_settings(None, SERVICES[role]["environment"])


def content(name: str) -> Any:
    return yaml.safe_load(COMPOSE["configs"][name]["content"])


def test_it_fits_the_specification() -> None:
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
def test_its_ports_and_mounts_are_there(name: str) -> None:
    """Every port listens on this computer alone, under its own number, and is in use.

    The addresses that the file tells people to open are among them, and every mount exists.
    """
    listening = {
        "rabbitmq": {5672, 15672},
        "sandbox": {8025},
        "worker": {settings("worker").admin.port},
        "webhook": {settings("webhook").webhook.port},
        "prometheus": {9090},
        "grafana": {3000},
    }
    told = set(re.findall(r"http://localhost:(\d+)", TEXT))
    published = {p.split(":")[1] for s in SERVICES.values() for p in s.get("ports", [])}
    assert told == {"8025", "3000", "9090", "15672"}
    assert told <= published
    for each in SERVICES[name].get("ports", []):
        address, outside, inside = each.split(":")
        assert address == "127.0.0.1"
        assert outside == inside
        assert int(inside) in listening[name]
    for volume in SERVICES[name].get("volumes", []):
        source, _, rest = volume.partition(":")
        if source.startswith("."):
            assert (PROJECT / source).exists()
            assert rest.endswith(":ro")
        else:
            assert source in COMPOSE["volumes"]


@pytest.mark.parametrize("name", OURS)
def test_the_bridge_runs_as_it_does_in_kubernetes(name: str) -> None:
    service = SERVICES[name]
    command, *words = service["command"]
    known = typer.main.get_command(cli).commands[command]  # type: ignore[attr-defined]
    options = {option for parameter in known.params for option in parameter.opts}

    assert {word.partition("=")[0] for word in words} <= options
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert [place.partition(":")[0] for place in service["tmpfs"]] == ["/tmp"]
    assert service["build"] == "."


@pytest.mark.parametrize("role", ROLES)
def test_a_role_has_the_settings_that_it_needs(role: str) -> None:
    """The bridge accepts the variables, and takes the broker's own user."""
    loaded = settings(role)
    (user,) = content("rabbitmq-definitions")["users"]
    password = loaded.rabbitmq.password
    (url,) = loaded.rabbitmq.url

    assert url.get_secret_value() == "amqp://rabbitmq:5672/"
    assert loaded.rabbitmq.username == user["name"]
    assert password is not None
    assert password.get_secret_value() == user["password"]


def test_the_broker_drops_no_message_that_came_back_often() -> None:
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
    prometheus = content("prometheus")
    jobs = {job["job_name"]: job["static_configs"] for job in prometheus["scrape_configs"]}
    mounted = {v.split(":")[1] for v in SERVICES["prometheus"]["volumes"]}

    # The alerts keep everything apart by namespace and job, which a cluster sets by itself.
    assert jobs == {
        f"sms-bridge-{role}": [
            {"targets": [f"{role}:{settings(role).admin.port}"], "labels": {"namespace": "compose"}}
        ]
        for role in ROLES
    }
    assert set(prometheus["rule_files"]) <= mounted


@pytest.mark.slow
def test_prometheus_accepts_its_configuration(tmp_path: Path) -> None:
    """Every key is one that Prometheus knows, and so is every rule that it loads."""
    prometheus = content("prometheus")
    (source,) = (
        volume.split(":")[0]
        for volume in SERVICES["prometheus"]["volumes"]
        if volume.split(":")[1] in prometheus["rule_files"]
    )
    file = tmp_path / "prometheus.yml"
    file.write_text(yaml.safe_dump(prometheus | {"rule_files": [str(PROJECT / source)]}))
    done = promtool("check", "config", file)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 rule files found" in done.stdout


def test_grafana_shows_the_dashboards() -> None:
    (provider,) = content("grafana-dashboards")["providers"]
    (source,) = content("grafana-datasources")["datasources"]
    (volume,) = SERVICES["grafana"]["volumes"]
    folder, target, _ = volume.split(":")
    home = Path(SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])

    assert provider["options"]["path"] == target == str(home.parent)
    assert (PROJECT / folder / home.name).exists()
    assert source["url"] == "http://prometheus:9090"
