"""Speak with the other workers of the queue, over the fanout exchange `<queue>.workers`.

Each worker hears what all say through a queue of its own, which ends with its connection. Nothing
is stored or confirmed: what a worker did not hear it has to ask again. This is on the connection
that publishes, since one that consumes must not be blocked by an alarm of the broker; and what is
cut there, or not read because too much is held, leaves the workers on speaking terms.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import Final, NoReturn

from bridge.amqp.channels import (
    RPC_TIMEOUT_SECONDS,
    closed_channel,
    describe_end,
    heed_cancellation,
)
from bridge.amqp.client import (
    Channel,
    ChannelClosed,
    ChannelNotFoundEntity,
    Connection,
)
from bridge.amqp.frames import Body
from bridge.amqp.properties import Properties
from bridge.deadline import Deadline
from bridge.telemetry.logs import Log
from bridge.topology.declarations import workers_exchange
from bridge.worker.cluster import fanout
from bridge.worker.cluster.beats import PRESENT, REMEMBERED, Beats
from bridge.worker.cluster.hearers import AnyFacts, Hear, Hearers
from bridge.worker.cluster.messages import (
    Beat,
    Bye,
    Facts,
    Hello,
    Message,
    new_worker_id,
    read_message,
    write_message,
)
from bridge.worker.cluster.outbox import Outbox
from bridge.worker.cluster.roster import Roster
from bridge.worker.metrics import WorkerMetrics

log = Log(__name__)

# How often this worker looks whether it hears its peers, and whether a beat is due.
LOOK_SECONDS: Final = 1.0
# How long to wait before another try to join, when the broker has refused one, and otherwise.
REFUSED_SECONDS: Final = 5.0
JOIN_AGAIN_SECONDS: Final = 0.5
# How long a worker that starts waits for the beats with which peers answer its hello; where nobody
# was before it, just long enough to hear those that start with it; with a broker that lets it join
# late, or not at all, the third.
ACQUAINTING_SECONDS: Final = 0.5
ALONE_SECONDS: Final = 0.05
MOST_ACQUAINTING_SECONDS: Final = 2.0
# How long a worker that stops waits for a connection on which to say so: time enough for the first
# tries to have another one.
LEAVING_SECONDS: Final = 3.0
REMEDY: Final = (
    "each worker decides for itself now; let the user configure, write and read what begins with "
    "the exchange's name; delete an exchange of that name that is of another type or durable; "
    "or set worker.coordination to off"
)


class Peers:
    """The other workers of one queue, as this one knows them; `worker_id` is its own name.

    `roster` says who was heard when. Unless `is_enabled`, it hears and says nothing.
    """

    def __init__(
        self,
        queue: str,
        *,
        is_enabled: bool,
        metrics: WorkerMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.worker_id = new_worker_id()
        self.roster = Roster(clock=clock)
        self.is_enabled = is_enabled
        self._exchange = workers_exchange(queue)
        self._metrics = metrics
        self._clock = clock
        self._connection: Connection | None = None
        # How often it has joined the exchange.
        self.joins = 0
        self._last_fault = ""
        self._has_passed_once = False
        self._is_refused = False
        self._beats = Beats(self.roster.beats)
        self._next_look_at = 0.0
        self._hearers = Hearers(metrics)
        self._in_each_beat: list[Callable[[], Facts | None]] = []
        self._each_second: list[Callable[[], None]] = []
        self._when_heard: list[Callable[[], None]] = []
        self._outbox = Outbox(self._exchange)
        self._has_joined = asyncio.Event()
        self._has_left = False
        self._is_acquainted = asyncio.Event()
        self.on(Hello, self._on_hello)
        self.on(Beat, self._on_beat)
        metrics.peers.set_function(lambda: self.count)
        metrics.coordination_up.set_function(lambda: self.is_up)

    @property
    def is_up(self) -> bool:
        """Whether it hears its peers, and the broker takes what it says."""
        return self._connection is not None and not self._connection.wire.is_blocked

    @property
    def expects_answers(self) -> bool:
        """Whether there are peers, heard in the last minute, that may answer, sooner or later."""
        is_there = self.is_enabled and not self._has_left and not self._is_refused
        return is_there and bool(self.roster.others(REMEMBERED))

    async def until_acquainted(self) -> None:
        """Return when those that are there have had time to say so, after this worker's start."""
        if self.is_enabled and not self._is_acquainted.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(MOST_ACQUAINTING_SECONDS):
                    await self._is_acquainted.wait()
            self._is_acquainted.set()

    @property
    def count(self) -> int:
        """How many peers were heard just now."""
        return len(self.roster.others(PRESENT))

    def tell(self, facts: Facts) -> None:
        """Say something to all peers, at once and unconfirmed; it is lost while not `is_up`."""
        self._say(facts)

    def _say(self, facts: Facts, *, queue: str | None = None) -> None:
        if self._has_left:
            return
        if self.is_up:
            self._outbox.put(write_message(self.worker_id, facts), queue=queue)
        else:
            self._outbox.lose()

    def on(self, facts: type[AnyFacts], hear: Hear[AnyFacts]) -> None:
        """Call `hear` with a peer's id and what it says, each time that it says facts of a kind.

        What does not fit the model is counted and goes no further. `hear` must not block.
        """
        self._hearers.add(facts, hear)

    def in_each_beat(self, facts: Callable[[], Facts | None]) -> None:
        """Have each beat carry facts beside, which peers hear as if they had been told alone."""
        self._in_each_beat.append(facts)

    def each_second(self, look: Callable[[], None]) -> None:
        """Call `look` each second while it is on the exchange, before a beat that is due."""
        self._each_second.append(look)

    def when_heard(self, tell: Callable[[], None]) -> None:
        """Call `tell` each time that the peers hear this worker again, for what they have missed.

        It has joined, or the broker takes again what is said and did not take all before.
        """
        self._when_heard.append(tell)

    def hurry_while(self, condition: Callable[[], bool]) -> None:
        """Beat each second as long as it is so, however many peers there are."""
        self._beats.hurry_while(condition)

    async def beside(
        self, serve: Callable[[Connection], Awaitable[None]], connection: Connection
    ) -> None:
        """Serve a connection that publishes, and speak with the peers on it as long as it lasts."""
        if not self.is_enabled:
            await serve(connection)
            return
        speaking = asyncio.create_task(self._keep_speaking(connection))
        try:
            await serve(connection)
        finally:
            speaking.cancel()
            await asyncio.gather(speaking, return_exceptions=True)

    async def until_joined(self, *, most_seconds: float) -> None:
        """Return when it is on the exchange, for its last words, or that takes too long.

        That is longer than `most_seconds`, or than a connection that was cut takes to come back. A
        worker that has no peers waits for nothing.
        """
        if self.expects_answers:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(most_seconds, LEAVING_SECONDS)):
                    await self._has_joined.wait()

    async def leave(self) -> None:
        """Say bye, so that no peer waits for this worker; returns when it is said, or cannot be."""
        self.tell(Bye())
        self._has_left = True
        if self.is_up:
            await self._outbox.until_all_said()

    # The exchange

    async def _keep_speaking(self, connection: Connection) -> NoReturn:
        while True:
            try:
                await self._speak(connection)
            except Exception as error:  # noqa: BLE001  aiormq raises more than its own classes
                heed_cancellation()
                # What is not found was deleted in this moment: the last worker has left, or a hand.
                found = not isinstance(error, ChannelNotFoundEntity)
                self._is_refused = isinstance(error, ChannelClosed) and found
                self._log_fault(describe_end(error), is_passing=not found)
            await asyncio.sleep(REFUSED_SECONDS if self._is_refused else JOIN_AGAIN_SECONDS)

    async def _speak(self, connection: Connection) -> None:
        """Join the exchange, and say what is to be said until the channel ends."""
        async with fanout.own_channel(connection) as channel:
            channel.closing.add_done_callback(lambda _: self._outbox.wake())
            with connection.wire.deliveries(channel, self._on_delivery) as callback:
                async with Deadline(RPC_TIMEOUT_SECONDS):
                    is_alone = not (self.joins or await fanout.is_there(connection, self._exchange))
                    # The broker may keep the queue of a connection that is dead: each time a new
                    # name.
                    self.joins += 1
                    queue = self._queue_of(self.worker_id, self.joins)
                    await fanout.join(channel, self._exchange, queue, callback)
                self._begin(connection, is_alone=is_alone)
                try:
                    while not channel.is_closed:
                        await self._say_all(channel)
                        await self._outbox.wait(self._next_look_at - self._clock())
                finally:
                    self._end()
            ended = channel.closing
            error = None if not ended.done() or ended.cancelled() else ended.exception()
            raise error or closed_channel(channel, "peers'")

    def _queue_of(self, worker_id: str, joins: int) -> str:
        return f"{self._exchange}.{worker_id}.{joins}"

    def _begin(self, connection: Connection, *, is_alone: bool) -> None:
        self._connection = connection
        self._has_passed_once = False
        self._is_refused = False
        self._next_look_at = self._clock() + LOOK_SECONDS
        self._outbox.begin()
        self.roster.resume()
        self._beats.begin()
        self.tell(Hello(joins=self.joins, beat_seconds=self._beats.seconds))
        self._tell_what_was_missed()
        self._has_joined.set()
        seconds = ALONE_SECONDS if is_alone else ACQUAINTING_SECONDS
        asyncio.get_running_loop().call_later(seconds, self._is_acquainted.set)

    def _end(self) -> None:
        self._connection = None
        self._has_joined.clear()
        self.roster.pause()
        self._outbox.end()

    async def _say_all(self, channel: Channel) -> None:
        if self._clock() >= self._next_look_at:
            self._next_look_at = self._clock() + LOOK_SECONDS
            self._look_after()
        await self._outbox.say_all(channel, may_say=lambda: self.is_up)

    def _look_after(self) -> None:
        # In an alarm of the broker nobody says anything, and is there nevertheless.
        if self.is_up:
            self.roster.resume()
        else:
            self.roster.pause()
        self.roster.tidy()
        self._outbox.look_for_echo(may_say=self.is_up)
        if self.is_up and self._outbox.has_lost:
            self._tell_what_was_missed()
        for look in self._each_second:
            look()
        if self._beats.is_due():
            self.tell(self._make_beat())

    def _tell_what_was_missed(self) -> None:
        self._outbox.has_lost = False
        for tell in self._when_heard:
            tell()

    def _log_fault(self, why: str, *, is_passing: bool) -> None:
        """Warn of a fault once; of one that passes by itself, only when it comes again."""
        # The broker names the queue, which is another one at each try.
        fault = why.replace(self._queue_of(self.worker_id, self.joins), "")
        is_again, self._has_passed_once = self._has_passed_once, is_passing
        if fault == self._last_fault or (is_passing and not is_again):
            log.debug("peers_not_joined", why=why)
        else:
            remedy = REMEDY if self._is_refused else None
            log.warning("peers_not_joined", exchange=self._exchange, why=why, remedy=remedy)
            self._last_fault = fault
        if self._is_refused:
            self._is_acquainted.set()

    # What is said and heard

    def _make_beat(self) -> Beat:
        beside = [facts for make in self._in_each_beat if (facts := make()) is not None]
        return Beat(
            beat_seconds=self._beats.seconds,
            beside={facts.kind: facts.model_dump(mode="json") for facts in beside},
        )

    def _on_delivery(
        self,
        _tag: int,
        _redelivered: bool,  # noqa: FBT001  as the wire calls it
        _properties: Properties,
        body: Body,
    ) -> None:
        try:
            message = read_message(body)
            if message is not None:
                self._hear(message)
        except ValueError:
            self._metrics.peer_messages_malformed.inc()
        except Exception:
            log.exception("internal_error", part="peers")

    def _hear(self, message: Message) -> None:
        if message.worker_id == self.worker_id:
            # Only now all works: who may not publish to the exchange has joined as well.
            self._outbox.note_echo()
            self._last_fault = ""
            return
        if message.kind == Bye.kind:
            self.roster.leave(message.worker_id)
        else:
            self.roster.note(message.worker_id)
        self._hearers.hand_on(message.worker_id, message.kind, message.facts)

    def _on_hello(self, worker_id: str, hello: Hello) -> None:
        self.roster.note(worker_id, hello.beat_seconds)
        # An earlier version does not name its queue.
        queue = None if hello.joins is None else self._queue_of(worker_id, hello.joins)
        self._say(self._make_beat(), queue=queue)

    def _on_beat(self, worker_id: str, beat: Beat) -> None:
        self.roster.note(worker_id, beat.beat_seconds)
        for kind, facts in beat.beside.items():
            self._hearers.hand_on(worker_id, kind, facts)
