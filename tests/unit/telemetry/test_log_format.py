"""Log lines formatted from facts."""

import json

from bridge.telemetry.log_format import dump_json, json_line


def test_time_is_utc_with_milliseconds() -> None:
    line = json.loads(json_line(1_900_000_000.25, "info", "bridge.anything", "delivery", {}))

    assert line["time"] == "2030-03-17T17:46:40.250Z"


def test_dump_json_is_one_line() -> None:
    """JSON is written as one line without blanks."""
    assert dump_json({"a": [1, "b\n"]}) == '{"a":[1,"b\\n"]}'
