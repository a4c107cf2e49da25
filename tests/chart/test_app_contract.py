"""What the manifests say about the app is true: commands, settings, files, ports, names."""

import re
import shlex
import shutil
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from bridge.__main__ import app as cli
from bridge.admin import topology_formats
from bridge.config import Role, Settings, load_settings
from bridge.config.settings import known_keys
from bridge.http.admin_port import Health, admin_handler
from bridge.http.messages import Request, Response
from bridge.start_checks import check_roles
from bridge.telemetry.metrics import BridgeMetrics, new_registry
from bridge.topology.declarations import (
    Topology,
    bridge_topology,
    dead_queue,
    request_queues,
    retry_queues,
    webhook_topology,
    worker_topology,
    workers_exchange,
)
from bridge.topology.paused_queue import paused_queue
from tests.certificates import make_certificate
from tests.chart.generate import documented_values
from tests.chart.rendering import (
    CHART,
    CI,
    HELM,
    MINIMAL,
    MOUNTED,
    ROLES,
    Manifest,
    Values,
    config,
    container,
    deployment,
    environment,
    merged,
    nested,
    of_kind,
    render,
    render_files,
    secret_files,
)

# What a cluster operator's Secret holds of its broker's address.
DEFAULT_USER = {
    "rabbitmq-default-user/host": "rabbitmq.messaging.svc",
    "rabbitmq-default-user/port": "5672",
}


def settings_from(
    values: Values, folder: Path, role: str = "worker", given: str | None = None
) -> Settings:
    """Load what is rendered as the app does, its files below a folder of ours.

    `given` is the file of a ConfigMap that is not the chart's.
    """
    path = folder / "config.yaml"
    text = yaml.safe_dump(config(values)) if given is None else given
    path.write_text(text.replace(MOUNTED, str(folder)))
    variables = environment(values, role, DEFAULT_USER)
    return load_settings(
        path, {name: value.replace(MOUNTED, str(folder)) for name, value in variables.items()}
    )


def given_file(values: Values) -> str | None:
    return "worker: {concurrency: 7}" if "existingConfigMap" in values else None


# Commands, variables, probes


@pytest.mark.parametrize("role", ROLES)
def test_further_arguments_follow_the_role(role: str) -> None:
    (example,) = {
        text
        for path, _, text in documented_values()
        if path.endswith(".args")
        for text in re.findall(r"such as `\[(.*)\]`", text)
    }
    words = example.split(", ")
    found = container(merged(MINIMAL, nested(f"{role}.args", words)), role)
    commands = typer.main.get_command(cli).commands  # type: ignore[attr-defined]
    options = {option for parameter in commands[role].params for option in parameter.opts}

    assert found["args"] == [role, *words]
    assert {word for word in words if word.startswith("-")} <= options


@pytest.mark.skipif(HELM is not None, reason="a helm program prints notes to a cluster only")
def test_the_notes_commands_exist() -> None:
    commands = typer.main.get_command(cli).commands  # type: ignore[attr-defined]
    for values in CI.values():
        notes = render_files(values)["sms-bridge/templates/NOTES.txt"]
        for line in re.findall(r"-- sms-bridge (.*)", notes):
            name, *words = shlex.split(line)
            options = {option for p in commands[name].params for option in p.opts}

            assert {word for word in words if word.startswith("--")} <= options


