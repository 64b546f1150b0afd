"""How a site proves who it is, by its key, and why it is not believed; what both say before that.

Flower's nodes sign the time of every request. The proxy checks that before it reads a request's body, and
says why it refuses; a site signs by the server's clock, which it asks for, so that its own may be off.
"""

import datetime
import json
from base64 import b64decode, b64encode
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from coterie.engines.flower import FLOWER
from coterie.engines.flower.internals import KEY_HEADER, SIGNATURE_HEADER, TIME_HEADER

PROTOCOL = 3
"""Of the messages between server and sites; both must speak the same."""
HELLO, OPEN = b"/v1/coterie/hello", b"/v1/coterie/open"
"""Who and when the server is; whether it still waits for the answer to a message."""
MESSAGE_HEADER = "coterie-message"
AHEAD, BEHIND = 5.0, 300.0
"""Seconds by which the time of a request may be ahead of the server's clock, and behind it."""
REFUSED_KEYS = {
    "key unknown": "the server does not know this key; send its .pub file to the server's operator, who adds "
    "it (coterie keys FOLDER --add NAME --public FILE)",
    "key revoked": "the server's operator has revoked this key; ask them, or make a new one (coterie keys . "
    "--site NAME) and send its .pub file",
    "clock": "the time that the request was signed with is too far from the server's",
    "signature": "the request was not signed with the key that it names",
}
"""Why a key is not believed, and what to do."""


class KeyRing(Protocol):
    """The keys that a server knows."""

    def status(self, key: bytes) -> tuple[str | None, str | None]:
        """The name of a key's site, or why the key is refused."""


@dataclass(frozen=True)
class Visitor:
    """Who a request is from, or why that is not believed.

    Args:
        ahead: seconds by which the visitor's clock is ahead of ours; None where it did not say.
    """

    name: str | None
    key: bytes
    refused: str | None
    ahead: float | None = None


def sign(key: ec.EllipticCurvePrivateKey, now: float) -> dict[str, str]:
    """The headers of a request that is made now, by the server's clock."""
    time = datetime.datetime.fromtimestamp(now, datetime.UTC).isoformat()
    signature = key.sign(time.encode("ascii"), ec.ECDSA(hashes.SHA256()))
    return {
        KEY_HEADER: b64encode(public_bytes(key)).decode("ascii"),
        TIME_HEADER: time,
        SIGNATURE_HEADER: b64encode(signature).decode("ascii"),
    }


def public_bytes(key: ec.EllipticCurvePrivateKey) -> bytes:
    """A public key in the encoding that the link compares."""
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return key.public_key().public_bytes(serialization.Encoding.PEM, form)


def who_asks(headers: Mapping[str, str], ring: KeyRing, now: float) -> Visitor:
    """Who signed a request, by its headers alone."""
    try:
        key = b64decode(headers[KEY_HEADER], validate=True)
        signature = b64decode(headers[SIGNATURE_HEADER], validate=True)
        time = headers[TIME_HEADER]
        ahead = datetime.datetime.fromisoformat(time).timestamp() - now
    except (KeyError, ValueError, OverflowError, TypeError):
        return Visitor(None, b"", "signature")
    name, refused = ring.status(key)
    if refused == "key unknown":  # before anything is computed for it
        return Visitor(None, key, refused, ahead)
    try:
        public = serialization.load_pem_public_key(key)
        assert isinstance(public, ec.EllipticCurvePublicKey)
        public.verify(signature, time.encode("ascii"), ec.ECDSA(hashes.SHA256()))
    except (ValueError, AssertionError, InvalidSignature, UnicodeError):
        return Visitor(None, key, "signature", ahead)
    if refused is None and not -BEHIND < ahead < AHEAD:
        refused = "clock"
    return Visitor(name, key, refused, ahead)


@dataclass(frozen=True)
class Greeting:
    """What a server tells of itself.

    Args:
        time: by its clock.
        site: under which name it knows the key of whoever asks; None where it does not.
        refused: why it would not let them in.
        serving: what it is doing.
    """

    protocol: int
    coterie: str
    flower: str
    time: float
    site: str | None
    refused: str | None
    serving: str

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, content: bytes) -> "Greeting | None":
        """What a server said; None where it is no server of ours."""
        try:
            found: dict[str, Any] = json.loads(content)
            kinds = {"protocol": int, "coterie": str, "flower": str, "time": float, "serving": str}
            fits = all(isinstance(found[name], kind) for name, kind in kinds.items())
            texts = all(found[name] is None or isinstance(found[name], str) for name in ("site", "refused"))
            return cls(**found) if fits and texts else None
        except (ValueError, TypeError, KeyError, RecursionError):
            return None


def flower_version() -> str:
    """The minor release of Flower that both sides must have."""
    return FLOWER
