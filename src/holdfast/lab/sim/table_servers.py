"""Simulates servers of tables and the workers that read and update rows, from one seed.

The machines are the product's (tables/core/), and the right answer to every read is known
beforehand. Servers die, freeze, are cut off and move, their memory changes by itself, workers die
and forget their last updates, and messages come late or never.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from holdfast.engine.core.errors import InvariantError, assert_never, require
from holdfast.lab.sim.server_moves import ROWS, ServerMoves, SimWorker
from holdfast.lab.sim.simulated_servers import LATER, RowMessages, RowTruth, SimServer
from holdfast.lab.sim.wrong_bits import Violation
from holdfast.tables.core.heirs import HolderAnswer
from holdfast.tables.core.holdings import (
    CopyArrived,
    CopyOffered,
    ShardStanding,
    UpdateArrived,
)
from holdfast.tables.core.placement import SHARDS, choose_part
from holdfast.tables.core.reading import (
    Ask,
    FindRight,
    Give,
    Lost,
    OrderCopy,
    OrderDrop,
    OrderLoad,
    OrderReset,
    RowReading,
    RowReadingEffect,
    WaitAgain,
    bring_up,
    can_begin_from,
    find_common,
)

#: Updates that a worker keeps, without the ones that reads do not see yet.
KEPT = 6
WAIT_S = 0.1
FILLING_S = 1.0  # a server gives rows their first values for up to this long


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSimOptions:
    """Describes a simulated job.

    `faults`, `moves`, `scales`: how many faults happen, how many moves of servers begin, and how
    often another number of servers is asked for, before `quiet_at` (seconds). `mistakes`: how often
    a server computes an update wrongly.
    """

    servers: int = 3
    replicas: int = 2
    workers: int = 3
    staleness: int = 0
    #: Steps from one checkpoint to the next; 0: there are none.
    saves_every: int = 0
    steps: int = 60
    faults: int = 12
    moves: int = 0
    scales: int = 0
    mistakes: int = 0
    quiet_at: float = 4.0
    ends_by: float = 120.0

    def rows_saved_at(self, step: int) -> int:
        """Return the number of updates of a checkpoint's rows: the updates that a read knows."""
        return max(step - self.staleness, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSimReport:
    """Counts the events of a run."""

    steps: int
    reads: int
    copies: int
    gives: int
    #: Number of times that the whole job began again, because rows were lost.
    restarts: int
    #: Shards that servers have dropped, because their memory had changed.
    damages: int
    #: Number of times that servers claimed different rows of a shard.
    disputes: int
    #: Wrong rows that were used, because no other server could be asked.
    unseen: int
    faults: int
    #: Number of servers that have moved.
    moves: int
    #: Number of times that all rows moved to another number of servers.
    scales: int


class TableWorld:
    """Runs one simulated job to its end; `run` raises Violation if a rule is broken."""

    def __init__(self, options: TableSimOptions, seed: int) -> None:
        self._options, self._dice = options, random.Random(seed)
        self._truth, self._time = RowTruth(), RowMessages(self._dice)
        counts = options.servers, options.replicas, options.workers
        self._moves = ServerMoves(self._time, self._truth, self._dice, counts)
        self._workers = self._moves.workers
        self._arrived: set[int] = set()
        self._saved = 0  # the newest checkpoint
        # The version to which the job has gone back.
        self._begun_from: int | None = None
        self._tokens = 0
        self._kept = KEPT + options.staleness
        counted = "reads", "copies", "gives", "restarts", "faults", "disputes", "unseen"
        self._counts = dict.fromkeys(counted, 0)

    def run(self) -> TableSimReport:
        """Simulate until every worker has taken all steps."""
        for _ in range(self._options.faults):
            self._time.call_at(self._dice.uniform(0.05, self._options.quiet_at), self._strike)
        for _ in range(self._options.moves):
            self._time.call_at(self._dice.uniform(0.05, self._options.quiet_at), self._moves.begin)
        for _ in range(self._options.scales):
            self._time.call_at(self._dice.uniform(0.05, self._options.quiet_at), self._moves.scale)
        for _ in range(self._options.mistakes):
            self._time.call_at(self._dice.uniform(0.05, self._options.quiet_at), self._moves.spoil)
        for worker in self._workers:
            self._time.call_at(self._dice.uniform(0, 0.05), self._starter(worker))
        while not self._is_over():
            self._time.step()
            if self._time.now > self._options.ends_by:
                raise Violation(f"no end in {self._options.ends_by:g} s: {self._workers}")
        least = min(worker.committed for worker in self._workers)
        return TableSimReport(
            steps=least,
            moves=self._moves.count,
            scales=self._moves.scaled,
            damages=self._moves.count_damages(),
            **self._counts,
        )

    def _is_over(self) -> bool:
        """Return whether all steps are taken, or the job is spoilt in a way that is not covered."""
        return self._counts["unseen"] > 0 or all(
            worker.committed >= self._options.steps for worker in self._workers
        )

    # ------------------------------------------------------------ workers

    def _starter(self, worker: SimWorker) -> Callable[[], None]:
        attempt = worker.attempt

        def start() -> None:
            if worker.attempt == attempt and worker.committed < self._options.steps:
                self._begin_read(worker)

        return start

    def _begin_read(self, worker: SimWorker) -> None:
        wanted = self._dice.sample(range(SHARDS), self._dice.randint(1, SHARDS))
        worker.version = max(worker.committed - self._options.staleness, 0)
        suspects = [
            number
            for number, (name, until) in worker.suspects.items()
            if self._time.now < until and self._time.servers[number].name == name
        ]
        holders = worker.find_holders(sorted(wanted))
        worker.found, worker.heard, worker.waits = {}, set(), False
        worker.reading = RowReading(
            worker.version,
            holders,
            worker.kept_after,
            suspects,
            self._begun_from,
            worker.replicas,
        )
        self._go_on(worker, worker.reading)

    def _go_on(self, worker: SimWorker, reading: RowReading) -> None:
        if worker.reading is not reading:
            return
        if reading.is_done:
            worker.reading = None
            self._counts["unseen"] += check_found(worker, self._truth)
            self._arrive(worker)
            return
        for effect in reading.next():
            self._carry_out(worker, reading, effect)

    def _carry_out(self, worker: SimWorker, reading: RowReading, effect: RowReadingEffect) -> None:
        match effect:
            case Ask():
                self._ask(worker, reading, effect)
            case FindRight():
                self._settle(worker, reading, effect)
            case OrderDrop(server, shard, version, claim):
                self._time.call(
                    server,
                    lambda target: target.drop_wrong(shard, version, claim),
                    lambda _: None,
                )
            case Give(server, after, shards):
                self._give(worker, server, after, shards)
            case OrderCopy():
                self._order_copy(effect)
            case OrderReset(server, shards):
                self._order_first_values(server, shards)
                self._go_on(worker, reading)
            case OrderLoad(server, shards):
                self._order_load(server, shards)
                self._go_on(worker, reading)
            case WaitAgain() if worker.waits:
                pass
            case WaitAgain():
                worker.waits = True

                def go_on_again() -> None:
                    if worker.reading is not reading:
                        return
                    worker.waits = False
                    reading.try_again(worker.find_holders(reading.missing))
                    self._go_on(worker, reading)

                self._time.call_after(WAIT_S, go_on_again)
            case Lost(shards):
                check_lost(worker, shards, self._moves)
                self._begin_again()
            case _:
                assert_never(effect)

    def _begin_server(
        self, worker: SimWorker, number: int, server: SimServer, *, follows: bool = False
    ) -> bool:
        """Give a process that has just started the shards that a worker expects there.

        `follows`: and any process, if the worker knows a newer layout. False: not now.
        """
        layout = worker.progress.layout.number
        if (server.layout < 0 or follows) and layout > server.layout:
            if self._time.is_writing(server):
                return False
            server.hold(worker.find_shards(number), layout)
        return True

    def _ask(self, worker: SimWorker, reading: RowReading, ask: Ask) -> None:
        version, number = worker.version, ask.server
        shards, name = ask.shards + ask.compared, self._time.servers[ask.server].name
        # A new connection sends the layout to the server.
        is_new = self._dice.random() < 0.1

        def act(server: SimServer) -> object:
            if not self._begin_server(worker, number, server, follows=is_new):
                return LATER
            server.drop_damaged(shards)
            standing = server.holdings.judge(version, shards)
            if not standing.can_serve:
                return standing
            return {shard: server.read(shard, version) for shard in shards}

        def answer(found: object) -> None:
            if worker.reading is not reading:
                return
            effects: list[RowReadingEffect] = []
            if found is None:
                worker.suspects[number] = name, self._time.now + 1.0
                reading.record_silence(number)
            elif isinstance(found, ShardStanding):
                effects = reading.record_refusal(number, shards, found)
            else:
                assert isinstance(found, dict)
                self._counts["reads"] += len(ask.shards)
                worker.heard |= set(found.items())
                worker.found |= {shard: found[shard] for shard in ask.shards}
                effects = reading.record_answer(number, ask.shards, found)
            for effect in effects:
                self._carry_out(worker, reading, effect)
            self._go_on(worker, reading)

        self._time.call(number, act, answer)

    def _settle(self, worker: SimWorker, reading: RowReading, dispute: FindRight) -> None:
        """Settle a dispute as a worker, as tables/row_reader.py does."""
        self._counts["disputes"] += 1

        def settle() -> None:
            if worker.reading is not reading:
                return
            servers = [self._time.servers[number] for number, _ in dispute.claims]
            claims, right = judge(worker, dispute, servers, self._truth, self._time.now)
            for effect in reading.settle(dispute.shard, claims, right):
                if isinstance(effect, Lost):
                    self._begin_again()
                else:
                    self._carry_out(worker, reading, effect)
            self._go_on(worker, reading)

        self._time.call_after(self._time.latency(), settle)

    def _give(self, worker: SimWorker, number: int, after: int, shards: tuple[int, ...]) -> None:
        require(after >= worker.kept_after, "an update that is not kept was to be given")
        for update in range(after + 1, worker.committed + 1):
            self._counts["gives"] += 1
            self._send_update(worker, number, update, shards)

    def _send_update(
        self, worker: SimWorker, number: int, update: int, shards: tuple[int, ...]
    ) -> None:
        self._tokens += 1
        event = UpdateArrived(update, shards, self._tokens)
        attempt = worker.attempt

        def act(server: SimServer) -> object:
            if not self._begin_server(worker, number, server, follows=True):
                return LATER
            server.handle(event)
            layout = worker.progress.layout.number
            oldest = max(update - self._options.staleness, 0)
            return server.name, layout, server.holdings.judge_span(oldest, update, shards)

        def answer(found: object) -> None:
            if found is None:
                worker.progress.record_silence(ROWS, number)
            if isinstance(found, tuple) and worker.attempt == attempt:
                name, layout, standing = found
                told = HolderAnswer(number, name, layout, shards, standing)
                worker.progress.record_answer(ROWS, told)
                self._moves.report_complete(worker)
                holders = worker.find_holders(shards)
                known = replace(standing, past=())
                for effect in bring_up(number, update, known, worker.kept_after, holders):
                    if isinstance(effect, Give):
                        self._give(worker, effect.server, effect.after, effect.shards)
                    elif isinstance(effect, OrderCopy):
                        self._order_copy(effect)

        self._time.call(number, act, answer)

    def _arrive(self, worker: SimWorker) -> None:
        """Commit the step once all workers have read and computed."""
        self._arrived.add(worker.number)
        if len(self._arrived) < len(self._workers):
            return
        self._arrived.clear()
        every, step = self._options.saves_every, worker.committed + 1
        if every and step % every == 0:
            self._saved = step
        for each in self._workers:
            each.committed += 1
            each.kept_after = max(each.kept_after, each.committed - self._kept)
            self._push(each)
            self._time.call_after(self._dice.uniform(0.001, 0.03), self._starter(each))

    def _push(self, worker: SimWorker) -> None:
        """Send the update of this worker's part of the shards to all servers of these shards."""
        update, mine = worker.committed, worker.number
        due = choose_part(range(SHARDS), update, (mine, len(self._workers)))
        for number in worker.list_servers():
            shards = worker.find_shards(number)
            held = tuple(shard for shard in due if shard in shards)
            if held and self._dice.random() > 0.03:
                self._send_update(worker, number, update, held)

    def _order_copy(self, order: OrderCopy) -> None:
        """Order one server to fetch shards from another one."""

        def fetch(target: SimServer) -> object:
            wanted = target.handle(CopyOffered(order.shards, order.version))
            if not wanted:
                return None
            self._counts["copies"] += 1

            def give(origin: SimServer) -> object:
                origin.drop_damaged(wanted)
                held = [shard for shard in wanted if shard in origin.values]
                return {s: (origin.holdings.version(s), origin.values[s]) for s in held}

            def receive(found: object) -> None:
                rows = found if isinstance(found, dict) else {}
                copies = [(CopyArrived(s, version), value) for s, (version, value) in rows.items()]
                self._time.bring(target, copies, set(wanted))

            self._time.call(order.source, give, receive)
            return None

        self._time.call(order.server, fetch, lambda _: None)

    def _order_first_values(self, number: int, shards: tuple[int, ...]) -> None:
        """Order a server to give rows their first values."""
        self._offer(number, shards, 0, self._dice.uniform(0.0, FILLING_S))

    def _order_load(self, number: int, shards: tuple[int, ...]) -> None:
        """Order a server to load shards from the checkpoint from which the job has begun."""
        version = self._begun_from
        assert version is not None, "there is a checkpoint"
        self._offer(number, shards, version, self._time.latency())

    def _offer(self, number: int, shards: tuple[int, ...], version: int, delay_s: float) -> None:
        """Return a server to right rows as of a version, which no other server gives it."""

        def begin(target: SimServer) -> None:
            wanted = target.handle(CopyOffered(shards, version, replaces=True))

            copies = [
                (CopyArrived(s, version, replaces=True), self._truth.value(s, version))
                for s in wanted
            ]
            if wanted:
                bring = functools.partial(self._time.bring, target, copies, set(wanted))
                self._time.call_after(delay_s, bring)

        self._time.call(number, begin, lambda _: None)

    def _begin_again(self) -> None:
        """Start the whole job with its first step."""
        self._counts["restarts"] += 1
        rows = self._options.rows_saved_at(self._saved)
        self._begun_from = rows if self._saved else None
        self._arrived.clear()
        for worker in self._workers:
            # The state has the updates that the rows in the checkpoint do not have yet.
            worker.committed, worker.kept_after = self._saved, rows
            worker.attempt += 1
            worker.reading = None
            self._time.call_after(self._dice.uniform(0.01, 0.1), self._starter(worker))

    # ------------------------------------------------------------ faults

    def _strike(self) -> None:
        self._counts["faults"] += 1
        server = self._time.servers[self._dice.choice(self._moves.list_running())]
        match self._dice.choice(("kill", "kill", "freeze", "cut", "forget", "flip")):
            case "kill":
                server.is_dead = True
                delay_s = self._dice.choice((0.02, 0.2, 1.0))
                self._time.call_after(delay_s, lambda: self._moves.restart(server))
            case "flip" if not server.is_dead and server.values:
                shards = self._dice.sample(sorted(server.values), min(2, len(server.values)))
                for shard in shards:
                    server.flip(shard, self._dice.randrange(60))
            case "freeze" | "flip":
                server.frozen_until = self._time.now + self._dice.uniform(0.1, 1.5)
            case "cut":
                server.cut_until = self._time.now + self._dice.uniform(0.1, 1.5)
            case _:
                worker = self._workers[self._dice.randrange(len(self._workers))]
                worker.kept_after = worker.committed  # another process has taken its place
                worker.attempt += 1
                self._moves.replace_worker(worker)
                if worker.reading is not None:
                    worker.reading = None
                    self._time.call_after(self._time.latency(), self._starter(worker))
                elif worker.number not in self._arrived:
                    self._time.call_after(0.05, self._starter(worker))


def draw_options(seed: int) -> TableSimOptions:
    """Draw a job from a seed: its servers, replicas, workers, staleness and faults."""
    dice = random.Random(f"tables {seed}")
    servers, staleness = dice.randint(1, 5), dice.choice((0, 0, 1, 8))
    return TableSimOptions(
        servers=servers,
        replicas=dice.randint(1, min(servers, 3)),
        workers=dice.randint(1, 4),
        staleness=staleness,
        saves_every=dice.choice((0, 7)),
        faults=dice.choice((0, 4, 12, 30)),
        moves=dice.choice((0, 2, 8)),
        scales=dice.choice((0, 0, 2, 6)),
        mistakes=dice.choice((0, 0, 0, 3, 20)),
    )


def find_failure(seed: int) -> str:
    """Run one seed; return the rule that it breaks, or an empty text."""
    try:
        TableWorld(draw_options(seed), seed).run()
    except (Violation, InvariantError) as error:
        return str(error)
    return ""


def check_found(worker: SimWorker, truth: RowTruth) -> int:
    """Check the rows that a worker is about to use; return how many are wrong unseen.

    They may be wrong only if a server has computed wrongly, and no other one has answered, or
    servers have copied the wrong rows before that was noticed.
    """
    unseen = 0
    for shard, value in worker.found.items():
        right = truth.value(shard, worker.version)
        if value == right:
            continue
        is_known = (shard, right) in worker.heard and shard not in truth.spread
        if shard not in truth.spoilt or is_known:
            raise Violation(
                f"worker {worker.number} has read shard {shard} as of {worker.version}, and it "
                "was not as it was then"
            )
        unseen += 1
    return unseen


def check_lost(worker: SimWorker, shards: Sequence[int], moves: ServerMoves) -> None:
    """Check that no server has the rows that a worker gives up."""
    for shard in shards:
        for server in moves.find_holders(shard):  # whether the worker knows it or not
            standing = server.holdings.judge(worker.version, [shard])
            if not server.is_dead and standing.can_serve:
                raise Violation(
                    f"shard {shard} was given up as of {worker.version}, but server "
                    f"{server.number} has it"
                )


def judge(
    worker: SimWorker,
    dispute: FindRight,
    servers: Sequence[SimServer],
    truth: RowTruth,
    now: float,
) -> tuple[dict[int, int], int | None]:
    """Return the claims of these servers by now, and the right one, as a worker finds them out.

    It does as tables/row_reader.py: it applies the updates that it keeps to rows on which the
    servers agree.
    """
    shard, version = dispute.shard, worker.version
    asked, claims, heard = dict[int, SimServer](), dict[int, int](), dict[int, int]()
    for (number, before), server in zip(dispute.claims, servers, strict=True):
        if server.is_silent(now):
            heard[number] = before
        elif (value := server.find(shard, version)) is not None:
            claims[number] = heard[number] = value
            asked[number] = server
    if not claims:
        return claims, None
    for start in range(version - 1, worker.kept_after - 1, -1):
        found = {n: server.find(shard, start) for n, server in asked.items()}
        earlier = {n: value for n, value in found.items() if value is not None}
        if can_begin_from(earlier, heard):
            value = next(iter(earlier.values()))
            return claims, truth.grow_from(shard, value, start, version)
    if worker.kept_after == 0:
        return claims, truth.value(shard, version)
    return claims, find_common([*heard.values(), *(claim for _, claim in dispute.claims)])
