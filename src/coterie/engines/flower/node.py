"""A site's end of the wire: it comes to the server, asks for messages, answers them, and says why it cannot.

Flower's own node would be a process of its own, ask every three seconds and fetch the code that a run ships.
This speaks the same protocol from the process that answers, and fetches messages alone. Nothing is executed
that came over the network.
"""

import contextlib
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Message, RecordDict

from coterie import __version__
from coterie.engines.flower import internals as flower
from coterie.engines.flower.keys import private_key
from coterie.engines.flower.messages import printable, quoted, site_log
from coterie.engines.flower.pieces import NotTaken, push_whole
from coterie.engines.flower.proof import (
    HELLO,
    MESSAGE_HEADER,
    OPEN,
    PROTOCOL,
    REFUSED_KEYS,
    Greeting,
    flower_version,
    public_bytes,
    sign,
)
from coterie.errors import CoterieError

log = site_log(__name__)

BEAT_SECONDS, BEATS_EVERY = 10.0, 4.0
"""When the link is told to expect a heartbeat (it waits for twice that), and how often one is sent."""
POLL_SECONDS, IDLE_SECONDS = 0.25, 1.0
"""Between two questions for messages, where the server does not hold them: while a run goes on, and when
nothing came for a while."""
PIECE_SECONDS = 0.05
"""Between two looks for a piece of a message that is still on its way."""
BUSY_SECONDS = 30.0
"""After a message, for so long the next one is expected soon."""
FIRST_WAIT, LONGEST_WAIT = 1.0, 15.0
"""Seconds until the next attempt to reach a server; twice as long every time."""
CALL_SECONDS = 30.0
CONNECTIONS, KEPT_SECONDS = 2, 60.0
"""That a site holds to its server, and for how many seconds after their last use: one for messages, one for
heartbeats. The server knows who is at the other end of them; a new one has to prove it first, which takes
long where strangers stand at the door."""
TRIES = 5
"""Of one call, where the network or the server is in trouble for a moment."""


class Trouble(CoterieError):
    """Why a server cannot be worked with now, and what to do."""


@dataclass(frozen=True)
class Endpoint:
    """Where a server is said to be, and how it proves that it is the one.

    Args:
        authority: certificate of whoever signed the server's; None: plaintext, on this machine.
    """

    address: str
    authority: Path | None

    @property
    def url(self) -> str:
        return f"{'http' if self.authority is None else 'https'}://{self.address}"

    def client(self) -> httpx.Client:
        verify = True if self.authority is None else ssl.create_default_context(cafile=str(self.authority))
        limits = httpx.Limits(
            max_connections=CONNECTIONS,
            max_keepalive_connections=CONNECTIONS,
            keepalive_expiry=KEPT_SECONDS,
        )
        return httpx.Client(verify=verify, timeout=CALL_SECONDS, limits=limits, trust_env=False)


@dataclass
class SiteKey:
    """A site's key, and the server's clock by which it signs.

    Args:
        offset: seconds by which the server's clock is ahead of ours.
    """

    key: ec.EllipticCurvePrivateKey | None
    offset: float = 0.0

    @classmethod
    def load(cls, path: Path | None) -> "SiteKey":
        return cls(None if path is None else private_key(path))

    def now(self) -> float:
        """By the server's clock."""
        return time.time() + self.offset

    def headers(self) -> dict[str, str]:
        return {} if self.key is None else sign(self.key, self.now())

    # As one of Flower's interceptors.
    def intercept(self, context: Any, call_next: Callable[[Any], httpx.Response]) -> httpx.Response:
        context.request.headers.update(self.headers())
        return call_next(context)


# --- who is there, and what is wrong -----------------------------------------------------------------


def greet(endpoint: Endpoint, key: SiteKey) -> Greeting:
    """What the server says of itself and of us; `Trouble` in words where it cannot be worked with."""
    found = _ask_who(endpoint, key)
    if found.refused == "clock":  # signed by our own clock: now we know the server's
        found = _ask_who(endpoint, key)
    if found.refused is not None:
        raise Trouble(f"{endpoint.address}: {REFUSED_KEYS.get(found.refused, 'this key is refused')}")
    return found


