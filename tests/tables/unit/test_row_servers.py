"""One server's rows and requests, in this process: the same bits as a worker's own tables."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from holdfast.engine.core.errors import UserError, WireError
from holdfast.engine.core.hosted_service import ServerLayout
from holdfast.engine.core.job_spec import ServerSettings
from holdfast.engine.net import peer_stream
from holdfast.engine.net.tls import PeerIdentity
from holdfast.engine.state.store.checkpoints import Checkpoints
from holdfast.engine.state.store.files import FileStorage
from holdfast.engine.train.script.service_link import ServiceLink
from holdfast.tables import SGD, Adagrad, LazyAdam, RowOptimizer, RowWiseAdagrad
from holdfast.tables import server_wire as wire
from holdfast.tables.core.holdings import BARE, ShardStanding
from holdfast.tables.core.placement import SHARDS, find_holders, find_shards, share_out
from holdfast.tables.row_client import KEPT, RowClient
from holdfast.tables.row_optimizers import TableOptimizer
from holdfast.tables.served_tables import ServedOptimizer
from holdfast.tables.server_access import ServerAccess
from holdfast.tables.server_group import ServerGroup, ShardRows, fill_shard
from holdfast.tables.server_rows import RowBlock, RowUpdate
from holdfast.tables.serving import RowServer
from holdfast.tables.table_set import write_shard
from holdfast.tables.table_shape import TableShape, fill_rows
from holdfast.tables.table_store import TableStore
from support import until

RULES = [SGD(lr=0.1, momentum=0.9), Adagrad(lr=0.1), RowWiseAdagrad(lr=0.1), LazyAdam(lr=0.01)]
IDENTITY = PeerIdentity(key=b"k" * 32)
ROWS, DIM, STEPS = 75, 5, 6


def shape(name: str, count: int = ROWS, dim: int = DIM) -> TableShape:
    return TableShape(name=name, count=count, dim=dim, seed=7, limits=(-1.0, 1.0), padding=3)


def group(rule: RowOptimizer, *names: str, dim: int = DIM) -> wire.TableGroup:
    name, settings = wire.describe_rule(rule)
    tables = tuple(shape(each, dim=dim) for each in names)
    return wire.TableGroup(name="+".join(names), tables=tables, rule=name, settings=settings)


def ids(step: int, seed: int) -> torch.Tensor:
    dice = torch.Generator().manual_seed(1000 * step + seed)
    return torch.randint(0, ROWS, (20,), generator=dice).unique()


def update(step: int, tables: int) -> RowUpdate:
    keys = [ids(step, i) for i in range(tables)]
    dice = torch.Generator().manual_seed(step)
    grads = [torch.randn(len(each), DIM, generator=dice) for each in keys]
    return RowUpdate(keys=keys, grads=grads, steps=[step] * tables, rates=[0.1] * tables)


STARTED: list[RowServer] = []


@pytest.fixture(autouse=True)
def close_servers() -> Iterator[None]:
    """Close all servers of a test: their threads would disturb the end of this process."""
    yield
    while STARTED:
        STARTED.pop().close()


def start_server(say: Callable[[str], None], store: TableStore | None = None) -> RowServer:
    STARTED.append(RowServer(IDENTITY, say, store))
    return STARTED[-1]


class Servers:
    """Starts servers in this process; `addresses` are theirs."""

    def __init__(self, count: int, replicas: int = 1, store: Path | None = None) -> None:
        self.lost: list[str] = []
        self.count, self.replicas = count, replicas
        self.heirs: dict[int, str] = {}  # addresses
        self.complete: tuple[str, ...] = ()  # heirs that have all rows
        self.log: list[str] = []
        kept = TableStore(Checkpoints(FileStorage(store))) if store is not None else None
        self.servers = [start_server(self.log.append, kept) for _ in range(count)]
        self.addresses = [server.listen("127.0.0.1") for server in self.servers]

    def client(self, described: wire.TableGroup) -> RowClient:
        return RowClient(described, self.access())

    def access(self, staleness: int = 0) -> ServerAccess:
        def lose(why: str) -> None:
            raise UserError(why)

        def report(complete: tuple[str, ...], layout: ServerLayout) -> None:
            self.complete = complete

        link = ServiceLink(
            settings=ServerSettings(count=self.count, replicas=self.replicas, staleness=staleness),
            identity=IDENTITY,
            layout=ServerLayout(count=self.count, goal=self.count),
            find_address=lambda number: self.addresses[number],
            find_heir=lambda number: self.heirs.get(number, ""),
            find_part=lambda: (0, 1),
            report=report,
            lose=lose,
            note=self.log.append,
        )
        self.watch = ServerAccess(link)
        return self.watch


def fill(made: ServerGroup) -> ServerGroup:
    """Give all rows of a group their first values."""
    for shard in made.tables.shards:
        fill_shard(made, shard)
    return made


def everything(client: RowClient, version: int, tables: int) -> list[torch.Tensor]:
    return client.read(version, [torch.arange(ROWS)] * tables)


def expected(rule: RowOptimizer, steps: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the rows and slots of a worker's own table after some updates."""
    weight = torch.nn.Parameter(torch.empty(ROWS, DIM))
    with torch.no_grad():
        keys = torch.arange(ROWS).numpy().astype("uint64")
        fill_rows(weight, keys, 7, -1.0, 1.0)
        weight[3] = 0.0
    optimizer = TableOptimizer([weight], rule)
    optimizer.param_groups[0]["lr"] = 0.1
    for step in range(1, steps + 1):
        given = update(step, 1)
        weight.grad = torch.sparse_coo_tensor(given.keys[0][None], given.grads[0], weight.shape)
        optimizer.step()
    state = {n: v for n, v in optimizer.state[weight].items() if n in rule.slots(DIM)}
    return weight.detach(), state


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
@pytest.mark.parametrize(("servers", "replicas"), [(1, 1), (3, 2)])
def test_rows_have_the_bits_of_a_workers_own(
    rule: RowOptimizer, servers: int, replicas: int
) -> None:
    client = Servers(servers, replicas).client(group(rule, "items"))
    for step in range(STEPS + 1):
        assert torch.equal(everything(client, step, 1)[0], expected(rule, step)[0])
        client.push(step + 1, update(step + 1, 1))


