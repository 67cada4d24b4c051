"""Groups of workers that die in every phase: requests continue with the same tokens, or end with an error that says why
not. The engine's loop is stepped by hand, and the workers are fakes."""

from collections.abc import Callable, Iterator

import pytest

from tests.simulated_worker import FakeProfiles, SimulatedWorker
from tests.unit.test_core import EOS, VOCAB, continuation
from tests.unit.test_engine_clients import Client
from vllm_lite.config import EngineConfig
from vllm_lite.engine.core import EngineCore, Lives, PoolSizes
from vllm_lite.engine.kept_state import KeptState
from vllm_lite.engine.operations import Operations
from vllm_lite.engine.process import EngineProcess
from vllm_lite.engine.workers.groups import MAX_STANDBY_DEATHS, STANDBY_LOOK_S, WorkerGroups
from vllm_lite.engine.workers.recovery import Recovery
from vllm_lite.errors import EngineDeadError, EngineError, ModelError, VllmLiteError
from vllm_lite.executor.base import Failure, WorkersLostError
from vllm_lite.process_settings import EngineSettings
from vllm_lite.protocol import PROTOCOL_VERSION
from vllm_lite.protocol.api import Abort, Dying, Generate, GetStats, Recovered, Recovering, Welcome
from vllm_lite.protocol.codec import pack_tokens
from vllm_lite.protocol.control import AdapterRead, KVGroupInfo, Profiled, Ready, StepTiming
from vllm_lite.protocol.params import SamplingParams
from vllm_lite.protocol.stats import RestartCause, Stats
from vllm_lite.protocol.step import ModelOutput, SchedulerOutput
from vllm_lite.runtime.wakeup import Wakeup

NUM_BLOCKS, EPOCH = 41, 5
READY = Ready(0, 1, NUM_BLOCKS, 64, (KVGroupInfo("full", 1),), 1000, VOCAB, (EOS,))
PROMPT = [1, 2, 3]
PARAMS = SamplingParams(max_tokens=20, ignore_eos=True)
KILLED = "worker 0 (pid 7) died: killed by SIGKILL"
PHASES = ("spawned", "loads", "allocates")


class FakeGroup(FakeProfiles):
    """An executor. `dies_when` names the phase in which it dies by itself; die() kills it now."""

    def __init__(self, host: "Host", generation: int) -> None:
        self.host = host
        self.generation = generation
        self.phase = "made"
        self.ready_answer: Ready = host.ready
        self.lost: Failure | None = None
        self.knows_cause = self.is_gone = True
        self.is_ending = self.is_closed = False
        self.profiles, self.profile_answers = [], [Profiled(0, generation)]
        self.worker = SimulatedWorker(NUM_BLOCKS, 4, vocab_size=VOCAB)

    def die(
        self, text: str = KILLED, cause: RestartCause = "died", error: type[VllmLiteError] = EngineDeadError
    ) -> None:
        self.lost = Failure(0, cause, error(text), is_certain=True)

    def enter(self, phase: str) -> None:
        self.phase = phase
        if self.host.dies_when.get(self.generation) == phase:
            self.die(f"worker 0 died when it {phase}")

    def check(self) -> None:
        if self.lost is not None:
            raise WorkersLostError(f"at first sight: {self.lost.error}")

    def spawn(self) -> None:
        self.enter("spawned")

    def is_prepared(self) -> bool:
        self.check()
        return self.host.imports

    def begin_load(self, timeout_s: float, model: str | None = None) -> None:
        assert timeout_s > 0
        self.model = model
        assert all(group.is_closed for group in self.host.made if group.generation < self.generation), "memory is taken"
        self.enter("loads")

    def ready(self) -> Ready | None:
        self.check()
        return self.ready_answer if self.phase == "loads" and self.host.loads else None

    def begin_allocate(self, num_blocks: int, num_host_blocks: int, timeout_s: float) -> None:
        assert (num_blocks, num_host_blocks, timeout_s > 0) == (NUM_BLOCKS, 0, True)
        self.enter("allocates")

    def started(self) -> float | None:
        self.check()
        return 0.0 if self.host.allocates else None

    def submit(self, *steps: SchedulerOutput) -> None:
        self.check()
        self.worker.submit(*steps)

    def poll(self) -> ModelOutput | None:
        self.check()
        return self.worker.poll()

    def timings(self) -> tuple[StepTiming, ...]:
        return ()

    def expert_tokens(self) -> list[list[int]]:
        return []

    def read_adapter(self, number: int, name: str, path: str) -> None:
        self.worker.read_adapter(number, name, path)

    def drop_adapter(self, number: int) -> None:
        self.worker.drop_adapter(number)

    def adapters_read(self) -> list[AdapterRead]:
        return self.worker.adapters_read()

    def failure(self) -> Failure | None:
        return self.lost if self.knows_cause else None

    def end(self) -> None:
        self.is_ending = True

    def has_ended(self) -> bool:
        assert self.is_ending
        return self.is_gone

    def close(self) -> None:
        self.is_closed = True

    def pollables(self) -> tuple[int, ...]:
        return ()


