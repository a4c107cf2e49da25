"""Whether this process may open as many files as the roles need connections."""

import resource
from typing import Final

from bridge.admin.checks.set_up import SetUp
from bridge.admin.finding import Finding

# Files beside the connections: logs, epoll, certificates, the broker, the admin port.
OTHER_FILES: Final = 64


async def check_open_files(set_up: SetUp) -> list[Finding]:
    """Compare the limit of open files with the connections that the settings allow."""
    needed = OTHER_FILES
    if "worker" in set_up.roles:
        needed += set_up.settings.worker.most_in_flight
    if "webhook" in set_up.roles:
        needed += set_up.settings.webhook.max_connections
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != resource.RLIM_INFINITY and limit < needed:
        text = f"{limit} may be open, about {needed} are needed"
        return [Finding("files", "warn", text, f"raise the limit: ulimit -n {needed}")]
    return [Finding("files", "ok", f"{limit} may be open, about {needed} are needed")]
