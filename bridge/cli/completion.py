"""The options that install or print shell completion.

Typer's own options guess the shell, and ignore the one that is named.
"""

from enum import StrEnum
from typing import Annotated, Any

import typer


class Shell(StrEnum):
    """The shells for which there is a completion."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"
    POWERSHELL = "powershell"
    PWSH = "pwsh"


def _install(context: typer.Context, parameter: Any, shell: str | None) -> None:  # noqa: ANN401
    from typer.completion import install_callback

    install_callback(context, parameter, shell)


def _show(context: typer.Context, parameter: Any, shell: str | None) -> None:  # noqa: ANN401
    from typer.completion import show_callback

    show_callback(context, parameter, shell)


InstallCompletion = Annotated[
    Shell | None,
    typer.Option(
        "--install-completion",
        callback=_install,
        is_eager=True,
        help="Complete the commands in this shell from its next start on.",
    ),
]
ShowCompletion = Annotated[
    Shell | None,
    typer.Option(
        "--show-completion",
        callback=_show,
        is_eager=True,
        help="Print what --install-completion would install.",
    ),
]