def test_rows_travel_as_float16_if_a_step_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Servers(2).client(group(RULES[1], "items"))
    client.push(1, update(1, 1))
    rows = everything(client, 1, 1)[0]
    sent: list[int] = []
    send = wire.send_array

    def count(channel: socket.socket, array: torch.Tensor) -> None:
        sent.append(array.nbytes)
        send(channel, array)

    monkeypatch.setattr(wire, "send_array", count)
    keys = torch.arange(ROWS)
    (halves,) = client.read(1, [keys], as_half=True)
    assert sum(sent) == keys.nbytes + rows.nbytes // 2
    assert torch.equal(halves, rows.half().float())
    assert not torch.equal(halves, rows)
    assert (halves - rows).abs().le(rows.abs() / 2048 + 2**-25).all()


def test_numbers_beyond_float16_become_its_largest() -> None:
    given = torch.tensor([1e9, -1e9, 65504.0, 0.1, float("nan")])
    halves = wire.round_to_half(given)
    assert halves[:3].tolist() == [65504.0, -65504.0, 65504.0]
    assert float(halves[3]) == pytest.approx(0.1, rel=1 / 2048)
    assert halves[4].isnan()


@pytest.mark.parametrize("staleness", [0, 3])
def test_rows_can_be_read_as_of_an_earlier_update(staleness: int) -> None:
    described = msgspec.structs.replace(group(RULES[1], "items"), staleness=staleness)
    client = Servers(2).client(described)
    for step in range(1, STEPS + 1):
        client.push(step, update(step, 1))
    for step in reversed(range(STEPS + 1)):
        assert torch.equal(everything(client, step, 1)[0], expected(RULES[1], step)[0])


def test_the_undos_of_updates_are_kept_for_a_while_only() -> None:
    block = RowBlock([shape("items")], range(SHARDS), RULES[1])
    (table,) = block.tables
    for shard in range(SHARDS):
        arrays = [part.clone() for part in table.parts(shard)]
        table.fill(shard, arrays)
        write_shard(table, shard, arrays)
        table.seal(shard, table.sum_up(shard, arrays))
    for step in range(1, STEPS + 1):
        block.prepare(step, range(SHARDS), update(step, 1)).apply()
    block.forget_undos(STEPS)
    now, _ = expected(RULES[1], STEPS)
    (found,) = block.read([torch.arange(ROWS)], 0)
    assert torch.equal(found, now)


def test_a_checkpoint_of_a_release_without_staleness_is_read() -> None:
    made = Servers(1)
    optimizer = ServedOptimizer(
        [torch.nn.Parameter(torch.zeros(ROWS, DIM))], [shape("a")], RULES[1]
    )
    optimizer.connect(made.access())
    old = optimizer.state_dict()
    for key in ("unread", "staleness"):
        del old["param_groups"][0][key]
    optimizer.load_state_dict(old)
    optimizer.note_checkpoint(0)
    (found,) = optimizer.find_rows([torch.arange(3)])
    assert found.unique.tolist() == [0, 1, 2]