@pytest.mark.parametrize("role", ROLES)
async def test_probes_and_scrapes_ask_paths_that_the_admin_port_has(role: str) -> None:
    found = container(MINIMAL, role)
    asked = {name: found[name]["httpGet"] for name in found if name.endswith("Probe")}
    ports = {port["name"]: port["containerPort"] for port in found["ports"]}
    monitor = merged(MINIMAL, nested("podMonitor.enabled", True))
    (endpoint,) = of_kind(render(monitor), "PodMonitor")[f"rel-sms-bridge-{role}"]["spec"][
        "podMetricsEndpoints"
    ]
    registry = new_registry()
    metrics = BridgeMetrics(registry, component=role, version="", revision="", exchanges=())
    answer = admin_handler(Health(metrics), registry)
    paths = {probe["path"] for probe in asked.values()} | {endpoint["path"]}

    async def status(path: str) -> int:
        given = answer(Request("GET", path, b"", [], b""))
        return (given if isinstance(given, Response) else await given).status

    statuses = {path: await status(path) for path in paths}

    assert asked == {
        "startupProbe": {"path": "/startupz", "port": "admin"},
        "livenessProbe": {"path": "/livez", "port": "admin"},
        "readinessProbe": {"path": "/readyz", "port": "admin"},
    }
    assert statuses == dict.fromkeys(paths, 200)
    assert ports["admin"] == config(MINIMAL)["admin"]["port"] == 9090
    assert endpoint["port"] == "admin"


# Settings


@pytest.mark.parametrize(("name", "values"), CI.items(), ids=CI)
def test_the_app_starts_with_the_config(name: str, values: Values, tmp_path: Path) -> None:
    certificate = make_certificate(tmp_path)
    authority = certificate.read_bytes()
    pair = {".crt": authority, ".key": certificate.with_name("key.pem").read_bytes()}
    enabled = [role for role in ROLES if values.get(role, {}).get("enabled", True)]
    for component in (*enabled, "toolbox"):
        # Operators' commands are those of every role that there is.
        roles = [role for role in enabled if component in {role, "toolbox"}]
        with_toolbox = merged(values, nested("toolbox.enabled", True))
        settings = settings_from(with_toolbox, tmp_path, component, given_file(values))
        shutil.rmtree(tmp_path / "secrets", ignore_errors=True)
        for path in secret_files(deployment(with_toolbox, component)["spec"]["template"]):
            file = tmp_path / Path(path).relative_to(MOUNTED)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(pair.get(file.suffix, b"secret"))

        assert check_roles(settings, roles) == dict.fromkeys(roles)
        assert settings.admin.port == 9090
        assert settings.rabbitmq.username_file == tmp_path / "secrets/rabbitmq/username"
        wanted = "verify" if name in {"full", "operators"} else "declare"
        assert settings.rabbitmq.topology == wanted


@pytest.mark.parametrize(
    ("rabbitmq", "url"),
    [
        (
            {"host": "", "secretKeys": {"host": "host"}},
            "amqp://rabbitmq.messaging.svc:5672/%2F",
        ),
        ({"secretKeys": {"port": "port"}}, "amqp://rabbitmq:5672/%2F"),
        (
            {"host": "", "vhost": "$(X)", "tls": {"enabled": True}, "secretKeys": {"host": "host"}},
            "amqps://rabbitmq.messaging.svc:5671/%24%28X%29",
        ),
    ],
    ids=["host only", "port only", "TLS"],
)
def test_either_half_of_the_address_may_come_from_the_secret(
    rabbitmq: Values, url: str, tmp_path: Path
) -> None:
    existing = {"existingSecret": "rabbitmq-default-user"}
    values = merged(MINIMAL, {"rabbitmq": rabbitmq | existing})
    settings = settings_from(values, tmp_path)

    assert [url.get_secret_value() for url in settings.rabbitmq.url] == [url]
    assert "url" not in config(values)["rabbitmq"]


