"""How long a server's certificate is still valid."""

import ssl
import time
from datetime import UTC, datetime
from typing import Any, Final

from bridge.admin.finding import Finding

SHORT_DAYS: Final = 14
_DAY_SECONDS: Final = 86400


def judge_certificate(subject: str, certificate: dict[str, Any]) -> Finding:
    """Warn of a certificate that ends within `SHORT_DAYS`."""
    ends = ssl.cert_time_to_seconds(str(certificate["notAfter"]))
    days = (ends - time.time()) / _DAY_SECONDS
    day = datetime.fromtimestamp(ends, UTC).date()
    if days < SHORT_DAYS:
        text = f"its certificate ends in {max(0, int(days))} days, on {day}"
        return Finding(subject, "warn", text, "have it renewed")
    return Finding(subject, "ok", f"its certificate is valid until {day}")