class Host:
    """An engine process, its clients, and all groups of workers that it has had."""

    def __init__(self, name: str, **settings: object) -> None:
        self.ready = READY
        self.imports = self.loads = self.allocates = True
        self.dies_when: dict[int, str] = {}
        self.made: list[FakeGroup] = []
        self.now_s = 100.0
        self.stop = Wakeup()
        self.address = f"inproc://worker-groups-{name}"
        config = EngineConfig.check({"block_size": 4, **settings})
        config = config.resolve(max_position_embeddings=1000, dtype="float32", model_path="m")
        self.process = EngineProcess(EngineSettings(config, self.address, "none"), self.stop)
        self.port = self.process.port
        self.port._epoch = EPOCH
        self.port.open(Welcome(PROTOCOL_VERSION, EPOCH, "model", 100, 50, (7,), NUM_BLOCKS, 4))
        self.groups = WorkerGroups(self.make, config, lambda: self.now_s)
        self.groups.start(self.stop)
        self.groups.allocate(NUM_BLOCKS, 0, self.stop)
        self.core = EngineCore(config, READY, self.groups.executor, PoolSizes(NUM_BLOCKS), Lives(1))
        self.recovery = Recovery(self.core, self.groups, self.port, config, lambda: self.now_s)
        self.kept: list[KeptState] = []
        self.operations = Operations(self.core, self.groups, self.port, config, self.kept.append)
        self.clients: list[Client] = []

    def make(self, generation: int) -> FakeGroup:
        self.made.append(FakeGroup(self, generation))
        return self.made[-1]

    @property
    def current(self) -> FakeGroup:
        group = self.groups.executor
        assert isinstance(group, FakeGroup)
        return group

    def client(self, name: bytes = b"client") -> Client:
        self.clients.append(Client(self.address, name))
        return self.clients[-1]

    def generate(self, client: Client, *names: str) -> None:
        for name in names:
            client.say(Generate(name, pack_tokens(PROMPT), PARAMS))

    def loop(self, count: int = 1) -> None:
        for _ in range(count):
            self.process.serve_once(self.core, self.groups, self.recovery, self.operations)
            self.core.scheduler.check_integrity()
        self.port.flush(0.0, at_once=True)
        for client in self.clients:
            client.read()

    def drain(self, client: Client, *names: str) -> None:
        """All requests end, with the tokens that they would have had."""
        for _ in range(100):
            self.loop()
            if not self.core.scheduler.requests:
                break
        for name in names:
            assert client.got[name, 0] == continuation(PROMPT, 20), name
        assert [end.reason for end in client.ends] == ["length"] * len(names)

    def ends(self, error: type[VllmLiteError], message: str) -> None:
        with pytest.raises(error, match=message):
            self.loop(10)

    def stats(self, client: Client) -> Stats:
        client.say(GetStats())
        self.loop()
        found = client.other[-1]
        assert isinstance(found, Stats)
        return found

    def close(self) -> None:
        for client in self.clients:
            client.connection.close()
        self.port.close()
        self.stop.close()


MakeHost = Callable[..., Host]


@pytest.fixture
def make_host(request: pytest.FixtureRequest) -> Iterator[MakeHost]:
    made: list[Host] = []

    def make(**settings: object) -> Host:
        made.append(Host(request.node.name, **settings))
        return made[-1]

    yield make
    for host in made:
        host.close()


@pytest.fixture
def host(make_host: MakeHost) -> Host:
    return make_host()


def notices(client: Client) -> list[Recovering | Recovered]:
    return [message for message in client.other if isinstance(message, Recovering | Recovered)]


# ---- requests that continue


def test_requests_continue_with_the_next_group(host: Host) -> None:
    client = host.client()
    host.generate(client, "a", "b")
    host.loop(5)
    assert client.got["a", 0]
    host.current.die()
    host.loop()
    host.now_s += 2.5
    host.drain(client, "a", "b")
    assert notices(client) == [Recovering(EPOCH, KILLED, 1), Recovered(EPOCH, 2, 2.5)]
    stats = host.stats(client)
    assert (stats.generation, stats.recovering, stats.restarts) == (2, "", {"died": 1})
    assert (stats.recovered_requests, stats.lost_s) == (2, 2.5)