@pytest.mark.parametrize(
    ("over", "urls"),
    [
        ({}, ["amqp://one:5672/sms", "amqp://[2001:db8::2]:5672/sms"]),
        (
            {"port": 5674, "tls": {"enabled": True}},
            ["amqps://one:5674/sms", "amqps://[2001:db8::2]:5674/sms"],
        ),
        (
            {"existingSecret": "rabbitmq-default-user", "secretKeys": {"port": "port"}},
            ["amqp://one:5672/sms", "amqp://[2001:db8::2]:5672/sms"],
        ),
    ],
    ids=["plain", "TLS", "port of a Secret"],
)
@pytest.mark.parametrize("existing", [None, "mine"])
def test_the_hosts_of_a_cluster_are_all_tried(
    over: Values, urls: list[str], existing: str | None, tmp_path: Path
) -> None:
    """Each of rabbitmq.hosts is an address that the app tries, in their order."""
    rabbitmq = {"host": "", "hosts": ["one", "[2001:db8::2]"], "vhost": "sms", **over}
    values = merged(MINIMAL, {"rabbitmq": rabbitmq})
    if existing:
        values["existingConfigMap"] = existing
    for role in ROLES:
        settings = settings_from(values, tmp_path, role, "" if existing else None)

        assert [url.get_secret_value() for url in settings.rabbitmq.url] == urls


def test_values_stand_above_an_existing_config_map(tmp_path: Path) -> None:
    values = merged(
        {key: value for key, value in CI["full"].items() if key != "config"},
        {"existingConfigMap": "mine"},
    )
    url = "https://sms.example.com/webhooks"  # none is derived with a file
    file = "worker: {concurrency: 7}\nadmin: {port: 1}\nrabbitmq: {heartbeat_seconds: 20}\n"
    file += f"webhook: {{public_url: '{url}'}}\n"
    for role in ROLES:
        ours = {key: value for key, value in values.items() if key != "existingConfigMap"}
        ours["config"] = {"worker": {"concurrency": 7}, "rabbitmq": {"heartbeat_seconds": 20}}
        ours["config"]["webhook"] = {"public_url": url}
        mine = settings_from(values, tmp_path, role, file)
        same = settings_from(ours, tmp_path, role)
        of_role = {"worker": ("worker", "sms_api"), "webhook": ("webhook",)}[role]

        assert "rel-sms-bridge" not in of_kind(render(values), "ConfigMap")
        for section in ("rabbitmq", "admin", "log", *of_role):
            assert getattr(mine, section) == getattr(same, section)


def test_beside_an_existing_config_map_the_worker_knows_the_public_url(tmp_path: Path) -> None:
    endpoint = {"path": "/t", "preset": "twilio", "existingSecret": "s"}
    values = merged(
        MINIMAL,
        nested("existingConfigMap", "mine"),
        nested("smsApi", {"preset": "twilio", "account": "an-account"}),
        nested("webhook.endpoints", [endpoint]),
        nested("ingress", {"enabled": True, "hosts": ["sms.example.com"]}),
    )
    # Settings of the default endpoint are refused if its secrets are not known.
    settings = settings_from(values, tmp_path, "worker", "webhook: {preset: sinch}")

    assert settings.callback_url == "https://sms.example.com/t"


def test_a_service_without_a_login_needs_no_secret(tmp_path: Path) -> None:
    """Where nothing is sent to log in, no key is asked for, mounted or named."""
    values = merged(
        MINIMAL,
        nested("smsApi.existingSecret", ""),
        nested("config.sms_api.auth.scheme", "none"),
    )
    settings = settings_from(values, tmp_path)
    mounted = secret_files(deployment(values, "worker")["spec"]["template"])

    assert settings.sms_api.key_file is None
    assert not [path for path in mounted if "sms-api" in path]


def test_a_key_may_stand_in_the_body(tmp_path: Path) -> None:
    fields = {"/to": "{to}", "/text": "{text}", "/password": "{secret}"}
    values = merged(
        MINIMAL,
        nested("config.sms_api", {"auth": {"scheme": "none"}, "request": {"fields": fields}}),
    )
    settings = settings_from(values, tmp_path)
    mounted = secret_files(deployment(values, "worker")["spec"]["template"])

    assert settings.sms_api.key_file == tmp_path / "secrets/sms-api/key"
    assert mounted[f"{MOUNTED}/secrets/sms-api/key"] == "sms-bridge/key"