@pytest.mark.parametrize(("steps", "most"), [(1, 0), (-1, 0), (9, 8)])
def test_a_staleness_that_the_job_does_not_allow_is_refused(steps: int, most: int) -> None:
    weight = torch.nn.Parameter(torch.zeros(ROWS, DIM))
    here, there = (
        TableOptimizer([weight], RULES[1]),
        ServedOptimizer([weight], [shape("a")], RULES[1]),
    )
    there.connect(Servers(1).access(staleness=most))
    with pytest.raises(UserError, match=rf"set_staleness\({steps}\): give 0 to {most}"):
        there.set_staleness(steps)
    with pytest.raises(UserError, match="give 0 to 0"):
        here.set_staleness(steps)
    here.set_staleness(0)
    there.set_staleness(most)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
@pytest.mark.parametrize("servers", [1, 5])
def test_any_number_of_servers_loads_the_rows_that_three_have_saved(
    rule: RowOptimizer, servers: int, tmp_path: Path
) -> None:
    described = group(rule, "items", "users")
    three = Servers(3, 2, tmp_path).client(described)
    for step in range(1, STEPS + 1):
        three.push(step, update(step, 2))
    everything(three, STEPS, 2)
    store = Checkpoints(FileStorage(tmp_path))
    three.save(STEPS, 40, "token", 1, share_out(find_holders(3, 2)))
    # Updates continue while rows are saved.
    three.push(STEPS + 1, update(STEPS + 1, 2))
    first = store.begin(40, "token", 0)
    first.commit([first.write([], 0), *first.gather(4, 30.0)], {})
    assert store.verify(40) == []

    others = Servers(servers, 1, tmp_path)
    client = others.client(described)
    client.begin_from(STEPS, 40)
    found = everything(client, STEPS, 2)
    wanted, slots = expected(rule, STEPS)
    assert torch.equal(found[0], wanted)
    arrays = [[] for _ in slots]
    for number, server in enumerate(others.servers):
        held = server._groups["items+users"]
        for shard in find_shards(number, find_holders(servers, 1)):
            parts = held.copy(shard).arrays
            for i in range(len(slots)):
                arrays[i].append((shard, parts[1 + i]))
    for name, parts in zip(slots, arrays, strict=True):
        for shard, part in parts:
            rows = torch.arange(shard, ROWS, SHARDS)
            assert torch.equal(part[: len(rows)], slots[name][rows])


def test_a_checkpoint_of_other_tables_is_not_loaded(tmp_path: Path) -> None:
    three = Servers(1, 1, tmp_path).client(group(RULES[1], "items"))
    three.push(1, update(1, 1))
    everything(three, 1, 1)
    store = Checkpoints(FileStorage(tmp_path))
    three.save(1, 40, "token", 1, {0: range(SHARDS)})
    first = store.begin(40, "token", 0)
    first.commit([first.write([], 0), *first.gather(2, 30.0)], {})
    others = Servers(1, 1, tmp_path)
    loads = others.servers[0]
    channel = peer_stream.connect(others.addresses[0], IDENTITY, wire.MAGIC, (0, 0, 0), 20.0)
    described = group(RULES[1], "users")
    peer_stream.send_message(channel, wire.BeginGroup(described, tuple(range(SHARDS))))
    assert not peer_stream.receive_message(channel, wire.Answer).problem
    peer_stream.send_message(channel, wire.LoadShards("users", 40, (0, 1), 1))
    peer_stream.receive_message(channel, wire.Answer)
    until(lambda: others.log, "a line in the log")
    assert others.log[0].startswith(
        "shards [0, 1] of users cannot be copied: the checkpoint of step 40 has no rows of users"
    )
    assert not loads._groups["users"].judge(40, [0, 1]).copying


def test_an_heir_copies_the_rows_of_its_server_and_takes_its_place() -> None:
    servers, step = Servers(2), 0
    client = servers.client(group(RULES[1], "items"))

    def push() -> tuple[str, ...]:
        nonlocal step
        step += 1
        client.push(step, update(step, 1))
        everything(client, step, 1)  # so that no update is dropped from a full queue
        return servers.complete

    while step < KEPT + 5:  # more than a worker could give the heir
        push()
    heir = start_server(servers.log.append)
    servers.heirs[0] = heir.listen("127.0.0.1")
    until(lambda: push() == (servers.heirs[0],), "the heir has all rows")
    servers.addresses[0] = servers.heirs.pop(0)
    servers.servers[0].close()
    until(lambda: push() == (), "there is no heir any more")
    assert torch.equal(everything(client, step, 1)[0], expected(RULES[1], step)[0])
    assert not client.reader.find_suspects()


