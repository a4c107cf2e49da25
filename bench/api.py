"""An nginx as SMS API: accepts everything, at once or late, over HTTP or HTTPS, and logs each POST.

It answers like the services of the presets `generic`, `telnyx`, `twilio` and `vonage-sms`.
"""

import http.client
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import trustme

from bench.rounds import BenchError
from bridge.sandbox.processes import Child, Guard, accepts, free_ports, wait_until

Kind = Literal["http", "https", "late"]

LATE_SECONDS: Final = 0.1
ACCOUNT: Final = "AC00000000000000000000000000000001"
START_SECONDS: Final = 30
STATUS_SECONDS: Final = 10
LOG_SECONDS: Final = 10

# Without modules, nginx can only delay a refusal with 401, which it can turn into any answer.
_CONFIGURATION: Final = """\
daemon off;
master_process off;
pid {folder}/nginx.pid;
error_log stderr warn;
worker_rlimit_nofile 8192;
events {{ worker_connections 4096; }}
http {{
    log_format posts '$msec $connection $status $http_idempotency_key $http_traceparent';
    access_log off;
    default_type application/json;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    server {{
        listen 127.0.0.1:{ports[http]};
        listen 127.0.0.1:{ports[https]} ssl;
        ssl_protocols TLSv1.3;
        ssl_certificate {server_file};
        ssl_certificate_key {server_file};
        access_log {log} posts buffer=64k flush=100ms;
        location = /v1/messages {{ return 202 '{{"id": "$request_id"}}\\n'; }}
{shapes}    }}
    server {{
        listen 127.0.0.1:{ports[late]};
        access_log {log} posts buffer=64k flush=100ms;
        location = /v1/messages {{
            auth_delay {late_milliseconds:.0f}ms;
            auth_basic late;
            auth_basic_user_file {folder}/none;
            error_page 401 =202 @late;
        }}
        location @late {{ return 202 '{{"id": "$request_id"}}\\n'; }}
    }}
    server {{
        listen 127.0.0.1:{ports[status]};
        # The next question may come minutes later.
        keepalive_timeout 1h;
        location = /status {{ stub_status; }}
    }}
}}
"""

# Accepting answers of the services of `telnyx`, `twilio` and `vonage-sms`.
_SHAPES: Final = f"""\
        location = /v2/messages {{ return 200 '{{"data": {{"id": "$request_id"}}}}\\n'; }}
        location = /2010-04-01/Accounts/{ACCOUNT}/Messages.json {{
            return 201 '{{"sid": "$request_id", "error_code": null}}\\n';
        }}
        location = /sms/json {{
            return 200 '{{"messages": [{{"status": "0", "message-id": "$request_id"}}]}}\\n';
        }}
"""


@dataclass(frozen=True, slots=True)
class Post:
    """An answered POST. `at` is in Unix seconds, with milliseconds.

    `is_sampled`: its traceparent has the sampled flag.
    """

    at: float
    connection: int
    status: int
    message_id: str
    is_sampled: bool


class Certificate:
    """A new certificate authority, and a server certificate from it."""

    def __init__(self, folder: Path) -> None:
        self.ca_file = folder / "ca.pem"
        self.server_file = folder / "server.pem"
        authority = trustme.CA(key_type=trustme.KeyType.ECDSA)
        authority.cert_pem.write_to_path(self.ca_file)
        issued = authority.issue_cert("localhost", key_type=trustme.KeyType.ECDSA)
        issued.private_key_and_cert_chain_pem.write_to_path(self.server_file)


class Api:
    """A running nginx, and its log."""

    def __init__(self, folder: Path, guard: Guard, certificate: Certificate) -> None:
        folder.mkdir()
        self._log = folder / "posts.log"
        names = ("http", "https", "late", "status")
        self._ports = dict(zip(names, free_ports(len(names)), strict=True))
        text = _CONFIGURATION.format(
            folder=folder,
            log=self._log,
            ports=self._ports,
            shapes=_SHAPES,
            server_file=certificate.server_file,
            late_milliseconds=LATE_SECONDS * 1000,
        )
        configuration = folder / "nginx.conf"
        configuration.write_text(text, encoding="utf-8")
        self._nginx = Child(
            [find_nginx(), "-p", str(folder), "-c", str(configuration), "-e", "stderr"],
            guard=guard,
            log=folder / "nginx.log",
            environ=os.environ,
        )
        if not wait_until(
            lambda: accepts(self._ports["status"]),
            seconds=START_SECONDS,
            running=lambda: self._nginx.exit_code is None,
        ):
            raise BenchError(f"nginx does not answer:\n{self._nginx.tail()}")
        self._status = http.client.HTTPConnection(
            "127.0.0.1", self._ports["status"], timeout=STATUS_SECONDS
        )
        self._asked = 0

    def url(self, kind: Kind) -> str:
        """Return the address for this kind of answer."""
        scheme = "https" if kind == "https" else "http"
        host = "localhost" if kind == "https" else "127.0.0.1"
        return f"{scheme}://{host}:{self._ports[kind]}"

    def count(self) -> int:
        """Count the POSTs so far, including unanswered ones."""
        self._status.request("GET", "/status")
        page = self._status.getresponse().read().decode("ascii")
        self._asked += 1
        found = re.search(r"requests\s+\d+ \d+ (\d+)", page)
        if found is None:
            raise BenchError("nginx's status page cannot be read")
        # nginx also counts these status requests.
        return int(found[1]) - self._asked

    def posts(self, at_least: int, *, seconds: float = LOG_SECONDS) -> list[Post]:
        """Wait until the log has this many answered POSTs, and read them.

        Raises BenchError after the timeout.
        """
        if not wait_until(lambda: len(self._lines()) >= at_least, seconds=seconds):
            raise BenchError(f"nginx answered {len(self._lines())} POSTs of {at_least}")
        return list(_parse(self._lines()))

    def close(self) -> None:
        """Stop nginx."""
        self._status.close()
        self._nginx.end(grace_seconds=2)

    def _lines(self) -> list[str]:
        return self._log.read_text(encoding="ascii").splitlines()


@contextmanager
def running_api(folder: Path, guard: Guard, certificate: Certificate) -> Iterator[Api]:
    """Run a new nginx in a new folder."""
    api = Api(folder, guard, certificate)
    try:
        yield api
    finally:
        api.close()


def find_nginx() -> str:
    """Find nginx, also outside a user's PATH."""
    found = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
    if found is None:
        raise BenchError("No nginx is installed: run `make nginx`.")
    return found


def _parse(lines: list[str]) -> Iterator[Post]:
    for line in lines:
        at, connection, status, message_id, trace = line.split()
        # nginx logs - for a missing header. The flags are the last part, in hex.
        is_sampled = trace != "-" and bool(int(trace.rpartition("-")[2], 16) & 1)
        yield Post(float(at), int(connection), int(status), message_id, is_sampled)
