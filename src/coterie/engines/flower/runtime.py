"""The server's process in the place of the one in which Flower would run a server app.

Flower runs an app by fetching its code from the link and starting a process. Here `coterie serve` is that
process: it acquires the task (with the secret that only it and its own link share), and is its grid. The code
that goes with the run is opened by nobody.
"""

import contextlib
import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import httpx
from flwr.app import Message

from coterie.engines.flower import internals as flower
from coterie.engines.flower.pieces import push_whole
from coterie.engines.flower.processes import ChildEnded
from coterie.errors import CoterieError

log = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 10.0
LINK_SECONDS, LINK_PAUSE = 120.0, 1.0
"""How long the server tries to reach its own link, on its own machine, before it gives up, and how often."""
STARTS = 3
"""Of a run, where the answer that we have its task was lost."""
_ACQUIRE = frozenset({"/flwr.proto.Runtime/AcquireTask"})


class Unreachable(CoterieError):
    """Flower's program on this machine does not answer any more."""


class Patience:
    """Asks the link again where it is too busy to answer, or failed inside; takes the place of Flower's own.

    Flower's takes a handshake that takes too long for a certificate that is wrong, and a failure inside the
    link for an answer. What is asked for twice is done once, or does no harm: a site that gets a message
    twice answers it once.

    Args:
        ended: whether the link's program is gone, which no patience helps against.
        told: where it says what is wrong with it.
    """

    def __init__(self, ended: Callable[[], bool] = lambda: False, told: Path | None = None) -> None:
        self._ended = ended
        self._more = "" if told is None else f"; see {told}"

    def invoke(self, send: Callable[[], httpx.Response]) -> httpx.Response:
        """What Flower's clients call for every request."""
        until = time.monotonic() + LINK_SECONDS
        while True:
            try:
                return send()
            except httpx.HTTPStatusError as failure:
                if failure.response.status_code < 500:
                    raise
                why = f"it failed with status {failure.response.status_code}"
            except httpx.TimeoutException as trouble:
                why = f"it is too slow: {type(trouble).__name__}"
            except httpx.TransportError as trouble:
                why = f"no connection: {type(trouble).__name__}"
            if self._ended():
                raise ChildEnded(f"flower-superlink ended{self._more}; coterie serve --resume goes on")
            if time.monotonic() >= until:
                raise Unreachable(
                    f"Flower's link on this machine did not answer for {LINK_SECONDS:g} s ({why})"
                    f"{self._more}; is the machine too busy? coterie serve --resume goes on"
                )
            log.warning("Flower's link on this machine: %s; asking it again", why)
            time.sleep(LINK_PAUSE)

    def of_grid(self, grid: Any) -> None:
        """Let a grid of Flower's have this patience in place of its own; one in memory needs none."""
        if isinstance(grid, flower.HttpGrid):
            grid._retry_invoker = self
            if grid._client is not None:
                grid._client._retry_invoker = self


# --- tasks ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Caller:
    """Reaches Flower's link, with patience.

    Args:
        authority: who signed its certificate; None: plaintext.
        patience: None: a call that fails has failed.
    """

    address: str
    authority: bytes | None = None
    patience: Patience | None = field(default_factory=Patience)

    def client(self, kind: Any, component: str, *proofs: Any) -> Any:
        """A client of one of its APIs."""
        return kind.from_server_address(
            server_address=self.address,
            insecure=self.authority is None,
            root_certificates=self.authority,
            interceptors=[flower.RuntimeVersionHttpInterceptor(component_name=component), *proofs],
            retry_invoker=self.patience,
        )

    def control(self) -> contextlib.closing[Any]:
        """Its control API, which listens on this machine alone."""
        return contextlib.closing(self.client(flower.ControlHttpClient, "flwr CLI"))


class TaskClient:
    """Takes the tasks of a link, which gives them to whoever knows the secret."""

    def __init__(self, caller: Caller, secret: bytes, kind: Any = flower.TaskType.SERVER_APP) -> None:
        self._caller, self._kind = caller, kind
        proof = flower.SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods=_ACQUIRE)
        self._client = caller.client(flower.RuntimeHttpClient, "SuperExec", proof)
        self.close = self._client.close

    def acquire(self) -> str | None:
        """The token of the next task, if there is one."""
        try:
            found = self._client.AcquireTask(flower.AcquireTaskRequest(supported_task_types=[self._kind]))
        except httpx.HTTPError as trouble:
            raise Unreachable(f"{self._caller.address}: {type(trouble).__name__}") from None
        return str(found.token) if found.HasField("task") and found.token else None

    def connect(self, token: str, component: str) -> Any:
        """A client that acts for one task."""
        return self._caller.client(
            flower.RuntimeHttpClient, component, flower.RuntimeTokenHttpInterceptor(token)
        )


@contextlib.contextmanager
def _heartbeats(client: Any) -> Iterator[None]:
    """Tell Flower that the task is alive; the answer may take longer than its timeouts."""

    def beat() -> None:
        with contextlib.suppress(httpx.HTTPError, CoterieError):
            client.SendTaskHeartbeat(flower.SendTaskHeartbeatRequest())

    beat()
    with repeating(beat, HEARTBEAT_SECONDS, "heartbeat"):
        yield