def test_an_heir_is_asked_if_its_server_has_lost_its_rows() -> None:
    servers, described = Servers(1), group(RULES[1], "items")
    client, step = servers.client(described), 0
    heir = start_server(servers.log.append)
    servers.heirs[0] = heir.listen("127.0.0.1")
    while servers.complete != (servers.heirs[0],) or step < KEPT + 5:
        step += 1
        client.push(step, update(step, 1))
        everything(client, step, 1)
    servers.servers[0].close()
    servers.addresses[0] = start_server(servers.log.append).listen("127.0.0.1")
    assert torch.equal(everything(client, step, 1)[0], expected(RULES[1], step)[0])


def test_the_heir_of_a_server_without_shards_is_complete_at_once() -> None:
    servers = Servers(SHARDS)
    book = (client := servers.client(group(RULES[1], "items"))).book
    empty = next(n for n in range(SHARDS) if not book.find_shards(n, book.layout))
    servers.heirs[empty] = "127.0.0.1:1"
    client.push(1, update(1, 1))
    assert servers.complete == ("127.0.0.1:1",)


@pytest.mark.parametrize("staleness", [0, 3])
def test_rows_come_to_another_number_of_servers_while_they_are_used(staleness: int) -> None:
    servers, step = Servers(2), 0
    described = group(RULES[1], "items")
    client = RowClient(
        msgspec.structs.replace(described, staleness=staleness), servers.access(staleness)
    )

    def push() -> tuple[str, ...]:
        nonlocal step
        step += 1
        client.push(step, update(step, 1))
        everything(client, max(step - staleness, 0), 1)
        return servers.complete

    def scale(number: int, count: int, goal: int) -> None:
        servers.watch.change_layout(ServerLayout(number=number, count=count, goal=goal))
        used = set(servers.addresses[: max(count, goal)])
        until(lambda: used <= set(push()), "all servers have their rows")
        servers.watch.change_layout(ServerLayout(number=number + 1, count=goal, goal=goal))
        holders, known = find_holders(goal, 1), [s._groups["items"] for s in servers.servers]

        def are_laid_out() -> bool:
            push()
            return all(known[n].tables.shards == find_shards(n, holders) for n in range(goal))

        until(are_laid_out, "servers hold no other rows")

    while step < KEPT + 5:  # more than a worker could give to a new server
        push()
    servers.servers.append(start_server(servers.log.append))
    servers.addresses.append(servers.servers[2].listen("127.0.0.1"))
    scale(1, 2, 3)
    scale(3, 3, 1)
    for server in servers.servers[1:]:
        server.close()
    assert torch.equal(everything(client, step, 1)[0], expected(RULES[1], step)[0])
    assert not servers.lost


def test_a_server_without_memory_for_its_new_rows_is_reported_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    servers, step = Servers(2), 0
    client = servers.client(group(RULES[1], "items"))

    def push() -> list[str]:
        nonlocal step
        step += 1
        client.push(step, update(step, 1))
        everything(client, step, 1)
        return [line for line in servers.log if "takes no updates" in line]

    push()
    monkeypatch.setattr("holdfast.tables.table_set.check_room", refuse)
    servers.watch.change_layout(ServerLayout(number=1, count=2, goal=1))
    until(push, "a line")
    for _ in range(5):
        push()
    assert push() == [
        "server 0 takes no updates: the server cannot hold these tables: no room for 1 GB"
    ]
    assert servers.addresses[0] not in servers.complete
    monkeypatch.undo()
    until(lambda: push() and servers.addresses[0] in servers.complete, "all rows are there")


def refuse(size: int) -> None:
    if size:
        raise RuntimeError("no room for 1 GB")


def test_what_is_told_of_an_older_layout_changes_nothing() -> None:
    found = fill(ServerGroup(group(RULES[1], "items"), (0, 1), layout=4))
    found.hold((2, 3), 4)
    assert found.tables.shards == (0, 1)
    found.hold((1, 2), 5)
    assert found.tables.shards == (1, 2)
    assert found.read(0, (0,), [torch.tensor([16])]) == ShardStanding(past=(0,))
    found.update(1, range(SHARDS), update(1, 1))
    assert isinstance(found.read(1, (1,), [torch.tensor([1])]), ShardRows)
    found.hold((0, 1), 6)
    assert found.read(1, (0,), [torch.tensor([16])]) == ShardStanding(behind=((0, BARE),))
    fill_shard(found, 0)
    read = found.read(0, (0,), [torch.tensor([16])])
    assert isinstance(read, ShardRows)
    (rows,) = read.arrays
    assert torch.equal(rows, everything(Servers(1).client(found.group), 0, 1)[0][16:17])
    assert found.take_dropped() == (), "nothing counts as damaged"


