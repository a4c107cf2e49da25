"""`sms-bridge pause` and `resume`: pause and resume every worker of the queue."""

import asyncio
from typing import Annotated

import typer

from bridge.admin.pausing import explain_paused
from bridge.admin.pausing import pause as pause_workers
from bridge.admin.pausing import resume as resume_workers
from bridge.cli.options import ConfigFile, Reason, examples, read_reason, read_settings

app = typer.Typer()


@app.command(
    epilog=examples("sms-bridge pause", 'sms-bridge pause --reason "wrong text in the campaign"')
)
def pause(
    context: typer.Context,
    *,
    reason: Annotated[str | None, Reason] = None,
    config: ConfigFile = None,
) -> None:
    """Stop all workers of the queue from sending, within two seconds.

    The pause lasts until `sms-bridge resume`, even if workers and RabbitMQ restart. It is stored in
    RabbitMQ as the queue <worker.queue>.paused, which the RabbitMQ user needs permission to
    configure. The workers finish requests in flight. All other messages wait in their queues, and
    may expire there.
    """
    settings = read_settings(context, config)
    reason = None if reason is None else read_reason(reason)
    paused = asyncio.run(pause_workers(settings, reason))
    text, remedy = explain_paused(settings.worker.queue, paused)
    already = "" if paused.is_new else "already: "
    typer.echo(f"{already}{text}; {remedy}")
    if paused.note is None:
        typer.echo("sms-bridge: the reason could not be stored on the broker", err=True)
    elif reason is not None and not paused.is_new and paused.note.reason != reason:
        typer.echo("sms-bridge: the first reason stays", err=True)


@app.command(epilog=examples("sms-bridge resume"))
def resume(context: typer.Context, config: ConfigFile = None) -> None:
    """Resume sending after `sms-bridge pause`. Without such a pause, nothing changes.

    Messages that expired during the pause become dead letters. A pause that a worker began by
    itself also ends by itself.
    """
    settings = read_settings(context, config)
    queue = settings.worker.queue
    was_paused = asyncio.run(resume_workers(settings))
    typer.echo(f"resumed {queue}" if was_paused else f"{queue} was not paused by an operator")
