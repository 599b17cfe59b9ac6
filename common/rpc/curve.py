"""ZeroMQ's CURVE: encryption, and who is let in.

A listener needs more than its own key: without somebody who answers ZAP, ZeroMQ's question about each newcomer, it
lets any key in. `Doorkeeper` answers for one context, on the loop that its sockets live on.
"""

import hmac

import zmq
from zmq.utils import z85

from common import telemetry
from common.keys import Keys
from common.rpc.sockets import SocketReader

_ZAP = "inproc://zeromq.zap.01"
_DOMAIN = b"baton"

REFUSALS = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
"""Events of a socket's monitor that tell of a handshake in which one side refused the other. Of two whose mechanisms
differ, the second to notice may see no more than that the first has hung up."""

log = telemetry.logger(__name__)
_sparing = telemetry.Sparing(log)


class Doorkeeper:
    """Lets in who holds the client's key. Open it before anything binds, close it after; it costs no thread."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", keys: Keys) -> None:
        self._client_key = z85.decode(keys.client.public)
        self._sock = context.socket(zmq.REP)
        self._sock.setsockopt(zmq.LINGER, 0)
        self._sock.bind(_ZAP)
        self._reader = SocketReader(self._sock, self._asked)

    def close(self) -> None:
        self._reader.close()

    def _asked(self, question: list[bytes]) -> None:
        """RFC 27: version, request id, domain, address, routing id, mechanism, the newcomer's key."""
        version, request, _, address, _, mechanism, *credentials = question
        is_ours = mechanism == b"CURVE" and hmac.compare_digest(b"".join(credentials), self._client_key)
        if not is_ours:
            _sparing.warning("stranger refused", why="its key is not the cluster's", address=address.decode())
        status, text = (b"200", b"welcome") if is_ours else (b"400", b"not the cluster's key")
        self._sock.send_multipart((version, request, status, text, b"", b""))


def as_listener(sock: "zmq.Socket[bytes]", keys: Keys | None) -> None:
    """Call before `bind`. The socket's context needs a `Doorkeeper`."""
    if keys is not None:
        sock.setsockopt(zmq.CURVE_SERVER, 1)
        sock.setsockopt(zmq.CURVE_SECRETKEY, keys.server.secret)
        sock.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)
        sock.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without a Doorkeeper nobody comes in, instead of everybody


def as_dialler(sock: "zmq.Socket[bytes]", keys: Keys | None) -> None:
    """Call before `connect`."""
    if keys is not None:
        sock.setsockopt(zmq.CURVE_SERVERKEY, keys.server.public)
        sock.setsockopt(zmq.CURVE_PUBLICKEY, keys.client.public)
        sock.setsockopt(zmq.CURVE_SECRETKEY, keys.client.secret)


def refused_us(event: int, value: int) -> str | None:
    """Why a connection that we dialled ended in its handshake, by its monitor's event; None for another end."""
    match event:
        case zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            return "refused: our keys are not those of its cluster (--keys)"
        case zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL if value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
            return "refused: one of us has keys and the other has none (--keys)"
        case zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            return "refused: it hung up in the handshake, as one with other keys does (--keys)"
        case _:
            return None


def log_stranger(event: int, value: int) -> None:
    """On a listener: somebody was refused whom no Doorkeeper was asked about."""
    match event, value:
        case zmq.EVENT_HANDSHAKE_FAILED_AUTH, _:
            return
        case zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, _:
            why = "it hung up in the handshake"
        case _, zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
            why = "one of us has keys and the other has none"
        case _, zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC:
            why = "it took us for another cluster: its keys are not ours"
        case _:
            why = "it speaks no ZeroMQ"
    _sparing.warning("stranger refused", why=why)
