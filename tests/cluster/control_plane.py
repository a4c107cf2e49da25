"""A Kubernetes cluster on this computer, with a real control plane and simulated nodes.

The API server, the scheduler and the controllers are real. kwok reports pods as ready without
starting containers. So admission, validation, quotas, rollouts, disruption budgets and garbage
collection are real, but images, probes, mounts and signals are not.
"""

import json
import os
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bridge.sandbox.processes import Child, Guard, accepts, free_ports, guarded, wait_until

# The folder of install-tools.sh, without which there is no cluster.
TOOLS = os.environ.get("SMS_BRIDGE_TEST_CLUSTER")
NO_TOOLS = "the programs of a cluster are built by `make chart-cluster`"

KUBELET = Path(__file__).parent / "kubelet.yaml"
NODES = 3
START_SECONDS = 90
STOP_SECONDS = 5
COMMAND_SECONDS = 180

Object = dict[str, Any]
Done = subprocess.CompletedProcess[str]


class Cluster:
    """A running cluster, used through kubectl and Helm."""

    def __init__(self, tools: Path, folder: Path) -> None:
        self.tools = tools
        self.kubeconfig = folder / "kubeconfig"
        # Ignore the user's clusters, and Helm's plugins and caches.
        self._environ = {"KUBECONFIG": str(self.kubeconfig), "HOME": str(folder), "PATH": ""}

    def run(self, program: str, *arguments: str, stdin: str = "", check: bool = True) -> Done:
        """Run kubectl, helm or helm3. Raise AssertionError with its output if it fails."""
        done = subprocess.run(
            [self.tools / "bin" / program, *arguments],
            input=stdin,
            env=self._environ,
            check=False,
            capture_output=True,
            text=True,
            timeout=COMMAND_SECONDS,
        )
        assert not (check and done.returncode), f"{program} {' '.join(arguments)}: {done.stderr}"
        return done

    def kubectl(self, *arguments: str, stdin: str = "") -> str:
        """Run kubectl, and return its output."""
        return self.run("kubectl", *arguments, stdin=stdin).stdout

    def create(self, *objects: Object) -> None:
        """Create objects without unknown fields."""
        self.kubectl("create", "--validate=strict", "-f", "-", stdin=as_list(objects))

    def objects(self, kind: str, namespace: str, *, selector: str = "") -> list[Object]:
        """List the objects of one or several kinds, separated by commas."""
        listed = self.kubectl("get", kind, "-n", namespace, "-l", selector, "-o", "json")
        found: list[Object] = json.loads(listed)["items"]
        return found

    def get_raw(self, path: str) -> str:
        """Send a request to the API server."""
        return self.kubectl("get", "--raw", path)

    def answers(self) -> bool:
        """Return whether the API server is ready."""
        return self.run("kubectl", "get", "--raw", "/readyz", check=False).returncode == 0


def as_list(objects: Iterable[Object]) -> str:
    """Format objects as a list for kubectl."""
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)})


