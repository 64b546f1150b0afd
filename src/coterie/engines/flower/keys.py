"""Certificates and keys: an authority for one federation, the server's certificate, a key for each site.

A site's private key should be made where it is used (`coterie keys DIR --site NAME`) and never travel; only
the `.pub` file goes to the server's operator. Making all of them in one place is for tests and trials.
"""

import datetime
import hashlib
import ipaddress
import os
import re
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from coterie.errors import InputError
from coterie.files import check_place, regular, write_bytes, writing

DAYS = 365
ALWAYS = ("localhost", "127.0.0.1", "::1")
"""Names that the server's certificate always has: the link itself listens on loopback only."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_HOST = re.compile(r"(?=.{1,253}$)(\*\.)?[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*")
_LONGEST_COMMON_NAME = 64


class KeyFolder:
    """Paths inside the server's folder of keys.

    Args:
        authority: the certificate that everybody gets; it opens nothing.
        sites: public keys of the sites that may join, NAME.pub each.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.authority, self.authority_key = path / "ca.crt", path / "ca.key"
        self.certificate, self.key = path / "server.crt", path / "server.key"
        self.sites = path / "sites"

    def site_names(self) -> list[str]:
        return sorted(path.stem for path in self.sites.glob("*.pub"))

    def public_keys(self) -> dict[str, bytes]:
        return {name: public_key_bytes(self.sites / f"{name}.pub") for name in self.site_names()}

    @property
    def revoked(self) -> Path:
        """Keys that were permitted once and are not any more."""
        return self.sites / "revoked"

    def check(self) -> None:
        """Refuse a folder from which no server can start."""
        for path in (self.authority, self.certificate, self.key):
            made = f"coterie keys {self.path} makes a set for trials"
            InputError.when(not path.is_file(), f"{path}: no such file; {made}")
        nobody = f"{self.sites}: no public keys (NAME.pub) of sites that may join"
        InputError.when(not self.site_names(), nobody)


class SiteKeys:
    """The keys of a server's folder as they are now: what is added or revoked there acts at once."""

    def __init__(self, files: KeyFolder) -> None:
        self._files = files
        self._seen: object = None
        self._names: dict[bytes, str] = {}
        self._revoked: set[bytes] = set()
        self._lock = threading.Lock()
        self.names()

    def names(self) -> dict[bytes, str]:
        """The names of sites by their keys."""
        with self._lock:
            folders = (self._files.sites, self._files.revoked)
            files = [path for folder in folders for path in sorted(folder.glob("*.pub"))]
            state = [(str(path), _stat(path)) for path in files]
            if state != self._seen:
                before = self._names.keys() | self._revoked
                self._names = {key: name for name, key in self._read(self._files.sites).items()}
                # What was removed while we serve is revoked, too, unless it is put back.
                refused = set(self._read(self._files.revoked).values())
                self._revoked = refused | (before - self._names.keys())
                self._seen = state
            return self._names

    @staticmethod
    def _read(folder: Path) -> dict[str, bytes]:
        """What can be read: a file that is half written now is read when it is whole."""
        found = {}
        for path in sorted(folder.glob("*.pub")):
            with suppress(InputError):
                found[path.stem] = public_key_bytes(path)
        return found

    def status(self, key: bytes) -> tuple[str | None, str | None]:
        """The name of a key's site, or why the key is refused."""
        names = self.names()
        if key in self._revoked:
            return None, "key revoked"
        return (names[key], None) if key in names else (None, "key unknown")