def _ask_who(endpoint: Endpoint, key: SiteKey) -> Greeting:
    with endpoint.client() as client:
        try:
            answer = client.get(f"{endpoint.url}{HELLO.decode()}", headers=key.headers())
        except httpx.HTTPError as trouble:
            raise Trouble(_unreachable(endpoint, trouble)) from None
    found = Greeting.from_json(answer.content) if answer.is_success else None
    if found is None:
        raise Trouble(
            f"{endpoint.address}: whoever answers there is no coterie server of this version (status "
            f"{answer.status_code}); check --server, and that both sides have coterie {__version__}"
        )
    key.offset = found.time - time.time()
    versions = {
        "coterie": (found.coterie, __version__, found.protocol == PROTOCOL),
        "Flower": (found.flower, flower_version(), found.flower == flower_version()),
    }
    for program, (theirs, ours, fits) in versions.items():
        if not fits:
            raise Trouble(
                f"{endpoint.address}: the server has {program} {quoted(theirs)}, this site {ours}; install "
                "the same version on both sides"
            )
    return found


def _unreachable(endpoint: Endpoint, trouble: httpx.HTTPError) -> str:
    """What a failed connection means."""
    said = printable(str(trouble))
    if "CERTIFICATE_VERIFY_FAILED" in said:
        why = (
            "its certificate is for other names than this address"
            if "match" in said
            else ("its certificate was not signed by the authority in --ca, or is not valid any more")
        )
        return f"{endpoint.address}: {why}; ask the server's operator for ca.crt, and check --server"
    if "WRONG_VERSION_NUMBER" in said or isinstance(trouble, httpx.RemoteProtocolError):
        return f"{endpoint.address}: what listens there does not speak TLS; check --server and --plaintext"
    if isinstance(trouble, httpx.TimeoutException):
        return f"{endpoint.address}: no answer within {CALL_SECONDS:g} s; is a firewall in between?"
    return f"{endpoint.address}: no connection; is the server running, and is the address right?"


# --- a connection ------------------------------------------------------------------------------------