@contextmanager
def running_cluster(tools: Path) -> Iterator[Cluster]:
    """Run a cluster with the custom resource definitions of the tools."""
    folder = Path(tempfile.mkdtemp(prefix="sms-bridge-cluster-"))
    try:
        with guarded() as guard:
            cluster = Cluster(tools, folder)
            children: list[Child] = []
            try:
                _start(cluster, folder, children, guard)
                _add_definitions(cluster)
                yield cluster
            finally:
                # Stop the API server last, because it waits for its watchers.
                for child in reversed(children):
                    child.end(grace_seconds=STOP_SECONDS)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _start(cluster: Cluster, folder: Path, children: list[Child], guard: Guard) -> None:
    port, etcd_port, peer_port = free_ports(3)
    etcd, server = f"http://127.0.0.1:{etcd_port}", f"https://127.0.0.1:{port}"
    # The API server first creates a certificate and a key, which also signs service accounts.
    pki, tokens = folder / "pki", folder / "tokens.csv"
    key = str(pki / "apiserver.key")
    token = secrets.token_hex()
    tokens.write_text(f"{token},admin,admin,system:masters\n")
    cluster.kubeconfig.write_text(
        json.dumps(_kubeconfig(server, authority=pki / "apiserver.crt", token=token))
    )

    def launch(program: str, **flags: str) -> None:
        # kwok needs a home directory.
        environ = {"HOME": str(folder)}
        command = [str(cluster.tools / "bin" / program)]
        command += [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
        log = folder / f"{program}.log"
        children.append(Child(command, guard=guard, log=log, environ=environ))

    def wait_for(ready: Callable[[], bool]) -> None:
        running = wait_until(
            ready, seconds=START_SECONDS, running=lambda: all(c.exit_code is None for c in children)
        )
        assert running, "\n".join(f"{c.name}: {c.tail(5)}" for c in children)

    launch(
        "etcd",
        data_dir=str(folder / "etcd-data"),
        listen_client_urls=etcd,
        advertise_client_urls=etcd,
        listen_peer_urls=f"http://127.0.0.1:{peer_port}",
        initial_advertise_peer_urls=f"http://127.0.0.1:{peer_port}",
        initial_cluster=f"default=http://127.0.0.1:{peer_port}",
        unsafe_no_fsync="true",
    )
    wait_for(lambda: accepts(etcd_port))
    launch(
        "kube-apiserver",
        etcd_servers=etcd,
        bind_address="127.0.0.1",
        advertise_address="127.0.0.1",
        secure_port=str(port),
        cert_dir=str(pki),
        endpoint_reconciler_type="none",
        service_cluster_ip_range="10.96.0.0/16",
        authorization_mode="RBAC",
        anonymous_auth="false",
        token_auth_file=str(tokens),
        service_account_issuer="https://kubernetes.default.svc",
        service_account_key_file=key,
        service_account_signing_key_file=key,
    )
    wait_for(cluster.answers)
    as_admin = {
        "kubeconfig": str(cluster.kubeconfig),
        "leader_elect": "false",
        "secure_port": "0",
    }
    launch(
        "kube-controller-manager",
        **as_admin,
        service_account_private_key_file=key,
        horizontal_pod_autoscaler_sync_period="1s",
    )
    launch("kube-scheduler", **as_admin)
    launch(
        "kwok",
        kubeconfig=str(cluster.kubeconfig),
        config=str(KUBELET),
        manage_all_nodes="true",
        node_lease_duration_seconds="40",
        server_address="",
    )
    cluster.create(*(_node(number) for number in range(NODES)))
    wait_for(lambda: _has_nodes(cluster))


def _has_nodes(cluster: Cluster) -> bool:
    # A new node is tainted until the controller sees that it is ready.
    nodes = cluster.objects("nodes", "")
    accounts = cluster.objects("serviceaccounts", "default")
    return bool(accounts) and not any(node["spec"].get("taints") for node in nodes)


def _add_definitions(cluster: Cluster) -> None:
    # The definitions are too long for the annotation of a client-side apply.
    crds = str(cluster.tools / "crds")
    cluster.kubectl("apply", "--server-side", "-f", crds)
    cluster.kubectl("wait", "--for=condition=Established", "--timeout=60s", "-f", crds)


def _kubeconfig(server: str, *, authority: Path, token: str) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [
            {"name": "it", "cluster": {"server": server, "certificate-authority": str(authority)}}
        ],
        "users": [{"name": "it", "user": {"token": token}}],
        "contexts": [{"name": "it", "context": {"cluster": "it", "user": "it"}}],
        "current-context": "it",
    }


def _node(number: int) -> Object:
    labels = {
        "kubernetes.io/hostname": f"node-{number}",
        "kubernetes.io/os": "linux",
        "topology.kubernetes.io/zone": f"zone-{number}",
    }
    metadata = {"name": f"node-{number}", "labels": labels}
    return {"apiVersion": "v1", "kind": "Node", "metadata": metadata}