@pytest.mark.parametrize(
    ("rabbitmq", "url"),
    [
        ({}, "amqp://rabbitmq:5672/%2F"),
        ({"vhost": "sms"}, "amqp://rabbitmq:5672/sms"),
        ({"vhost": "a/b +%"}, "amqp://rabbitmq:5672/a%2Fb%20%2B%25"),
        ({"port": 5673}, "amqp://rabbitmq:5673/%2F"),
        ({"tls": {"enabled": True}}, "amqps://rabbitmq:5671/%2F"),
        ({"tls": {"enabled": True}, "port": 5673}, "amqps://rabbitmq:5673/%2F"),
    ],
)
def test_broker_url(rabbitmq: Values, url: str) -> None:
    """The URL is made of host, port and virtual host, and holds no credentials."""
    assert config(merged(MINIMAL, {"rabbitmq": rabbitmq}))["rabbitmq"]["url"] == url


def test_every_setting_may_be_given_or_has_a_value() -> None:
    schema = yaml.safe_load((CHART / "values.schema.json").read_text())

    def keys(node: dict[str, Any], prefix: str = "", *, in_lists: bool = False) -> Collection[str]:
        found: set[str] = set()
        if "$ref" in node:
            node = schema["definitions"][node["$ref"].rpartition("/")[2]]
        for name, below in node.get("properties", {}).items():
            found |= {prefix + name, *keys(below, f"{prefix}{name}.", in_lists=in_lists)}
        if in_lists and "items" in node:
            found |= set(keys(node["items"], f"{prefix}*.", in_lists=True))
        return found

    own = (CHART / "templates" / "_config.tpl").read_text().partition('"sms-bridge.ownSettings"')[2]
    set_by_chart = yaml.safe_load(own.partition("}}\n")[2].partition("{{- end")[0])
    known = set(known_keys())

    assert keys(schema["properties"]["config"]) == {
        key for key in known if key.partition(".")[0] != "admin"
    }
    assert {f"{s}.{key}" for s, section in set_by_chart.items() for key in section} <= known
    endpoint = schema["properties"]["webhook"]["properties"]["endpoints"]["items"]["properties"]
    below = "webhook.endpoints.*."
    of_endpoint = {k.removeprefix(below) for k in known_keys(in_lists=True) if k.startswith(below)}
    # These are values of the chart.
    assert keys(endpoint["config"], in_lists=True) == of_endpoint - {
        "path",
        "preset",
        "secrets",
        "secret_files",
    }


ENDPOINTS: Values = nested(
    "webhook.endpoints",
    [
        {"path": "/one", "preset": "telnyx", "existingSecret": "one", "secretKeys": ["a", "b"]},
        {"path": "/two", "existingSecret": "two", "config": {"event_type": "order.text"}},
    ],
)


@pytest.mark.parametrize("has_default", [True, False])
@pytest.mark.parametrize("existing", [False, True])
def test_each_endpoint_has_its_own_secrets(
    has_default: bool,  # noqa: FBT001
    existing: bool,  # noqa: FBT001
    tmp_path: Path,
) -> None:
    values = merged(MINIMAL, ENDPOINTS)
    if not has_default:
        values["webhookSecrets"] = {}
    if existing:
        values["existingConfigMap"] = "mine"
    mounted = secret_files(deployment(values, "webhook")["spec"]["template"])
    settings = settings_from(values, tmp_path, "webhook", "" if existing else None)
    found = {
        endpoint.path: [
            mounted[f"{MOUNTED}/{file.relative_to(tmp_path)}"]
            for file in endpoint.secret_files or ()
        ]
        for endpoint in settings.webhook.all_endpoints
    }
    default = {"/webhooks": ["sms-bridge/current"]} if has_default else {}

    assert found == default | {"/one": ["one/a", "one/b"], "/two": ["two/current"]}
    *_, one, two = settings.webhook.all_endpoints
    assert (one.preset, two.preset, two.event_type) == ("telnyx", "generic", "order.text")
    # No key of a webhook is the worker's.
    worker = secret_files(deployment(values, "worker")["spec"]["template"])
    assert not [path for path in worker if "webhook" in path]


