"""A handler as an ASGI application: what another server in the listener's place would run."""

from starlette.types import ASGIApp, Receive, Scope, Send

from bridge.http.messages import Handler, Request, Response


def asgi_app(handler: Handler, *, max_body_bytes: int) -> ASGIApp:
    """Answer with a handler; a body that is too large is cut off, so that no signature fits it."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        body, has_more = b"", True
        while has_more and len(body) <= max_body_bytes:
            event = await receive()
            if event["type"] == "http.disconnect":
                return
            body += event["body"]
            has_more = event["more_body"]
        method, path, query = scope["method"], scope["path"], scope["query_string"]
        answer = handler(Request(method, path, query, [*scope["headers"]], body))
        response = answer if isinstance(answer, Response) else await answer
        headers = [(b"content-length", b"%d" % len(response.body))]
        headers += [(k.encode(), v.encode("latin-1")) for k, v in response.headers.items()]
        await send({"type": "http.response.start", "status": response.status, "headers": headers})
        await send({"type": "http.response.body", "body": response.body})

    return app
