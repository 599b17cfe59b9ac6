"""API keys: whose request it is, and what its tenant may ask for. Without a file of them everybody is let in.

    secret = "..."                 # hex; the tenants' salts are derived from it

    [tenants."acme"]
    keys = ["sha256:..."]          # of the keys, which are written down nowhere
    priority = "normal"            # the highest class it may ask for

A tenant's salt goes into the hash of every block: another tenant's cached prefix can be neither found nor timed. It
comes from the tenant's name and the file's secret, so it outlives keys, and gateways with equal files agree.
"""

import fcntl
import hashlib
import hmac
import os
import secrets
import stat
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from common import telemetry
from common.clock import Clock
from common.errors import ConfigError, UnauthorizedError
from common.messages import Origin, Priority

log = telemetry.logger(__name__)

SALT_BYTES = 16
_SECRET_BYTES = 32
_LOOK_AGAIN_S = 1.0
_CLASSES = list(Priority)
_HEADER = "# API keys of Baton's gateway, written by `baton api-key`: comments are not kept.\n"

Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]


class TenantEntry(msgspec.Struct, forbid_unknown_fields=True):
    keys: list[Annotated[str, Meta(pattern="^sha256:[0-9a-f]{64}$")]]
    priority: Priority = Priority.NORMAL


class KeyFile(msgspec.Struct, forbid_unknown_fields=True):
    secret: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    tenants: dict[Name, TenantEntry]


@dataclass(frozen=True, slots=True)
class Tenant:
    """`priority` is the highest class it may ask for."""

    name: str = ""
    salt: bytes = b""
    priority: Priority = Priority.HIGH

    def origin(self, asked: Priority) -> Origin:
        """A class that is too high is lowered to the tenant's."""
        return Origin(self.salt, max(asked, self.priority, key=_CLASSES.index))


class ApiKeys:
    """Follows the file: a change counts from the next request on, a second later at most.

    While the file cannot be used, what was read last stays.
    """

    def __init__(self, path: str, clock: Clock) -> None:
        """ConfigError if `path`, unless empty, is no file of keys."""
        self._path = Path(path) if path else None
        self._clock = clock
        self._looked_s = clock.now_s()
        self._changed_ns = 0
        self._tenants: list[tuple[str, Tenant]] = []  # by hash of a key
        if self._path is not None:
            self._changed_ns = _changed_ns(self._path)
            self._tenants = _tenants_of(read(self._path))

    def tenant_of(self, authorization: str | None) -> Tenant:
        """Whose key the header holds. UnauthorizedError if it holds none, or one that nobody was given."""
        if self._path is None:
            return Tenant()
        self._follow(self._path)
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise UnauthorizedError("this server needs an API key: send it as 'Authorization: Bearer KEY'")
        digest = digest_of(key.strip())
        found = None
        for known, tenant in self._tenants:  # all of them: the time taken says nothing
            if hmac.compare_digest(known, digest):
                found = tenant
        if found is None:
            raise UnauthorizedError("this API key is not known here")
        return found

    def _follow(self, path: Path) -> None:
        now_s = self._clock.now_s()
        if now_s - self._looked_s < _LOOK_AGAIN_S:
            return
        self._looked_s = now_s
        changed_ns = _changed_ns(path)
        if changed_ns == self._changed_ns:
            return
        self._changed_ns = changed_ns
        try:
            self._tenants = _tenants_of(read(path))
        except ConfigError as error:
            log.error("API keys not read again", reason=error.message)


def digest_of(key: str) -> str:
    return f"sha256:{hashlib.sha256(key.encode('utf-8', 'surrogateescape')).hexdigest()}"


def read(path: Path) -> KeyFile:
    """ConfigError says what is wrong with the file."""
    try:
        return msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), KeyFile)
    except OSError as error:
        raise ConfigError(f"api_keys = {str(path)!r} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"api_keys = {str(path)!r} is no file of API keys: {error}") from error


def add_key(path: Path, name: str, priority: Priority | None) -> str:
    """A new key for a tenant, in a file that is made if need be, readable for its owner alone. Returns the key.

    `priority` None leaves the tenant's class as it is. ConfigError if the name is none or the file cannot be written.
    """
    with _alone(path):
        return _add_key(path, name, priority)


def _add_key(path: Path, name: str, priority: Priority | None) -> str:
    file = read(path) if path.exists() else KeyFile(secrets.token_bytes(_SECRET_BYTES).hex(), {})
    key = f"sk-baton-{secrets.token_urlsafe(_SECRET_BYTES)}"
    entry = file.tenants.setdefault(name, TenantEntry([]))
    entry.keys.append(digest_of(key))
    entry.priority = priority or entry.priority
    try:
        msgspec.convert(msgspec.to_builtins(file), KeyFile)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"--tenant {name!r} is no name: letters, digits, '.', '_' and '-', at most 64, a letter or digit first"
        ) from error
    _write(path, _HEADER + _toml(file))
    return key


def _toml(file: KeyFile) -> str:
    """Nothing in the file needs escaping: see its patterns."""
    parts = [f'secret = "{file.secret}"\n']
    for name, entry in file.tenants.items():
        keys = "".join(f'    "{key}",\n' for key in entry.keys)
        parts.append(f'[tenants."{name}"]\nkeys = [\n{keys}]\npriority = "{entry.priority}"\n')
    return "\n".join(parts)


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Nobody else changes the file meanwhile: a key that was printed must not be lost to another's copy of before."""
    try:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)  # the file itself is replaced, a lock on it lost
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
    try:
        with suppress(OSError):  # a network's file system may know no locks
            fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _write(path: Path, text: str) -> None:
    """Whole or not at all. A file that was there keeps its owner and mode: its gateway must go on reading it."""
    path = path.resolve()  # what a link leads to, not the link
    new = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(text)
            if path.exists():
                before = path.stat()
                os.fchown(file.fileno(), before.st_uid, before.st_gid)
                os.fchmod(file.fileno(), stat.S_IMODE(before.st_mode))
        new.replace(path)
    except OSError as error:
        new.unlink(missing_ok=True)
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def _tenants_of(file: KeyFile) -> list[tuple[str, Tenant]]:
    secret = bytes.fromhex(file.secret)
    tenants = []
    for name, entry in file.tenants.items():
        salt = hashlib.blake2b(name.encode(), key=secret, digest_size=SALT_BYTES).digest()
        tenants += [(key, Tenant(name, salt, entry.priority)) for key in entry.keys]
    return tenants


def _changed_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