def test_workers_that_describe_tables_differently_are_told() -> None:
    servers = Servers(1)
    everything(servers.client(group(RULES[1], "items")), 0, 1)
    with pytest.raises(UserError, match="table items: two workers describe it differently"):
        servers.client(group(RULES[1], "items", dim=8)).read(0, [torch.arange(2)])
    with pytest.raises(UserError, match="another optimizer under this name"):
        everything(servers.client(group(RULES[0], "items")), 0, 1)


def test_rows_that_nobody_has_are_given_up() -> None:
    client = Servers(2).client(group(RULES[1], "items"))
    with pytest.raises(UserError, match=r"rows of items are lost: .* as they were after 9 updates"):
        everything(client, 9, 1)


@pytest.mark.parametrize(
    ("request_", "follows"),
    [
        (wire.ReadRows("items", 0, (0,), (1,)), torch.tensor([-16])),
        (wire.ReadRows("items", 0, (0,), (1,)), torch.tensor([80])),
        (wire.ReadRows("items", 0, (0,), (1,)), torch.tensor([1])),
        (wire.ReadRows("items", 0, (99,), (0,)), torch.empty(0, dtype=torch.int64)),
        (wire.ReadRows("items", 0, (0,), (1, 1)), torch.tensor([0, 0])),
        (wire.ReadRows("items", 0, (0,), (-1,)), torch.empty(0)),
        (wire.ReadRows("items", 0, (0,), (1 << 60,)), torch.empty(0)),
        (wire.GiveUpdate("others", 1, (0,), (1,), (1,), (0.1,), 1), torch.tensor([0])),
        (wire.GiveUpdate("items", 1, (0,), (1,), (), (0.1,), 1), torch.tensor([0])),
        (wire.CopyShard("items", 99), torch.empty(0)),
    ],
)
def test_a_request_that_no_worker_sends_ends_its_connection_only(
    request_: wire.Request, follows: torch.Tensor
) -> None:
    servers = Servers(1)
    client = servers.client(group(RULES[1], "items"))
    before = everything(client, 0, 1)[0]
    channel = peer_stream.connect(servers.addresses[0], IDENTITY, wire.MAGIC, (0, 0, 0), 20.0)
    peer_stream.send_message(channel, request_)
    wire.send_array(channel, follows)
    with pytest.raises((WireError, ConnectionError)):
        peer_stream.receive_message(channel, wire.Answer)
    assert torch.equal(everything(client, 0, 1)[0], before)


def test_a_process_with_another_key_is_not_served() -> None:
    servers = Servers(1)
    other = PeerIdentity(key=b"o" * 32)
    with pytest.raises((WireError, OSError)):
        peer_stream.connect(servers.addresses[0], other, wire.MAGIC, (0, 0, 0), 20.0)


def test_bytes_of_strangers_do_no_harm() -> None:
    servers = Servers(1)
    host, _, port = servers.addresses[0].rpartition(":")
    with socket.create_connection((host, int(port))) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert stranger.recv(100) == b""
    assert len(everything(servers.client(group(RULES[1], "items")), 0, 1)[0]) == ROWS


def test_orders_wait_until_no_answer_is_on_its_way() -> None:
    """A server that is behind is ordered to copy while it is also asked for other shards."""
    servers = Servers(2, 2)
    client = servers.client(group(RULES[1], "items"))
    everything(client, 0, 1)
    behind = servers.servers[1]._groups["items"]
    mine = share_out(find_holders(2, 2))[1]
    late, asked = mine[0], mine[1]
    for number in range(1, KEPT + 2):
        given = update(number, 1)
        servers.servers[0]._groups["items"].update(number, range(SHARDS), given)
        chosen = shape("items").are_in([asked], given.keys[0])
        part = RowUpdate(
            keys=[given.keys[0][chosen]],
            grads=[given.grads[0][chosen]],
            steps=[number],
            rates=[0.1],
        )
        behind.update(number, [asked], part)
    read = client.read(KEPT + 1, [torch.arange(ROWS)])
    assert torch.equal(read[0], expected(RULES[1], KEPT + 1)[0])
    until(lambda: any("copied" in line for line in servers.log), "the copy")
    assert not client.reader.find_suspects()  # no server was taken for unreachable
    assert late in mine