@contextlib.contextmanager
def repeating(work: Callable[[], None], seconds: float, name: str) -> Iterator[None]:
    """Do something again and again, after so many seconds each time, in a thread beside us."""
    done = threading.Event()

    def repeat() -> None:
        while not done.wait(seconds):
            work()

    thread = threading.Thread(target=repeat, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(timeout=5)


UNFINISHED_SECONDS = 20.0
"""After so long without another piece, a reply is taken for cut off."""


@dataclass
class Arriving:
    """A reply whose head has come, and those of its pieces that have."""

    reply_to: str
    tree: Any
    pieces: dict[str, bytes]
    since: float


class PromptGrid(flower.HttpGrid):  # type: ignore[misc]
    """Takes what has come, and waits for nothing: what is not whole yet is looked for again next time.

    Flower's own waits for every piece of a reply, for minutes, while nobody else is answered or asked again.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._arriving: dict[str, Arriving] = {}

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        all_of_them = list(messages)
        return push_whole(lambda: list(super(PromptGrid, self).push_messages(all_of_them)))

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        wanted = set(message_ids)
        self._arriving = {name: each for name, each in self._arriving.items() if each.reply_to in wanted}
        new = wanted - {each.reply_to for each in self._arriving.values()}
        if new:
            request = flower.PullAppMessagesRequest(message_ids=sorted(new))
            found = self._runtime_client.PullMessages(request)
            for head, tree in zip(found.messages_list, found.message_object_trees, strict=True):
                told = head.metadata
                self._arriving[told.message_id] = Arriving(
                    told.reply_to_message_id, tree, {}, time.monotonic()
                )
        replies = [self._take(identity) for identity in list(self._arriving)]
        return [reply for reply in replies if reply is not None]

    def _take(self, identity: str) -> Message | None:
        """A reply that is whole now, or will never be; None where there is still hope."""
        arriving = self._arriving[identity]
        run = self.run.run_id
        pull = flower.make_pull_object_fn_protobuf(self._runtime_client.PullObject, self.node, run)
        for each in flower.iterate_object_tree(arriving.tree):
            if each.object_id in arriving.pieces:
                continue
            try:
                arriving.pieces[each.object_id] = pull(each.object_id)
                arriving.since = time.monotonic()
            except flower.ObjectUnavailableError:
                if time.monotonic() - arriving.since < UNFINISHED_SECONDS:
                    return None
                return self._unfinished(identity)
            except flower.ObjectPullError:
                return self._unfinished(identity)
        del self._arriving[identity]
        confirm = flower.ConfirmMessageReceivedRequest(node=self.node, run_id=run, message_object_id=identity)
        self._runtime_client.ConfirmMessageReceived(confirm)
        message = flower.inflate_object_from_contents(identity, arriving.pieces)
        message.metadata.__dict__["_message_id"] = identity
        return cast(Message, message)

    def _unfinished(self, identity: str) -> Message:
        """An error in place of a reply that was cut off."""
        arriving, node = self._arriving.pop(identity), self.node.node_id
        metadata = flower.Metadata(
            run_id=self.run.run_id,
            message_id="",
            src_node_id=node,
            dst_node_id=node,
            message_type="system",
            group_id="",
            ttl=0,
            reply_to_message_id=arriving.reply_to,
            created_at=time.time(),
        )
        error = flower.Error(code=flower.ErrorCode.MESSAGE_UNAVAILABLE, reason="the reply was cut off")
        return cast(Message, flower.make_message(metadata=metadata, error=error))


@contextlib.contextmanager
def server_grid(caller: Caller, secret: bytes, app: Path) -> Iterator[PromptGrid]:
    """Start a run, and be its server, in place of Flower's own process.

    Args:
        app: under whose name the run goes.
    """
    with contextlib.ExitStack() as stack:
        control = stack.enter_context(caller.control())
        tasks = TaskClient(caller, secret)
        stack.callback(tasks.close)
        for _ in range(STARTS):  # an answer may be lost on its way, and a task with it
            start_run(control, app)
            if (token := tasks.acquire()) is not None:
                break
        else:
            raise CoterieError("the link has no task for the run that was started")
        client = stack.enter_context(contextlib.closing(tasks.connect(token, "flwr-serverapp")))
        stack.enter_context(_heartbeats(client))
        found = client.PullTaskInput(flower.PullTaskInputRequest())
        flower.TaskIdentity.task_id = found.task_id
        flower.TaskIdentity.run_id = found.run.run_id
        flower.TaskIdentity.node_id = found.context.node_id
        grid = PromptGrid(caller.address, caller.authority is None, caller.authority, token=token)
        stack.callback(grid.close)
        grid.set_run(flower.run_from_proto(found.run))
        if caller.patience is not None:
            caller.patience.of_grid(grid)
        status = flower.SubStatus.FAILED
        try:
            yield grid
            status = flower.SubStatus.COMPLETED
        finally:
            with contextlib.suppress(httpx.HTTPError, CoterieError):
                ended = flower.PushTaskOutputRequest(context=found.context, sub_status=status)
                client.PushTaskOutput(ended)


# --- what only the operator may do ------------------------------------------------------------------


def register(client: Any, keys: Mapping[str, bytes]) -> dict[str, int]:
    """Let the holders of these keys join; the numbers of their nodes by name."""

    def listed() -> dict[bytes, int]:
        nodes = client.ListNodes(flower.ListNodesRequest()).nodes_info
        return {bytes(node.public_key): int(node.node_id) for node in nodes}

    known = listed()
    for name, key in keys.items():
        if key in known:
            continue
        try:
            wanted = flower.RegisterNodeRequest(public_key=key, name=name)
            known[key] = int(client.RegisterNode(wanted).node_id)
        except httpx.HTTPStatusError:
            known = listed()  # asked for twice, since the first answer was lost: then it is there
            if key not in known:
                raise
    return {name: known[key] for name, key in keys.items()}


def start_run(client: Any, app: Path) -> None:
    """Start a run of an app; neither side ever loads its code."""
    code = flower.build_fab_from_disk(app)
    fab = {"hash_str": hashlib.sha256(code).hexdigest(), "content": code}
    client.StartRun(flower.StartRunRequest(fab=fab))
