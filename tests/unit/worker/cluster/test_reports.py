"""What workers report of the messages that they take and send, as bytes."""

import secrets

import pytest
from pydantic import ValidationError

from bridge.worker.cluster.messages import MAX_BYTES, new_worker_id, read_message, write_message
from bridge.worker.cluster.reports import (
    MAX_REPORTED,
    Recent,
    Report,
    read_digests,
    read_records,
    write_digests,
    write_records,
)
from bridge.worker.sent_messages import Accepted

NOW = 1_800_000_000.0
DIGESTS = [secrets.token_bytes(16) for _ in range(MAX_REPORTED)]
PROVIDER_ID = "+491713920001"
ACCEPTED = Accepted(attempts=2, status=202, provider_id=PROVIDER_ID, at=NOW - 1.5)


def carried(report: Report) -> Report:
    """Write a report and read it."""
    message = read_message(write_message(new_worker_id(), report))
    assert message is not None
    return Report.model_validate(message.facts)


def test_reports_arrive() -> None:
    """Digests and acceptances are read as they were written; the clocks may differ."""
    sent = write_records([(DIGESTS[0], ACCEPTED)], now=NOW)
    told = carried(Report(taken=write_digests(DIGESTS[:2]), sent=sent))

    assert list(read_digests(told.taken)) == DIGESTS[:2]
    assert list(read_records(told.sent)) == [(DIGESTS[0], 2, 202, 1.5)]
    assert (told.let_go, told.asked) == (b"", b"")


def test_a_providers_id_is_not_told() -> None:
    """It may be a phone number."""
    report = Report(sent=write_records([(DIGESTS[0], ACCEPTED)], now=NOW))

    assert PROVIDER_ID not in report.model_dump_json()


@pytest.mark.parametrize("age_seconds", [-5.0, 1e9], ids=["ahead", "ages"])
def test_numbers_that_do_not_fit_are_the_nearest_that_do(age_seconds: float) -> None:
    """A clock that was set, or attempts without end, break no report."""
    accepted = ACCEPTED._replace(attempts=2**40, at=NOW - age_seconds)
    packed = write_records([(DIGESTS[0], accepted)], now=NOW)
    ((_, attempts, _, age),) = read_records(packed)

    assert attempts == 0xFFFF
    assert age == pytest.approx(min(max(0.0, age_seconds), 2**32 / 1000), abs=0.01)


def test_the_largest_report_fits_into_a_message() -> None:
    """All four parts at once."""
    digests = write_digests(DIGESTS)
    sent = write_records([(digest, ACCEPTED) for digest in DIGESTS], now=NOW)
    report = Report(taken=digests, sent=sent, let_go=digests, asked=digests)

    assert len(write_message(new_worker_id(), report)) <= MAX_BYTES
    assert carried(report) == report


@pytest.mark.parametrize("model", [Report, Recent])
@pytest.mark.parametrize(
    "sent",
    [1, "!", "AAAA", "A" * 32 * (MAX_REPORTED + 1)],
    ids=["number", "no base64", "a part", "too many"],
)
def test_what_is_no_report_is_refused(model: type[Report | Recent], sent: object) -> None:
    """Only whole pieces, and no more than a message may hold."""
    with pytest.raises(ValidationError):
        model.model_validate({"to": "a", "sent": sent})