def test_a_stop_ends_the_wait_for_the_first_pools(host: Host) -> None:
    """To allocate them, and to compute the first steps, takes a while on a GPU."""
    host.allocates = False
    host.stop.set()
    with pytest.raises(EngineError, match="stopped while the workers were starting"):
        host.groups.allocate(NUM_BLOCKS, 0, host.stop)


def test_workers_that_die_while_all_are_idle_are_replaced(host: Host) -> None:
    client = host.client()
    host.current.die()
    host.loop(6)
    host.generate(client, "a")
    host.drain(client, "a")
    assert host.stats(client).recovered_requests == 0


def test_the_next_processes_start_before_the_cause_is_known(host: Host) -> None:
    first = host.current
    first.die()
    first.knows_cause = first.is_gone = False
    host.loop(3)
    assert [group.phase for group in host.made] == ["allocates", "spawned"]
    assert not first.is_ending, "it may have more to say"
    first.knows_cause = True
    host.loop(3)
    assert first.is_ending
    assert host.made[1].phase == "spawned", "the first one's memory is not free yet"
    first.is_gone = True
    host.loop(3)
    assert host.current is host.made[1]
    assert not host.recovery.is_on


def test_clients_are_served_meanwhile(host: Host) -> None:
    client = host.client()
    host.generate(client, "goes on", "is aborted")
    host.loop(3)
    host.current.die()
    host.loads = False
    host.loop(5)
    assert host.stats(client).recovering == KILLED
    client.say(Abort("is aborted"))
    late = host.client(b"late")
    host.generate(late, "comes late")
    host.loop(3)
    assert [end.reason for end in client.ends] == ["abort"]
    assert notices(late) == [Recovering(EPOCH, KILLED, 1)]
    client.ends.clear()
    host.loads = True
    host.drain(late, "comes late")
    assert client.got["goes on", 0] == continuation(PROMPT, 20)
    assert host.stats(client).recovered_requests == 1
    again = host.client(b"again")
    host.loop()
    assert notices(again) == []


@pytest.mark.parametrize("phase", PHASES)
def test_a_group_that_dies_while_it_starts_is_replaced_as_well(host: Host, phase: str) -> None:
    client = host.client()
    host.generate(client, "a")
    host.loop(5)
    host.dies_when = {2: phase, 3: phase}
    host.current.die()
    host.loop(2)
    host.drain(client, "a")
    second = f"worker 0 died when it {phase}"
    assert notices(client)[:3] == [Recovering(EPOCH, text, at) for at, text in enumerate((KILLED, second, second), 1)]
    assert host.stats(client).restarts == {"died": 3}
    assert host.stats(client).generation == 4
    assert all(group.is_closed for group in host.made[:-1])


def test_groups_that_die_one_after_the_other(host: Host) -> None:
    client = host.client()
    host.generate(client, "a", "b")
    for cause in ("died", "stuck", "silent"):
        host.loop(6)
        host.current.die(cause=cause)
        host.loop()
    host.drain(client, "a", "b")
    assert [message.attempt for message in notices(client) if isinstance(message, Recovering)] == [1, 1, 1]
    assert host.stats(client).restarts == {"died": 1, "stuck": 1, "silent": 1}


# ---- the end


def test_without_restarts_a_death_is_the_end(make_host: MakeHost) -> None:
    host = make_host(max_restarts=0)
    host.current.die()
    host.ends(EngineDeadError, rf"^{KILLED}$".replace("(", r"\(").replace(")", r"\)"))
    assert len(host.made) == 1


def test_past_the_limit_the_first_cause_is_named(make_host: MakeHost) -> None:
    host = make_host(max_restarts=2)
    for number in range(2):
        host.current.die(f"cause {number}")
        host.loop(8)
        assert not host.recovery.is_on
    host.current.die("cause 2")
    host.ends(EngineDeadError, "^cause 0 .*the first of 3 deaths within 300 s; the last one: cause 2")


def test_deaths_long_ago_do_not_count(make_host: MakeHost) -> None:
    host = make_host(max_restarts=1)
    for _ in range(3):
        host.current.die()
        host.loop(8)
        host.now_s += 301.0
    assert host.current.generation == 4


def test_a_model_that_cannot_be_loaded_again_is_the_end(host: Host) -> None:
    host.loads = False
    host.current.die()
    host.loop(5)
    host.current.die("worker 0 died once more")
    host.loop(5)
    host.current.die("m/model.safetensors does not exist", "failed", ModelError)
    host.ends(
        EngineDeadError,
        r"^the workers cannot be started again: m/model.safetensors does not exist; they were restarted because "
        r"worker 0 \(pid 7\) died: killed by SIGKILL$",
    )


