"""Refuse requests that a web page of another site makes a browser send to the sandbox.

Any page can send requests to this computer (CSRF). A page whose host name resolves to this computer
after it was loaded (DNS rebinding) could also read the answers. `Origin` and `Host` reveal both.
"""

import ipaddress
from collections.abc import Collection, Mapping

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from bridge.sandbox.service import JSON


class OriginGuard:
    """ASGI middleware that answers requests of other sites with 403 or 415.

    `hosts` are the sandbox's names besides addresses, `localhost` and names without a dot, which
    cannot be registered. `service_type` is the content type of requests to the service.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str], service_type: str) -> None:
        self._app = app
        self._hosts = hosts
        self._service_type = service_type

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app: ASGIApp = self._app
        if scope["type"] == "http":
            kind = JSON if scope["path"].startswith("/sandbox/") else self._service_type
            headers = Headers(scope=scope)
            refusal = self._refuse_page(headers)
            if refusal is None and scope["method"] in {"POST", "PUT"}:
                refusal = _refuse_type(headers, kind)
            if refusal is not None:
                status, text = refusal
                app = JSONResponse({"error": text}, status)
        await app(scope, receive, send)

    def _refuse_page(self, headers: Mapping[str, str]) -> tuple[int, str] | None:
        host, origin = headers.get("host", ""), headers.get("origin")
        name = _name(host)
        if host and not (name in self._hosts or _is_local(name)):
            return 403, f"Host: is not a name of the sandbox; start it with --allow-host {name}"
        if origin is not None and origin not in {f"http://{host}", f"https://{host}"}:
            return 403, "Origin: pages of other sites may not use the sandbox"
        return None


def _refuse_type(headers: Mapping[str, str], wanted: str) -> tuple[int, str] | None:
    # Forms of other sites can only send content types that `/sandbox/...` does not accept.
    kind = headers.get("content-type", wanted).partition(";")[0].strip().lower()
    return None if kind == wanted else (415, f"Content-Type: must be {wanted}")


def _is_local(name: str) -> bool:
    if "." not in name or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _name(host: str) -> str:
    """Return the name in a `Host`, without port and brackets."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.rpartition(":")[0] or host
    return name.lower().removesuffix(".")
