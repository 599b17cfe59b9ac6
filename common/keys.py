"""Who is let in: the keys of a cluster, and what a process may bind without them.

One cluster has two pairs of keys. Every process that listens shows the server's, every process that dials the
client's; a listener lets in whoever holds the client's, a dialler talks to nobody but the holder of the server's.
Both pairs lie in one folder, which every host of the cluster has a copy of. It is the cluster's trust: whoever can
read it can do anything here.
"""

import ipaddress
import os
import stat
import tomllib
from dataclasses import dataclass
from pathlib import Path

from common.config import LinkConfig
from common.errors import ConfigError

_SERVER, _CLIENT = "server.key", "client.key"
_KEY_CHARACTERS = 40
_NAMES_OF_LOOPBACK = ("localhost", "lo")


@dataclass(frozen=True, slots=True)
class KeyPair:
    """Z85 text, as ZeroMQ takes it."""

    public: bytes
    secret: bytes

    def __repr__(self) -> str:
        return f"KeyPair({self.public.decode()})"  # the secret must reach no log


@dataclass(frozen=True, slots=True)
class Keys:
    server: KeyPair
    client: KeyPair


@dataclass(frozen=True, slots=True, kw_only=True)
class Trust:
    """What a process knows of its cluster's keys. `open_network`: whoever can reach its ports is trusted."""

    keys: Keys | None = None
    open_network: bool = False

    @classmethod
    def of(cls, links: LinkConfig) -> "Trust":
        """Reads the keys. ConfigError if they are not there or anybody can read them."""
        return cls(keys=load(Path(links.keys)) if links.keys else None, open_network=links.open_network)

    def check_bind(self, address: str) -> None:
        """ConfigError if listening at this endpoint would let in whoever comes by the network."""
        if self.keys is not None or self.open_network or is_local(address):
            return
        raise ConfigError(
            f"listen = {address!r} can be reached from other hosts, and there are no keys: whoever reaches it could "
            "use the cluster and read its requests. Make keys with `baton keys new FOLDER` and give every process "
            "--keys FOLDER; or say --open-network, where you trust everybody who reaches the port"
        )


def is_local(address: str) -> bool:
    """Whether a ZeroMQ endpoint can be reached from this host alone. What is no endpoint at all counts as such."""
    scheme, separator, rest = address.partition("://")
    if scheme in ("ipc", "inproc") or not separator:
        return True
    host = rest.rpartition(":")[0].strip("[]")
    try:
        return scheme == "tcp" and ipaddress.ip_address(host).is_loopback
    except ValueError:
        return scheme == "tcp" and host in _NAMES_OF_LOOPBACK


def create(folder: Path) -> None:
    """Draw both pairs into `folder`, which nobody else can read. ConfigError if it holds anything or cannot be made."""
    import zmq  # here, for what only reads settings needs none

    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ConfigError(f"{folder} is not empty, and keys are never overwritten; name a new folder")
        for name in (_SERVER, _CLIENT):
            public, secret = (key.decode() for key in zmq.curve_keypair())
            with open(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                # Literal strings: Z85 uses many signs, but no apostrophe.
                file.write(f"public = '{public}'\nsecret = '{secret}'\n")
    except OSError as error:
        raise ConfigError(f"cannot make keys in {folder}: {error.strerror}") from error


def load(folder: Path) -> Keys:
    return Keys(server=_pair(folder / _SERVER), client=_pair(folder / _CLIENT))


def _pair(path: Path) -> KeyPair:
    try:
        if path.stat().st_mode & (stat.S_IROTH | stat.S_IWOTH):
            raise ConfigError(f"keys: everybody on this host can read {path}; chmod 600 it, or make new keys")
        fields = tomllib.loads(path.read_text(encoding="ascii"))
        public, secret = (str(fields[name]).encode("ascii") for name in ("public", "secret"))
    except OSError as error:
        raise ConfigError(
            f"keys: cannot read {path} ({error.strerror}); --keys names a folder that `baton keys new` made"
        ) from error
    except (ValueError, KeyError) as error:
        raise ConfigError(f"keys: {path} is no key file of `baton keys new` ({error})") from error
    if len(public) != _KEY_CHARACTERS or len(secret) != _KEY_CHARACTERS:
        raise ConfigError(f"keys: {path} is no key file of `baton keys new`: its keys have the wrong length")
    return KeyPair(public, secret)