@dataclass
class SiteNode:
    """A connection to a server that lets us in, from its activation to its end."""

    endpoint: Endpoint
    key: SiteKey
    _client: Any = field(init=False)
    _node: Any = field(init=False, default=None)
    _lost: threading.Event = field(init=False, default_factory=threading.Event)

    def __post_init__(self) -> None:
        if self.key.key is None:  # nobody has keys: one for this connection
            self.key = SiteKey(ec.generate_private_key(ec.SECP384R1()), self.key.offset)
        authority = self.endpoint.authority
        self._client = flower.FleetHttpClient.from_server_address(
            self.endpoint.address,
            authority is None,
            None if authority is None else authority.read_bytes(),
            interceptors=[flower.RuntimeVersionHttpInterceptor(component_name="SuperNode"), self.key],
        )
        self._registers = authority is None
        # All over the same connections, and nowhere else: no redirection is followed.
        self._client.close()
        self._http = self._client._client = self.endpoint.client()

    @contextlib.contextmanager
    def connected(self) -> Iterator[None]:
        """Be online; `Trouble` where the key is in use."""
        assert self.key.key is not None
        public = public_bytes(self.key.key)
        try:
            if self._registers:
                self._client.RegisterNode(flower.RegisterNodeFleetRequest(public_key=public))
            wanted = flower.ActivateNodeRequest(public_key=public, heartbeat_interval=BEAT_SECONDS)
            self._node = flower.Node(node_id=self._call(self._client.ActivateNode, wanted).node_id)
        except httpx.HTTPStatusError as refused:
            self._client.close()
            if 400 <= refused.response.status_code < 500 and refused.response.status_code != 401:
                raise Trouble(
                    f"{self.endpoint.address}: this key is in use: another process is connected with it, or "
                    f"one was killed less than {2 * BEAT_SECONDS:g} s ago; stop the other, or wait"
                ) from None
            raise
        flower.TaskIdentity.node_id = self._node.node_id
        done = threading.Event()
        beating = threading.Thread(target=self._beat, args=(done,), name="heartbeat", daemon=True)
        beating.start()
        try:
            yield
        finally:
            done.set()
            with contextlib.suppress(httpx.HTTPError, RuntimeError, ValueError):
                self._client.DeactivateNode(flower.DeactivateNodeRequest(node_id=self._node.node_id))
            self._client.close()

    def now(self) -> float:
        """By the server's clock."""
        return self.key.now()

    def _beat(self, done: threading.Event) -> None:
        while True:
            beat = flower.SendNodeHeartbeatRequest(node=self._node, heartbeat_interval=BEAT_SECONDS)
            try:
                known = self._client.SendNodeHeartbeat(beat).success
            except httpx.HTTPStatusError as refused:
                known = refused.response.status_code >= 500
            except (httpx.HTTPError, RuntimeError):
                known = True  # whoever asks for messages finds out
            if not known:
                self._lost.set()
            if done.wait(BEATS_EVERY):
                return

    def _call(self, call: Callable[[Any], Any], request: Any) -> Any:
        """Call the server, and once more where something is in the way for a moment."""
        for attempt in range(TRIES):
            try:
                return call(request)
            except httpx.HTTPStatusError as refused:
                if refused.response.status_code not in (502, 503, 504) or attempt == TRIES - 1:
                    raise
            except httpx.TransportError:
                if attempt == TRIES - 1:
                    raise
            time.sleep(0.2 * 2**attempt)
        raise AssertionError

    # --- messages -----------------------------------------------------------------------------------

    def receive(self) -> Message | None:
        """The next message, whole, if there is one."""
        if self._lost.is_set():
            raise Trouble(f"{self.endpoint.address}: the server does not know this connection any more")
        found = self._call(self._client.PullMessages, flower.PullMessagesRequest(node=self._node))
        if not found.messages_list:
            return None
        tree = found.message_object_trees[0]
        run, identity = found.messages_list[0].metadata.run_id, tree.object_id
        pull = flower.make_pull_object_fn_protobuf(
            lambda request: self._call(self._client.PullObject, request), self._node, run
        )
        contents: dict[str, bytes] = {}
        since = time.monotonic()
        for each in flower.iterate_object_tree(tree):
            while each.object_id not in contents:
                try:
                    contents[each.object_id], since = pull(each.object_id), time.monotonic()
                except flower.ObjectUnavailableError:  # the server is still pushing it
                    if time.monotonic() - since > CALL_SECONDS:
                        return None
                    time.sleep(PIECE_SECONDS)
                except flower.ObjectPullError:
                    return None  # gone meanwhile: whoever still wants it asks again
        confirmed = flower.ConfirmMessageReceivedRequest(
            node=self._node, run_id=run, message_object_id=identity
        )
        self._call(self._client.ConfirmMessageReceived, confirmed)
        message = flower.inflate_object_from_contents(identity, contents)
        if not isinstance(message, Message):
            return None
        message.metadata.__dict__["_message_id"] = identity
        return message

    def reply(self, message: Message, content: RecordDict) -> None:
        """Push the answer to a message."""
        told, now = message.metadata, self.key.now()
        answer = Message(content, reply_to=message)
        # By the server's clock, which decides whether it is in time.
        answer.metadata.__dict__["_created_at"] = now
        answer.metadata.__dict__["_ttl"] = max(1.0, told.created_at + told.ttl - now)
        answer.metadata.__dict__["_message_id"] = answer.object_id
        header = flower.message_to_proto(flower.remove_content_from_message(answer))

        def push() -> None:
            request = flower.PushMessagesRequest(
                node=self._node,
                messages_list=[header],
                message_object_trees=[flower.get_object_tree(answer)],
                clientapp_runtime_list=[0.0],
            )
            pushed = self._call(self._client.PushMessages, request)
            push_piece = flower.make_push_object_fn_protobuf(
                lambda each: self._call(self._client.PushObject, each),
                self._node,
                told.run_id,
                pushed.session_id,
            )
            objects = flower.get_all_nested_objects(answer)
            wanted = set(pushed.objects_to_push)
            flower.push_objects(objects, push_piece, object_ids_to_push=wanted, max_concurrent_pushes=1)

        with flower.no_object_id_recompute():
            try:
                push_whole(push)
            except NotTaken:  # whoever still waits for it asks again
                log.warning("an answer to a message of type %s was not taken", printable(told.message_type))

    def is_open(self, message: Message) -> bool:
        """Whether the server still waits for an answer to this message; not, where it cannot be asked."""
        identity = str(message.metadata.message_id)
        headers = {MESSAGE_HEADER: identity, **self.key.headers()}
        url = f"{self.endpoint.url}{OPEN.decode()}"
        try:
            found = self._call(lambda path: self._http.get(path, headers=headers), url)
            return found.is_success and found.json().get("open") is True
        except (httpx.HTTPError, ValueError):
            return False
