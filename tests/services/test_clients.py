"""Each preset against the service's own client, and the sandbox in the service's place."""

import re
from dataclasses import replace
from types import ModuleType
from urllib.parse import quote

import pytest

from bridge.config.presets import documented_answers, preset_settings
from bridge.worker.fates import Answer, Fate
from tests.services import (
    android_sms_gateway,
    httpsms,
    infobip,
    messagebird,
    plivo,
    sinch,
    telnyx,
    twilio,
    vonage,
    vonage_sms,
)
from tests.services.comparison import (
    MESSAGES,
    VISIBLE,
    Message,
    Service,
    Verdict,
    said,
    send_ours,
)
from tests.services.sandbox import played
from tests.services.stub import Stub, in_json

MODULES: tuple[ModuleType, ...] = (
    *(android_sms_gateway, httpsms, infobip, messagebird, plivo),
    *(sinch, telnyx, twilio, vonage, vonage_sms),
)
SERVICES: dict[str, Service] = {module.SERVICE.preset: module.SERVICE for module in MODULES}
OF_OTHER_KEYS = [MESSAGES[name] for name in ("gsm-7", "no key", "a key with signs", "a long key")]
KEYED = {name: service for name, service in SERVICES.items() if service.key_in is not None}


async def assert_sends_the_same(service: Service, stub: Stub, message: Message) -> None:
    accepted = next(one for one in documented_answers(service.preset) if one["fate"] == "sent")
    stub.told = in_json(accepted["status"], accepted["body"])
    await send_ours(service, stub, message)
    ours = stub.only
    if service.key_in is not None:
        message = message._replace(key=service.key_in(ours))
    service.send(stub, message)
    theirs = stub.only

    assert said(ours, but={}) == said(theirs, but=service.own_headers)


@pytest.mark.parametrize("service", SERVICES.values(), ids=SERVICES)
async def test_request_is_the_clients(stub: Stub, service: Service) -> None:
    for message in MESSAGES.values():
        await assert_sends_the_same(service, stub, message)


async def test_receipts_are_asked_for_as_by_plivos_client(stub: Stub) -> None:
    url = "https://sms.example.com/webhooks/plivo"
    fields = preset_settings("plivo")["request"]["fields"]
    asking = replace(
        SERVICES["plivo"],
        send=lambda stub, message: plivo.send(stub, message, url=url),
        api={"account": plivo.AUTH_ID, "request": {"fields": {**fields, "/url": url}}},
    )

    await assert_sends_the_same(asking, stub, Message())


async def test_receipts_are_asked_for_as_by_sinchs_client(stub: Stub) -> None:
    wanted = "per_recipient_final"
    fields = preset_settings("sinch")["request"]["fields"]
    asking = replace(
        SERVICES["sinch"],
        send=lambda stub, message: sinch.send(stub, message, delivery_report=wanted),
        api={"request": {"fields": {**fields, "/delivery_report": wanted}}},
    )

    await assert_sends_the_same(asking, stub, Message())


def fate_of(answer: Answer) -> str:
    if answer.fate is Fate.SETUP:
        return f"setup:{answer.pause}"
    return answer.fate.value if answer.about is None else f"{answer.fate.value}:{answer.about}"


@pytest.mark.parametrize(
    ("preset", "name"),
    [(preset, name) for preset, service in SERVICES.items() for name in service.answers],
)
async def test_answer_is_read_as_by_the_client(stub: Stub, preset: str, name: str) -> None:
    """Or otherwise, where the service says so and why."""
    service = SERVICES[preset]
    known = service.answers
    assert service.otherwise.keys() <= known.keys()
    stub.told = known[name]
    answer = await send_ours(service, stub, Message())
    ours = Verdict(answer.fate is Fate.SENT, answer.provider_id, answer.code)
    try:
        theirs = Verdict(is_sent=True, provider_id=service.send(stub, Message()))
    except Exception as error:  # noqa: BLE001  clients raise what they like
        theirs = Verdict(is_sent=False, code=service.code_of(error))

    assert len(stub.requests) == 2
    if name in service.also:
        assert fate_of(answer) == service.also[name][1]
    if name in service.otherwise:
        assert ours != theirs
        assert fate_of(answer) == service.otherwise[name][0]
    else:
        assert ours == theirs


async def assert_carries_the_key(service: Service, stub: Stub, message: Message) -> None:
    """Fail unless our request holds the message's key: whole, or another one if it is too long."""
    assert service.key_in is not None
    await send_ours(service, stub, message)
    sent = service.key_in(stub.only)
    if message.key is None:
        assert re.fullmatch("[0-9a-f]{32}", sent)
        return
    key, most = quote(message.key, safe=VISIBLE), service.key_characters
    await send_ours(service, stub, message)

    assert service.key_in(stub.only) == sent
    assert sent == key if len(key) <= most else len(sent) <= most


@pytest.mark.parametrize("service", KEYED.values(), ids=KEYED)
async def test_key_is_carried(stub: Stub, service: Service) -> None:
    for message in OF_OTHER_KEYS:
        await assert_carries_the_key(service, stub, message)


async def test_key_stays_with_fields_of_ones_own(stub: Stub) -> None:
    """A gateway whose fields name no id is sent the key all the same."""
    gateway = SERVICES["android-sms-gateway"]
    fields = {"/phoneNumbers/0": "{to}", "/textMessage/text": "{text}", "/simNumber": 2}
    own = replace(gateway, api={**gateway.api, "request": {"fields": fields}})

    for message in OF_OTHER_KEYS:
        await assert_carries_the_key(own, stub, message)


@pytest.mark.parametrize("service", SERVICES.values(), ids=SERVICES)
def test_sandbox_takes_what_the_client_sends(stub: Stub, service: Service) -> None:
    with played(service, stub.certificate) as (place, memory):
        for number, message in enumerate(MESSAGES.values()):
            # A key that is odd or long the client refuses by itself.
            provider_id = service.send(place, message._replace(key=f"order-{number}"))
            taken = memory.messages[-1]

            assert (taken.id, taken.to, taken.text) == (provider_id, message.to, message.text)
            if "from" in service.settings(place).request.placeholders:
                assert (taken.sender or "").removeprefix("+") == message.sender_digits
        assert len(memory.messages) == len(MESSAGES)


@pytest.mark.parametrize("service", SERVICES.values(), ids=SERVICES)
def test_sandbox_refuses_a_client_with_another_key(stub: Stub, service: Service) -> None:
    with played(service, stub.certificate, key="another-key") as (place, memory):
        with pytest.raises(Exception) as raised:  # noqa: PT011  clients raise what they like
            service.send(place, Message())

        assert service.code_of(raised.value) == service.code_of_another_key
        assert [attempt.status is not None for attempt in memory.requests] == [True]
        assert not memory.messages
