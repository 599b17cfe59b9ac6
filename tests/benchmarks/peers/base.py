"""What a peer is: another project's server that takes the same requests on the same machine.

Adding one is a file with a `Peer` in it and a line in `PEERS`. A peer is installed once, into an environment of its
own under `~/.cache/baton/peers` (or `$BATON_CACHE`), and started as a child process (`server`).
"""

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Protocol

from common.model.store import Progress, cache_root

KV_CACHE_BYTES = 1 << 30
"""What everybody may keep keys and values in, as far as it can be told."""

PEERS = {
    "llama.cpp-q4_1": "tests.benchmarks.peers.llama_cpp:Q4_1",
    "llama.cpp-q8_0": "tests.benchmarks.peers.llama_cpp:Q8_0",
    "openvino-int8": "tests.benchmarks.peers.openvino:INT8",
    "openvino-fp32": "tests.benchmarks.peers.openvino:FP32",
    "vllm": "tests.benchmarks.peers.vllm:VLLM",
    "transformers": "tests.benchmarks.peers.transformers_serve:TRANSFORMERS",
}
DEFAULT = ("llama.cpp", "openvino")


class Unavailable(Exception):
    """This peer cannot be had here; the message says why and what would help."""


class Peer(Protocol):
    """`command` is good only after `install`."""

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> str:
        """What the table calls it: the pinned package, the weights and what of its settings is not the default."""
        ...

    def install(self, progress: Progress) -> None:
        """Bring it, and the demo model in its form, onto this machine, unless both are there. Unavailable says why
        not."""
        ...

    def command(self, port: int) -> Sequence[str]:
        """Starts a server of OpenAI's completions on this port of the loopback, in the foreground."""
        ...

    def environment(self) -> Mapping[str, str]:
        """Variables for it beside ours."""
        ...


def folder(name: str) -> Path:
    """Where a peer keeps what it needs."""
    return cache_root() / "peers" / name


def chosen(words: Sequence[str]) -> list[str]:
    """Names of peers: each word is one, or what some begin with (`openvino`). ValueError names an unknown word."""
    names: list[str] = []
    for word in words:
        found = [name for name in PEERS if name == word or name.startswith(f"{word}-")]
        if not found:
            raise ValueError(f"no peer is called {word!r}; known: {', '.join(PEERS)}")
        names += [name for name in found if name not in names]
    return names


def load(name: str) -> Peer:
    module, _, attribute = PEERS[name].partition(":")
    peer: Peer = getattr(import_module(module), attribute)
    return peer
