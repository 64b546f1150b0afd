"""A site's end of the network: where the server is, and answering its messages until all is done."""

import itertools
import logging
import random
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import httpx
from flwr.app import Message, RecordDict

from coterie.engines.flower.keys import check_host, is_loopback
from coterie.engines.flower.messages import printable, site_log
from coterie.engines.flower.node import (
    BUSY_SECONDS,
    FIRST_WAIT,
    IDLE_SECONDS,
    LONGEST_WAIT,
    POLL_SECONDS,
    Endpoint,
    SiteKey,
    SiteNode,
    Trouble,
    greet,
)
from coterie.engines.flower.proof import AHEAD
from coterie.engines.flower.site import Peer
from coterie.errors import InputError

log = site_log(__name__)

LAST_WORDS_SECONDS = 60.0
"""For the server to take our last answer, before we leave."""


@dataclass(frozen=True)
class Connection:
    """How to reach the server, and how to prove who we are.

    Args:
        server: HOST:PORT; several with commas, where the server may move.
        authority: certificate of the authority that signed the server's; None is the plaintext mode.
        key: the site's private key, in OpenSSH format.
    """

    server: str
    authority: Path | None
    key: Path | None

    @property
    def addresses(self) -> list[str]:
        return self.server.split(",")

    def __post_init__(self) -> None:
        for address in self.addresses:
            self._check(address)
        half = "--ca and --key belong together: the server proves who it is, and so do you"
        InputError.when((self.authority is None) != (self.key is None), half)
        for option, path in (("--ca", self.authority), ("--key", self.key)):
            InputError.when(path is not None and not path.is_file(), f"{option}: {path} is no file")

    def _check(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        reachable = re.fullmatch("[0-9]{1,5}", port) is not None and 0 < int(port) < 2**16
        allowed = "HOST:PORT, with a port from 1 to 65535"
        InputError.when(not (host and reachable), f"--server: {self.server!r} is not allowed, {allowed} is")
        check_host(host.removeprefix("[").removesuffix("]"), "--server")
        bare = self.authority is None
        apart = bare and not is_loopback(host.strip("[]"))
        InputError.when(apart, f"--plaintext: only on loopback, and --server is {address}")


class SaidOnce:
    """Troubles that are said once each, until all is well again."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def warn(self, line: str) -> None:
        if line not in self._said:
            log.event("trouble", line, level=logging.WARNING)
        self._said.add(line)

    def well(self, line: str) -> None:
        log.event("connected", line)
        self._said.clear()


class Attending(Protocol):
    """Whoever answers messages."""

    def handle(self, message: Message, peer: Peer) -> RecordDict: ...

    @property
    def finished(self) -> bool: ...


def attend(connection: Connection, site: Attending) -> None:
    """Answer messages until there is nothing more to answer, through restarts of either side.

    Where a server cannot be reached or worked with, it is said why, and tried again, at each of its addresses
    in turn, with a pause when all were tried; whatever else happens, this goes on.
    """
    key, told, wait = SiteKey.load(connection.key), SaidOnce(), FIRST_WAIT
    endpoints = [Endpoint(address, connection.authority) for address in connection.addresses]
    for turn in itertools.count():
        if site.finished:
            return
        if turn and turn % len(endpoints) == 0:
            time.sleep(wait * random.uniform(0.5, 1.0))
            wait = min(2 * wait, LONGEST_WAIT)
        endpoint = endpoints[turn % len(endpoints)]
        began = time.monotonic()
        try:
            _attend_once(endpoint, key, site, told)
        except Trouble as trouble:
            told.warn(f"{trouble}; trying on")
        except httpx.HTTPStatusError as refused:
            told.warn(f"{endpoint.address}: refused with status {refused.response.status_code}; trying on")
        except Exception as trouble:  # of the network, or of Flower, whose errors have no common name
            told.warn(f"{endpoint.address}: the connection was lost ({type(trouble).__name__}); trying on")
        if time.monotonic() - began > LONGEST_WAIT:
            wait = FIRST_WAIT


def _attend_once(endpoint: Endpoint, key: SiteKey, site: Attending, told: SaidOnce) -> None:
    """One connection, from a greeting to its end."""
    greeting = greet(endpoint, key)
    if abs(key.offset) > AHEAD:
        way = "behind" if key.offset > 0 else "ahead of"
        log.warning(
            "this machine's clock is %.0f s %s the server's, by which requests are signed; set it (NTP)",
            abs(key.offset),
            way,
        )
    node = SiteNode(endpoint, key)
    with node.connected():
        told.well(f"connected to {endpoint.address}; the server is {printable(greeting.serving)}")
        heard = time.monotonic()
        while not site.finished:
            asked = time.monotonic()
            message = node.receive()
            if message is not None:
                heard = time.monotonic()
                node.reply(message, site.handle(message, node))
                if site.finished:
                    _until_taken(node, message)
                continue
            now = time.monotonic()
            pause = POLL_SECONDS if now - heard < BUSY_SECONDS else IDLE_SECONDS
            time.sleep(max(0.0, asked + pause - now))  # not at all where the server held the question


def _until_taken(node: SiteNode, message: Message) -> None:
    """Stay until the server has our last answer: of a node that has left, the link passes nothing on."""
    until = time.monotonic() + LAST_WORDS_SECONDS
    while time.monotonic() < until and node.is_open(message):
        time.sleep(POLL_SECONDS)
