"""`sms-bridge topology`: show, compare or create the entities that the bridge needs."""

import asyncio
from typing import Annotated, Any, Literal

import typer
import yaml
from yarl import URL

from bridge.admin import topology_formats
from bridge.admin.broker_session import connected
from bridge.admin.management import Management, open_management, vhost_of
from bridge.amqp.client import Connection
from bridge.cli.options import (
    ConfigFile,
    ManagementUrl,
    OneRole,
    examples,
    read_settings,
    roles_of,
)
from bridge.cli.output import format_table, print_json
from bridge.config import Settings
from bridge.errors import EXIT_FAILED, BrokerError
from bridge.topology.comparison import compare
from bridge.topology.declarations import Topology, bridge_topology, name_of
from bridge.topology.differences import Difference, is_unusable
from bridge.topology.upkeep import provide

app = typer.Typer(
    name="topology",
    help="Show, compare or create the queues, exchanges and bindings that the bridge needs.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


def _read_topology(
    context: typer.Context, config: ConfigFile, role: OneRole
) -> tuple[Settings, Topology]:
    """Load the configuration, and return it with its topology."""
    settings = read_settings(context, config)
    return settings, bridge_topology(settings, roles_of(role))


@app.command(
    epilog=examples(
        "sms-bridge topology show",
        "sms-bridge topology show --format operator --cluster rabbitmq | kubectl apply -f -",
        "sms-bridge topology show --format definitions > sms-bridge.json",
        "rabbitmqctl import_definitions sms-bridge.json",
        "sms-bridge topology show --format definitions --no-policy       # for RabbitMQ 3",
    )
)
def show(
    context: typer.Context,
    *,
    form: Annotated[
        Literal["table", "operator", "definitions"],
        typer.Option(
            "--format",
            help="operator prints custom resources for RabbitMQ's messaging topology operator. "
            "definitions prints a file for rabbitmqctl import_definitions.",
        ),
    ] = "table",
    cluster: Annotated[
        str, typer.Option(help="With operator: the name of the RabbitmqCluster.")
    ] = "rabbitmq",
    namespace: Annotated[
        str | None,
        typer.Option(
            help="With operator: the RabbitmqCluster's namespace, if the cluster is in another one."
        ),
    ] = None,
    policy: Annotated[
        bool,
        typer.Option(
            help="With operator and definitions: include the policy that lifts RabbitMQ 4's limit "
            "of 20 deliveries. RabbitMQ 3 has no such limit, and refuses the policy."
        ),
    ] = True,
    role: OneRole = None,
    config: ConfigFile = None,
) -> None:
    """Print the queues, exchanges and bindings that the bridge declares.

    The command does not connect to the broker.
    """
    settings, topology = _read_topology(context, config, role)
    vhost = vhost_of(URL(settings.rabbitmq.url[0].get_secret_value()))
    match form:
        case "table":
            head = ("KIND", "NAME", "ARGUMENTS")
            for line in format_table(head, topology_formats.rows(topology)):
                typer.echo(line)
        case "definitions":
            document = topology_formats.definitions(topology, vhost=vhost, policy=policy)
            print_json(document)
        case "operator":
            resources = topology_formats.custom_resources(
                topology, vhost=vhost, cluster=cluster, namespace=namespace, policy=policy
            )
            typer.echo(yaml.safe_dump_all(resources, sort_keys=False), nl=False)


@app.command(
    epilog=examples(
        "sms-bridge topology verify",
        "sms-bridge topology verify --role webhook --management-url http://rabbitmq:15672",
    )
)
def verify(
    context: typer.Context,
    *,
    management_url: ManagementUrl = None,
    role: OneRole = None,
    config: ConfigFile = None,
) -> None:
    """Compare the broker's topology with the configuration. Exit with 1 if anything differs.

    The command creates nothing. For the main queues and exchanges, it also prints what a difference
    can cost. It can compare bindings only through the management API.
    """
    settings, topology = _read_topology(context, config, role)
    differences, hint = asyncio.run(_compare(settings, topology, management_url))
    for difference in differences:
        typer.echo(f"{difference.kind}: {difference.why}")
    if hint is not None:
        typer.echo(hint, err=True)
    if any(difference.kind != "not_compared" for difference in differences):
        raise typer.Exit(EXIT_FAILED)
    is_complete = hint is None and not differences
    rest = "" if is_complete else ", as far as it could be compared"
    typer.echo(f"the topology matches{rest}")


@app.command(
    epilog=examples(
        "sms-bridge topology declare",
        "sms-bridge topology declare --role worker",
    )
)
def declare(
    context: typer.Context,
    *,
    role: OneRole = None,
    config: ConfigFile = None,
) -> None:
    """Create missing queues, exchanges and bindings, as a role does when it starts.

    The command changes nothing that exists. It exits with 1 if a retry queue or the dead-letter
    queue has different arguments, or if a permission is missing.
    """
    settings, topology = _read_topology(context, config, role)
    differences = asyncio.run(_declare(settings, topology))
    unusable = [one for one in differences if is_unusable(one, "declare")]
    absent = {name_of(one.entity) for one in unusable}
    for entity in (*topology.declarable, *topology.bindings):
        if name_of(entity) not in absent:
            typer.echo(f"exists: {name_of(entity)}")
    for difference in differences:
        typer.echo(f"{difference.kind}: {difference.why}", err=True)
    if unusable:
        raise typer.Exit(EXIT_FAILED)


async def _declare(settings: Settings, topology: Topology) -> list[Difference]:
    async with connected(settings.rabbitmq, name="topology") as connection:
        return await provide(connection, topology, "declare")


async def _compare(
    settings: Settings, topology: Topology, url: str | None
) -> tuple[list[Difference], str | None]:
    """Return the differences, and the reason if bindings were not compared."""
    async with connected(settings.rabbitmq, name="topology") as connection:
        differences = [difference async for difference in compare(connection, topology)]
        if not topology.bindings:
            return differences, None
        try:
            async with open_management(settings.rabbitmq, url) as management:
                await _check_same_cluster(connection, management)
                return differences + await management.missing_bindings(topology), None
        except BrokerError as error:
            return differences, f"bindings were not compared: management API: {error}"


async def _check_same_cluster(connection: Connection, management: Management) -> None:
    """Raise BrokerError if the management API belongs to another broker than the connection."""
    transport = connection.transport
    told: Any = {} if transport is None else transport.connection.server_properties
    ours = told.get("cluster_name")
    theirs = (await management.read("overview") or {}).get("cluster_name")
    if ours and theirs and ours != theirs:
        raise BrokerError(
            f"it belongs to the cluster {theirs}, but rabbitmq.url leads to {ours}; "
            "set --management-url to the API of the same broker"
        )
