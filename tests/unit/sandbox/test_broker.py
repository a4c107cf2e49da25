"""A private RabbitMQ: it answers, and is gone at exit."""

import json
import os
from pathlib import Path

import pytest

from bridge.errors import BrokerError
from bridge.sandbox import broker as broker_module
from bridge.sandbox.broker import URL_VARIABLE, Broker, answers_amqp, private_broker


def _pid_of_epmd(broker: Broker) -> int:
    assert broker._epmd._child is not None
    return broker._epmd._child.pid


def _runs(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
def test_a_private_broker_answers_and_leaves_nothing_behind() -> None:
    """Until its exit it answers, unless it is paused; then no process, port or folder is left."""
    with private_broker() as broker:
        groups = [broker.pid, _pid_of_epmd(broker)]
        assert answers_amqp(broker.url)
        seen = "string:join([rabbit_misc:version(), hd(code:get_path())], [32])."
        version, first_folder = json.loads(broker.ctl("eval", seen)).split()
        broker.pause()
        assert not answers_amqp(broker.url)
        broker.resume()

    assert tuple(int(part) for part in version.split(".")[:2]) >= (3, 10)
    # RabbitMQ's own folder comes first, and no plugin that is not enabled before it.
    assert Path(first_folder).parent.name.split("-")[0] == "rabbit"
    assert not answers_amqp(broker.url)
    assert [group for group in groups if _runs(group)] == []
    assert not broker._folder.exists()


def test_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without a server program the error is one sentence that says what to do."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(broker_module, "_PACKAGE_FOLDERS", ())

    advice = r"apt-get install rabbitmq-server.*" + URL_VARIABLE
    with pytest.raises(BrokerError, match=advice), private_broker():
        pass