# Topology


def declared(topology: Topology) -> dict[str, dict[str, Any]]:
    """List what the app declares, by kind and name."""
    return {
        **{f"Queue/{queue.name}": queue.arguments for queue in topology.queues},
        **{f"Exchange/{exchange.name}": {"type": "topic"} for exchange in topology.exchanges},
        **{f"Binding/{b.exchange}/{b.queue}/{b.routing_key}": {} for b in topology.bindings},
    }


def created(manifests: list[Manifest]) -> dict[str, dict[str, Any]]:
    queues = [m["spec"] for m in of_kind(manifests, "Queue").values()]
    exchanges = [m["spec"] for m in of_kind(manifests, "Exchange").values()]
    bindings = [m["spec"] for m in of_kind(manifests, "Binding").values()]
    assert all(entity["durable"] for entity in [*queues, *exchanges])
    # The operator gives the type as this argument.
    return {
        **{
            f"Queue/{q['name']}": {"x-queue-type": q["type"], **q.get("arguments", {})}
            for q in queues
        },
        **{f"Exchange/{e['name']}": {"type": e["type"]} for e in exchanges},
        **{f"Binding/{b['source']}/{b['destination']}/{b['routingKey']}": {} for b in bindings},
    }


TOPOLOGIES: dict[str, Values] = {
    "default": {},
    "names": {
        "worker": {"queue": "team.sms", "outcome_exchange": "team.outcome"},
        "webhook": {"exchange": "team.events", "queue": "team.inbox"},
    },
    "receipts of a preset": {
        "worker": {"outcome_exchange": "team.outcome"},
        "webhook": {"preset": "vonage"},
    },
    "receipts of its own": {
        "worker": {"outcome_exchange": "team.outcome"},
        "webhook": {"receipts": {"status_pointers": ["/status"], "delivered": ["yes"]}},
    },
    "delays": {"worker": {"retry_delays": [1, "1.5s", 90, "2m", "150m", "36h", "7d"]}},
    "no queue": {"webhook": {"queue": None}},
    "odd names": {"worker": {"queue": "Team SMS/out"}, "webhook": {"queue": "in_box"}},
}


@pytest.mark.parametrize(
    ("name", "roles"),
    [*((name, ROLES) for name in TOPOLOGIES), ("names", ("worker",)), ("names", ("webhook",))],
)
def test_the_operator_creates_what_the_app_would(
    name: str, roles: tuple[Role, ...], tmp_path: Path
) -> None:
    """Queues, exchanges and bindings have the names and arguments that the app declares."""
    values = merged(
        MINIMAL,
        {role: {"enabled": role in roles} for role in ROLES},
        {"config": TOPOLOGIES[name]},
        {"topology": {"enabled": True, "clusterReference": {"name": "rabbitmq"}}},
    )
    settings = settings_from(values, tmp_path, "worker" if "worker" in roles else "webhook")

    assert created(render(values)) == declared(bridge_topology(settings, roles))


def test_the_chart_and_the_command_make_the_same_resources(tmp_path: Path) -> None:
    reference = {"name": "rabbitmq", "namespace": "messaging"}
    values = merged(MINIMAL, {"topology": {"enabled": True, "clusterReference": reference}})
    settings = settings_from(values, tmp_path)
    printed = topology_formats.custom_resources(
        bridge_topology(settings, ["worker", "webhook"]),
        vhost="/",
        cluster="rabbitmq",
        namespace="messaging",
        policy=True,
    )

    def specs(manifests: Iterable[Manifest]) -> dict[str, Any]:
        found = {}
        for manifest in manifests:
            spec = dict(manifest["spec"])
            if manifest["kind"] == "Policy":
                # The chart's has the name of its release.
                del spec["name"]
            name = spec.get("name", spec.get("source"))
            found[f"{manifest['kind']}/{name}"] = spec
        return found

    rendered = [m for m in render(values) if m["apiVersion"] == "rabbitmq.com/v1beta1"]

    assert specs(printed) == specs(rendered)