def _stat(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


def add_site_key(files: KeyFolder, name: str, public: Path) -> Path:
    """Let the holder of a key join, also where the server runs already."""
    check_site_name(name)
    key, target = public_key_bytes(public), files.sites / f"{name}.pub"
    InputError.when(target.exists(), f"--add: {target} exists; --rotate puts another key in its place")
    _check_new(files, name, key)
    write_bytes(target, public.read_bytes())
    return target


def revoke_site_key(files: KeyFolder, name: str) -> Path:
    """Let nobody join with a site's key any more, at once; the key is kept, so that it stays refused."""
    check_site_name(name)
    source = files.sites / f"{name}.pub"
    InputError.when(not source.is_file(), f"--revoke: {source}: no such key")
    digest = hashlib.sha256(public_key_bytes(source)).hexdigest()[:16]
    files.revoked.mkdir(exist_ok=True)
    target = files.revoked / f"{name}-{digest}.pub"
    source.replace(target)
    return target


def rotate_site_key(files: KeyFolder, name: str, public: Path) -> Path:
    """Put another key of a site's in the place of the one that it had, which is revoked."""
    check_site_name(name)
    target = files.sites / f"{name}.pub"
    InputError.when(not target.is_file(), f"--rotate: {target}: no such key; --add lets a new site in")
    content = public.read_bytes() if public.is_file() else b""
    _check_new(files, name, public_key_bytes(public))
    revoke_site_key(files, name)
    write_bytes(target, content)
    return target


def _check_new(files: KeyFolder, name: str, key: bytes) -> None:
    """Refuse a key that somebody has, or had until it was revoked."""
    for folder in (files.sites, files.revoked):
        for path in folder.glob("*.pub"):
            taken = f"{name}: its key is that of {path}; a key belongs to one site, and never comes back"
            InputError.when(public_key_bytes(path) == key, taken)


def check_site_name(name: str) -> None:
    """Refuse a name that could not be a file name everywhere."""
    fits = _NAME.fullmatch(name) is not None
    InputError.when(not fits, f"site: {name!r}; allowed: letters, digits, '.', '_' and '-', at most 100")


def make_keys(folder: Path, hosts: Sequence[str], sites: Sequence[str]) -> KeyFolder:
    """A certificate authority, a server certificate for the hosts and a key pair for each site."""
    files = KeyFolder(folder)
    InputError.when(files.authority.exists(), f"{files.authority}: exists; keys are never overwritten")
    for name in sites:
        check_site_name(name)
    names = [_alternative(host) for host in dict.fromkeys((*ALWAYS, *hosts))]
    common = next((host for host in hosts if len(host) <= _LONGEST_COMMON_NAME), "localhost")
    authority_key, server_key = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    issuer = "Coterie test authority"
    authority = _certificate(issuer, authority_key, issuer, authority=True)
    certificate = (
        _certificate(common, server_key, issuer, authority=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    )
    contents: dict[Path, bytes] = {}
    for path, builder in ((files.authority, authority), (files.certificate, certificate)):
        signed = builder.sign(authority_key, hashes.SHA384())
        contents[path] = signed.public_bytes(serialization.Encoding.PEM)
    for path, key in ((files.authority_key, authority_key), (files.key, server_key)):
        contents[path] = _private(key, serialization.PrivateFormat.PKCS8)
    for name in sites:
        contents |= _pair(files.sites, name)
    _write_all(files.sites, contents)
    return files


def make_site_key(folder: Path, name: str) -> Path:
    """A site's key pair: NAME (private, stays there) and NAME.pub (for the server's operator)."""
    check_site_name(name)
    _write_all(folder, _pair(folder, name))
    return folder / f"{name}.key"


def _pair(folder: Path, name: str) -> dict[Path, bytes]:
    key = ec.generate_private_key(ec.SECP384R1())
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    private = _private(key, serialization.PrivateFormat.OpenSSH)
    return {folder / f"{name}.key": private, folder / f"{name}.pub": public + b"\n"}


def public_key_bytes(path: Path) -> bytes:
    """A site's public key, in the encoding that the link compares."""
    try:
        key = serialization.load_ssh_public_key(regular(path).read_bytes())
    except (OSError, ValueError) as mistake:
        raise InputError(f"{path}: not a public key in OpenSSH format ({type(mistake).__name__})") from None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise InputError(f"{path}: {type(key).__name__}; allowed: an elliptic-curve key (P-384)")
    return key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def _private(key: ec.EllipticCurvePrivateKey, kind: serialization.PrivateFormat) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, kind, serialization.NoEncryption())


def _certificate(
    subject: str, key: ec.EllipticCurvePrivateKey, issuer: str, *, authority: bool
) -> x509.CertificateBuilder:
    """A certificate to sign, of the authority itself or of whom it vouches for."""
    now = datetime.datetime.now(datetime.UTC)
    usage = x509.KeyUsage(
        digital_signature=not authority,
        key_cert_sign=authority,
        crl_sign=authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
    constraints = x509.BasicConstraints(ca=authority, path_length=0 if authority else None)
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=DAYS))
        .add_extension(constraints, critical=True)
        .add_extension(usage, critical=True)
    )


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        check_host(host, "--host")
        return x509.DNSName(host)


def check_host(host: str, option: str) -> None:
    """Refuse what names no machine; nothing at all would stand for every address of this one."""
    with suppress(ValueError):
        ipaddress.ip_address(host)
        return
    fits, allowed = _HOST.fullmatch(host) is not None, "an address or a name like server.example.org"
    InputError.when(not fits, f"{option}: {host!r} is not allowed, {allowed} is")


def is_loopback(host: str) -> bool:
    """Whether a host is this machine itself."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def private_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """A site's own key."""
    try:
        key = serialization.load_ssh_private_key(regular(path).read_bytes(), None)
    except (OSError, ValueError, TypeError) as mistake:
        raise InputError(
            f"--key: {path} is not a private key in OpenSSH format ({type(mistake).__name__})"
        ) from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise InputError(f"--key: {path}: {type(key).__name__}; allowed: an elliptic-curve key (P-384)")
    return key


def _write_all(folder: Path, contents: Mapping[Path, bytes]) -> None:
    """New files, never an old one, private keys for their owner alone: all of them, or none and no folder."""
    check_place(folder, "FOLDER")
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    try:
        for path, content in contents.items():
            with writing(path):
                try:
                    mode = 0o600 if path.suffix == ".key" else 0o644
                    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
                except FileExistsError:
                    raise InputError(f"{path}: exists; keys are never overwritten") from None
                written.append(path)
                with os.fdopen(handle, "wb") as file:
                    file.write(content)
    except BaseException:
        for path in written:
            path.unlink()
        for each in made:
            each.rmdir()
        raise
