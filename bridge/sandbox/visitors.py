"""Who may ask the sandbox: programs, and its own page; not a page of another site.

A browser lets any page send requests to this computer (CSRF), and one whose name is pointed here
after it was loaded read the answers too (DNS rebinding). Such requests name themselves.
"""

import ipaddress
from collections.abc import Collection, Mapping
from typing import Final

JSON: Final = "application/json"
FORM: Final = "application/x-www-form-urlencoded"


def find_refusal(
    headers: Mapping[str, str], *, hosts: Collection[str], body_type: str | None
) -> tuple[int, str] | None:
    """Return the status and the text with which to refuse a request, or None when it may ask.

    `hosts` are names by which the sandbox is known, besides addresses, `localhost` and names
    without a dot, which nobody can own. `body_type` is what a body has to be; None is no body.
    """
    host = headers.get("host", "")
    if host and not _is_ours(host, hosts):
        return 403, f"Host: is not a name of the sandbox; start it with --allow-host {_name(host)}"
    origin = headers.get("origin")
    if origin is not None and origin not in {f"http://{host}", f"https://{host}"}:
        return 403, "Origin: a page of another site may not ask the sandbox"
    kind = headers.get("content-type", body_type or "").partition(";")[0].strip().lower()
    if body_type is not None and kind != body_type:
        return 415, f"Content-Type: must be {body_type}"
    return None


def _is_ours(host: str, hosts: Collection[str]) -> bool:
    name = _name(host)
    if "." not in name or name in hosts or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _name(host: str) -> str:
    """Take the port and the brackets off a Host."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.rpartition(":")[0] or host
    return name.lower().removesuffix(".")