def test_bad_input_is_the_end_at_once(host: Host) -> None:
    host.current.die("no such tensor", "failed", ModelError)
    host.ends(ModelError, "^no such tensor$")


@pytest.mark.parametrize(
    ("ready", "words"),
    [
        (
            Ready(0, 2, 30, 64, READY.groups, 1000, VOCAB, (EOS,)),
            "room for 30 KV blocks now, and .* on 41; they were",
        ),
        (Ready(0, 2, 41, 64, READY.groups, 999, VOCAB, (EOS,)), "its max_model_len is 999 and was 1000; they were"),
    ],
)
def test_workers_that_can_do_less_than_before_are_the_end(host: Host, ready: Ready, words: str) -> None:
    host.ready = ready
    host.current.die()
    host.ends(EngineDeadError, words)


def test_a_little_less_room_is_tried(host: Host) -> None:
    """Two profiles of a GPU do not find the same to the block."""
    host.groups.num_blocks = 10_000
    host.groups.check_stays(Ready(0, 2, 9_901, 64, READY.groups, 1000, VOCAB, (EOS,)))
    with pytest.raises(EngineError, match="room for 9899 KV blocks"):
        host.groups.check_stays(Ready(0, 2, 9_899, 64, READY.groups, 1000, VOCAB, (EOS,)))


def test_a_worker_that_cannot_be_ended_is_the_end(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> bool:
        raise EngineError("worker 0 (pid 7) cannot be ended")

    monkeypatch.setattr(host.current, "has_ended", refuse)
    host.current.die()
    host.ends(EngineDeadError, r"^the workers cannot be started again: worker 0 \(pid 7\) cannot be ended; they were")


def test_a_process_that_cannot_be_started_is_the_end(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: FakeGroup) -> None:
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(FakeGroup, "spawn", refuse)
    host.current.die()
    host.ends(EngineDeadError, "a worker cannot be started: .*Resource temporarily unavailable; they were restarted")


def serve(host: Host) -> int:
    return host.process.serve(host.core, host.groups)


def test_giving_up_is_final_and_no_other_engine_is_to_try(make_host: MakeHost) -> None:
    host = make_host(max_restarts=0)
    client = host.client()
    host.current.die()
    assert serve(host) == 3
    client.read()
    assert client.other[-1] == Dying(KILLED, is_final=True)


def test_it_can_be_stopped_while_workers_are_replaced(host: Host) -> None:
    client = host.client()
    host.generate(client, "a")
    host.loop(3)
    host.loads = False
    host.current.die()
    host.loop(6)
    host.stop.set()
    assert serve(host) == 0
    client.read()
    assert [end.reason for end in client.ends] == ["abort"]
    host.groups.close()
    assert all(group.is_closed for group in host.made)


# ---- standby


def test_a_standby_group_takes_over(make_host: MakeHost) -> None:
    host = make_host(standby_workers=True)
    host.loop()
    assert [group.phase for group in host.made] == ["allocates", "spawned"]
    client = host.client()
    host.generate(client, "a")
    host.loop(3)
    host.current.die()
    host.loop(4)
    assert (host.current.generation, len(host.made)) == (2, 2)
    host.drain(client, "a")
    host.now_s += STANDBY_LOOK_S
    host.loop()
    assert [group.phase for group in host.made] == ["allocates", "allocates", "spawned"]
    host.groups.close()
    assert all(group.is_closed for group in host.made)


def test_a_dead_standby_group_is_replaced_a_few_times_unnoticed(make_host: MakeHost) -> None:
    host = make_host(standby_workers=True, max_restarts=1)
    client = host.client()
    host.generate(client, "a")
    for _ in range(3 * MAX_STANDBY_DEATHS):
        host.loop()
        host.made[-1].die()
        host.now_s += STANDBY_LOOK_S
    host.drain(client, "a")
    assert len(host.made) == 1 + MAX_STANDBY_DEATHS + 1, "not for ever"
    assert all(group.is_closed for group in host.made[1:])
    assert (host.stats(client).restarts, notices(client)) == ({}, [])


def test_a_standby_group_that_is_dead_when_it_is_needed_is_not_used(make_host: MakeHost) -> None:
    host = make_host(standby_workers=True)
    host.loop()
    host.made[1].die()
    host.current.die()
    host.loop(4)
    assert host.current.generation == 3
    assert host.stats(host.client()).restarts == {"died": 1}