def test_an_uninstall_leaves_the_messages() -> None:
    """Nothing that holds or routes messages is deleted with the release, unless asked for."""
    kinds = ("Queue", "Exchange", "Binding", "Policy")
    kept, given_up = (
        [
            manifest
            for kind in kinds
            for manifest in of_kind(
                render(merged(CI["operators"], nested("topology.deletionPolicy", policy))), kind
            ).values()
        ]
        for policy in ("retain", "delete")
    )

    assert {m["kind"] for m in kept} == {m["kind"] for m in given_up} == set(kinds)
    for manifest in kept:
        assert manifest["metadata"]["annotations"] == {
            "helm.sh/resource-policy": "keep",
            "argocd.argoproj.io/sync-options": "Prune=false,Delete=false",
        }
        assert manifest["spec"].get("deletionPolicy", "retain") == "retain"
    for manifest in given_up:
        assert "annotations" not in manifest["metadata"]


@pytest.mark.parametrize("mode", ["declare", "verify"])
def test_permissions_cover_the_topology_and_nothing_else(mode: str, tmp_path: Path) -> None:
    values = merged(CI["operators"], nested("config.rabbitmq.topology", mode))
    settings = settings_from(values, tmp_path)
    (permission,) = of_kind(render(values), "Permission").values()
    worker, webhook = worker_topology(settings.worker), webhook_topology(settings.webhook)
    queues = {queue.name for queue in worker.queues + webhook.queues}
    exchanges = {exchange.name for exchange in worker.exchanges + webhook.exchanges}
    others = {"sms.outbound2", "smsXoutbound", "sms.outbound.workersX", "other", "amq.topic", ""}
    main = settings.worker.queue
    paused = paused_queue(main)
    talk = {workers_exchange(main), f"{workers_exchange(main)}.0123456789abcdef.1"}

    def allowed(right: str) -> set[str]:
        pattern = permission["spec"]["permissions"][right]
        return {
            name
            for name in queues | exchanges | others | talk | {"amq.default", paused}
            if re.search(pattern, name)
        } - {""}

    if mode == "verify":
        assert allowed("configure") == talk | {paused}
        assert allowed("write") == exchanges | talk | {"amq.default"}
        waiting = {*request_queues(settings.worker), *retry_queues(settings.worker)}
        assert allowed("read") == talk | waiting | {dead_queue(main), paused}
    else:
        assert allowed("configure") == queues | exchanges | talk | {paused}
        assert allowed("write") == queues | exchanges | talk | {"amq.default"}
        assert allowed("read") == queues | exchanges | talk | {paused}


@pytest.mark.parametrize(("given", "meant"), [(False, "off"), (True, "on"), ("off", "off")])
def test_words_that_helm_takes_for_booleans(given: object, meant: str, tmp_path: Path) -> None:
    values = merged(CI["operators"], nested("config.worker.coordination", given))
    (permission,) = of_kind(render(values), "Permission").values()
    exchange = workers_exchange(settings_from(values, tmp_path).worker.queue)
    pattern = permission["spec"]["permissions"]["configure"]

    assert settings_from(values, tmp_path).worker.coordination == meant
    assert bool(re.search(pattern, exchange)) is (meant == "on")
    off = merged(values, nested("config.rabbitmq.topology", False))
    assert settings_from(off, tmp_path).rabbitmq.topology == "off"


def test_the_policy_covers_every_queue() -> None:
    """RabbitMQ 4 gives a queue's message up after 20 deliveries, unless a policy says no."""
    manifests = render(CI["operators"])
    (policy,) = of_kind(manifests, "Policy").values()
    queues = [m["spec"]["name"] for m in of_kind(manifests, "Queue").values()]

    assert policy["spec"]["definition"] == {"delivery-limit": -1}
    assert all(re.search(policy["spec"]["pattern"], name) for name in queues)
