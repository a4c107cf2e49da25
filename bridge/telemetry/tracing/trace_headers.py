"""W3C trace headers, which are passed on in both directions."""

import re
from typing import Final

# Name and value of each: the traceparent, behind it the tracestate if there is one.
TraceHeaders = tuple[tuple[str, str], ...]

TRACEPARENT: Final = "traceparent"
_TRACEPARENT: Final = re.compile(
    "(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}"
)
_TRACESTATE: Final = re.compile("[ -~]{1,512}")


def read_trace(parent: object, state: object) -> TraceHeaders:
    """Return the W3C trace headers to pass on; what is not in their form is left out."""
    if not (isinstance(parent, str) and _TRACEPARENT.fullmatch(parent)):
        return ()
    if not (isinstance(state, str) and _TRACESTATE.fullmatch(state)):
        return ((TRACEPARENT, parent),)
    return ((TRACEPARENT, parent), ("tracestate", state))
