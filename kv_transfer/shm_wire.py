"""The words of the shm transport, one a message on an abstract unix socket, and who is at its other end."""

import os
import socket
import struct
from pathlib import Path

import msgspec

from common.messages import Incarnation, KVLayout

MAX_MESSAGE_BYTES = 1 << 16


class Hello(msgspec.Struct, frozen=True, tag=True):
    """Reader -> owner, first."""

    owner: Incarnation
    reader: Incarnation = Incarnation("")


class Welcome(msgspec.Struct, frozen=True, tag=True):
    layout: KVLayout
    num_blocks: int


class Ask(msgspec.Struct, frozen=True, tag=True):
    """Reader -> owner: let me map the pool. Until it is granted, each read asks with its call's secret."""

    secret: bytes


class Grant(msgspec.Struct, frozen=True, tag=True):
    """Owner -> reader, with the memfd attached. The owner's last word."""

    blocks_offset: int


class Refusal(msgspec.Struct, frozen=True, tag=True):
    """After a Hello the owner hangs up, after an Ask the reader may ask again."""

    reason: str


encode = msgspec.msgpack.encode
question_decoder = msgspec.msgpack.Decoder(Hello | Ask)
greeting_decoder = msgspec.msgpack.Decoder(Welcome | Refusal)
answer_decoder = msgspec.msgpack.Decoder(Grant | Refusal)


def this_host() -> str:
    """Equal in two processes that can reach each other's abstract sockets: one boot, one network namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/net')}"


def peer_is_us(connection: socket.socket) -> bool:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _pid, uid, _gid = struct.unpack("3i", credentials)
    return bool(uid == os.geteuid())
