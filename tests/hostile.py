"""What a stranger may send, as Hypothesis strategies: bytes for every kind of port, from noise to words that are
almost right.

Left out is what whoever reaches an open port is trusted with: to drain a node, or to take the name of one.
"""

from typing import Any

import msgspec
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from common import messages
from common.messages import WIRE_VERSION
from kv_transfer import tcp_wire

Wire = SearchStrategy[list[bytes]]
"""The parts of one ZeroMQ message."""

NOISE = st.one_of(
    st.binary(max_size=200),
    st.integers(0, 60_000).map(lambda size: b"\xff" * size),
    st.sampled_from([b"", b"\0", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\0\xc8" + bytes(64), b"\x90", b"\x91\xc0"]),
)
NUMBERS = st.one_of(
    st.sampled_from([0, 1, -1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, -(2**63), 2**64 - 1]),
    st.integers(-5, 50),
)
SECONDS = st.sampled_from([None, -1.0, 0.0, 1e-9, 0.01, 5.0, 1e300, float("inf"), -float("inf"), float("nan")])
TEXTS = st.one_of(st.text(max_size=12), st.sampled_from(["", "x" * 50_000, "\0", "../../etc", "tcp://127.0.0.1:1"]))
BYTES = st.one_of(st.binary(max_size=20), st.just(bytes(100_000)))
JUNK: SearchStrategy[Any] = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, st.floats(), TEXTS, BYTES),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)
TOKENS = st.one_of(st.lists(NUMBERS, max_size=6), st.sampled_from([1, 3000, 100_000]).map(lambda n: [7] * n))

# --- calls --------------------------------------------------------------------------------------------------

_OTHERS = ["Registered", "View", "Routed", "Tokens", "Leaving", "BlocksReady", "PrefillDone", "Dance", "", 7]


def weighted(*choices: tuple[int, SearchStrategy[Any]]) -> SearchStrategy[Any]:
    """`one_of` with weights; that one also takes choices within choices for its own."""
    return st.sampled_from([one for weight, one in choices for _ in range(weight)]).flatmap(lambda one: one)


class Words:
    """Strategies that know the cluster they are meant for: some of what they say gets past the first checks.

    `well_formed`: every field has its type, and only its value is absurd.
    """

    def __init__(self, view: messages.View, *, well_formed: bool) -> None:
        self._well_formed = well_formed
        [node, *_] = view.nodes
        self._digests = st.sampled_from([node.card.model_digest, node.card.model_digest, "f" * 32])
        self._models = st.sampled_from([node.card.model, "", "other"])
        no_layout = {"block_size": 0, "dtype": "", "itemsize": 0, "layers": []}
        self._layouts = st.sampled_from([to_plain(node.card.layout), to_plain(node.card.layout), no_layout])
        self._incarnations = st.sampled_from(["", "0" * 32, *(view.card.incarnation for view in view.nodes)])

    def _fields(self, **fields: SearchStrategy[Any]) -> SearchStrategy[dict[str, Any]]:
        """A message as a map; now and then with a field that is wrong or not there."""
        right = st.fixed_dictionaries(fields)
        loose = st.fixed_dictionaries({}, optional={name: st.one_of(value, JUNK) for name, value in fields.items()})
        return right if self._well_formed else weighted((7, right), (1, loose))

    def _tagged(self, type: str, **fields: SearchStrategy[Any]) -> SearchStrategy[dict[str, Any]]:
        return self._fields(**fields).map(lambda found: {"type": type, **found})

    def _seldom(self, wrong: SearchStrategy[Any]) -> tuple[int, SearchStrategy[Any]]:
        return 0 if self._well_formed else 1, wrong

    def caller_frames(self) -> SearchStrategy[dict[str, Any]]:
        """What the caller's side of a link may say, more or less."""
        calls = weighted((5, st.integers(1, 9)), (1, NUMBERS))
        times = weighted((2, st.none()), (1, SECONDS))
        return weighted(
            (8, self._tagged("Open", call=calls, body=self.requests(), timeout_s=times)),
            (3, self._tagged("Send", call=calls, seq=st.one_of(st.integers(0, 2), NUMBERS), body=self.sent())),
            (1, self._tagged("Cancel", call=calls)),
            (1, self._tagged("Beat", calls=st.dictionaries(calls, NUMBERS, max_size=4))),
            self._seldom(st.just({"type": "Beat", "calls": dict.fromkeys(range(5000), 0)})),
            self._seldom(self.hello()),
            self._seldom(self.callee_frames()),
        )

    def callee_frames(self) -> SearchStrategy[dict[str, Any]]:
        """The wrong direction."""
        items = st.sampled_from(_OTHERS).flatmap(lambda type: st.just({"type": type, "tokens": [1]}))
        return st.one_of(
            self._tagged("Welcome", node=TEXTS, incarnation=self._incarnations),
            self._tagged("Refuse", error=JUNK),
            self._tagged("Accept", call=NUMBERS),
            self._tagged("Item", call=NUMBERS, seq=NUMBERS, body=items),
            self._tagged("End", call=NUMBERS, seq=NUMBERS, error=JUNK),
            self._tagged("Dance", call=NUMBERS),
        )

    def hello(self) -> SearchStrategy[dict[str, Any]]:
        return st.fixed_dictionaries(
            {
                "type": st.just("Hello"),
                "version": st.sampled_from([WIRE_VERSION] * 6 + [0, -1, 2**40]),
                "node": st.one_of(st.just("stranger"), TEXTS),
                "incarnation": st.sampled_from(["1" * 32, ""]),
            },
            optional={"to": st.one_of(st.none(), self._incarnations)},
        )

    def requests(self) -> SearchStrategy[dict[str, Any]]:
        request = st.sampled_from(["", "a" * 32, "r" * 5_000])
        asked = {
            "request": request,
            "attempt": NUMBERS,
            "model_digest": self._digests,
            "tokens": weighted((1, st.just([7] * 40)), (1, TOKENS)),
            "num_prompt_tokens": weighted((1, st.just(1)), (1, NUMBERS)),
            "sampling": weighted((1, st.just({"max_tokens": 60, "seed": 1})), (1, self._sampling())),
            "origin": self._fields(tenant=BYTES, priority=st.sampled_from(["high", "low"])),
        }
        prefill = st.one_of(st.none(), self._addresses())
        sizes = weighted((3, st.integers(1, 4096)), (1, NUMBERS))
        return weighted(
            (3, self._tagged("Generate", **asked, prefill=prefill)),
            (3, self._tagged("Prefill", **asked, layout=self._layouts)),
            (1, self._tagged("Handover", request=request, attempt=NUMBERS, layout=self._layouts)),
            (2, self._tagged("Route", model=self._models, num_tokens=sizes, prefix=BYTES, first_token_s=SECONDS)),
            (4, self._tagged("Register", card=self._cards())),
            (1, self._tagged("Watch", gateway=st.one_of(st.none(), self._gateways()))),
            (1, st.just({"type": "Audit"})),
            self._seldom(JUNK),
        )

    def sent(self) -> SearchStrategy[Any]:
        seconds = SECONDS.filter(lambda seconds: seconds is not None)
        load = self._fields(
            num_waiting=NUMBERS,
            num_waiting_tokens=NUMBERS,
            free_blocks=NUMBERS,
            progress_age_s=seconds,
            tokens_per_s=seconds,
            prompt_tokens_per_s=seconds,
            num_calls=NUMBERS,
        )
        news = self._fields(added=BYTES, dropped=BYTES, whole=st.booleans())
        signs = st.sampled_from([{"type": "Pulled"}, {"type": "Stop"}])
        return weighted((2, self._tagged("Report", load=load, cache=news)), (1, signs), self._seldom(JUNK))

    def _sampling(self) -> SearchStrategy[dict[str, Any]]:
        numbers = st.one_of(SECONDS.filter(lambda seconds: seconds is not None), NUMBERS)
        return self._fields(
            max_tokens=NUMBERS, seed=NUMBERS, temperature=numbers, top_p=numbers, top_k=NUMBERS, stop_token_ids=TOKENS
        )

    def _addresses(self) -> SearchStrategy[dict[str, Any]]:
        offers = st.lists(self._fields(transport=st.sampled_from(["shm", "tcp", "none"]), address=TEXTS), max_size=2)
        return self._fields(node=TEXTS, incarnation=self._incarnations, address=TEXTS, offers=offers)

    def _cards(self) -> SearchStrategy[dict[str, Any]]:
        """Complete ones: a node that comes to be listed. Never under a name that is taken."""
        return st.fixed_dictionaries(
            {
                "node": st.sampled_from(["stranger", "", "\0", "n" * 5_000]),
                "incarnation": st.sampled_from(["1" * 32, "", "2" * 32]),
                "role": st.sampled_from(["prefill", "decode"]),
                "address": TEXTS,
                "model": st.sampled_from(["", "other"]),
                "model_digest": self._digests,
                "layout": st.fixed_dictionaries(
                    {
                        "block_size": weighted((3, st.integers(1, 64)), (1, NUMBERS)),
                        "dtype": TEXTS,
                        "itemsize": NUMBERS,
                        "layers": st.lists(st.lists(NUMBERS, min_size=3, max_size=3), max_size=3),
                    }
                ),
                "max_model_len": weighted((3, st.integers(0, 4096)), (1, NUMBERS)),
                "num_blocks": weighted((3, st.integers(0, 4096)), (1, NUMBERS)),
            }
        )

    def _gateways(self) -> SearchStrategy[dict[str, Any]]:
        return st.fixed_dictionaries(
            {"node": TEXTS, "incarnation": self._incarnations, "address": TEXTS, "url": TEXTS, "pid": NUMBERS}
        )

    # --- messages -------------------------------------------------------------------------------------------

    def of_calls(self) -> SearchStrategy[list[list[bytes]]]:
        """What one connection says to a server of calls: mostly Hello first."""
        plain = {"type": "Hello", "version": WIRE_VERSION, "node": "stranger", "incarnation": "1" * 32}
        hello = weighted((3, st.just(plain)), self._seldom(self.hello())).map(lambda frame: [pack([frame])])
        said = weighted(
            (6, st.lists(self.caller_frames(), min_size=1, max_size=3).map(lambda frames: [pack(frames)])),
            self._seldom(_broken(st.lists(self.caller_frames(), min_size=1).map(pack)).map(lambda part: [part])),
            self._seldom(messages_of(JUNK)),
            self._seldom(st.lists(NOISE, max_size=4)),
        )
        return _after(hello, said)

    def of_reads(self) -> SearchStrategy[list[list[bytes]]]:
        """What one connection says to a server of blocks over tcp."""
        refs = st.one_of(
            st.lists(st.tuples(NUMBERS, NUMBERS), max_size=4), st.sampled_from([0, 50_000]).map(lambda n: [(0, 0)] * n)
        )
        hello = self._incarnations.map(lambda owner: [pack(["Hello", tcp_wire.VERSION, owner])])
        word = st.one_of(
            st.tuples(st.just("Hello"), NUMBERS, self._incarnations),
            st.tuples(st.just("Read"), NUMBERS, refs, BYTES),
            st.tuples(st.just("Read"), NUMBERS, refs, BYTES),
            st.tuples(st.sampled_from(["Credit", "Cancel"]), NUMBERS),
            st.tuples(st.sampled_from(["Chunk", "Welcome", "Refuse", "Ping", "Dance"]), JUNK, JUNK),
            JUNK,
        )
        said = weighted((5, messages_of(word)), (1, st.lists(NOISE, max_size=3)))
        return _after(hello, said)

    def of_mappings(self) -> SearchStrategy[list[bytes]]:
        """What one connection says on the unix socket of a shared pool."""
        word = st.one_of(
            self._incarnations.map(lambda owner: {"type": "Hello", "owner": owner}),
            self._tagged("Hello", owner=TEXTS),
            self._tagged("Ask", secret=BYTES),
            JUNK,
        )
        return st.lists(st.one_of(word.map(pack), NOISE, _broken(word.map(pack))), min_size=1, max_size=4)


def _after(hello: Wire, said: Wire) -> SearchStrategy[list[list[bytes]]]:
    """A connection's messages: mostly Hello first."""
    first = st.sampled_from([0, 1, 1, 1, 1]).flatmap(lambda count: st.lists(hello, min_size=count, max_size=count))
    return st.tuples(first, st.lists(said, min_size=1, max_size=5)).map(lambda both: both[0] + both[1])


def to_plain(part: object) -> Any:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(part))


def pack(value: Any) -> bytes:
    """MessagePack of anything that JUNK makes; numbers that have no encoding become text."""
    try:
        return msgspec.msgpack.encode(value)
    except (OverflowError, ValueError, UnicodeEncodeError):
        return msgspec.msgpack.encode(str(value).encode(errors="replace"))


def messages_of(values: SearchStrategy[Any]) -> Wire:
    """One-part messages, whole or broken."""
    return weighted((4, values.map(pack)), (1, _broken(values.map(pack)))).map(lambda message: [message])


def _broken(whole: SearchStrategy[bytes]) -> SearchStrategy[bytes]:
    """Cut short, with a byte changed, said twice, or deep below a thousand lists."""
    place = st.integers(0, 2**16)
    return st.one_of(
        st.tuples(whole, place).map(lambda both: both[0][: both[1] % (len(both[0]) + 1)]),
        st.tuples(whole, place, st.integers(0, 255)).map(lambda three: changed(*three)),
        whole.map(lambda message: message + message),
        st.tuples(st.sampled_from([100, 2_000, 50_000]), whole).map(lambda both: b"\x91" * both[0] + both[1]),
        # A map that has each of its keys twice.
        whole.map(lambda message: b"\x91\x84" + b"\xa4type\xa6Cancel\xa4call\x01" * 2 + message[:1]),
        whole.map(lambda message: b"\x91\xdf\xff\xff\xff\xff" + message),  # announces four thousand million pairs
        whole.map(lambda message: b"\xdd\xff\xff\xff\xff" + message),
        whole.map(lambda message: b"\x91\x82\xa4type\xa5Hello\xa4node\xa2\xff\xfe" + message),  # no UTF-8
        whole.map(lambda message: b"\xc7\x05\x63" + message[:5]),  # an extension that nobody knows
    )


def changed(message: bytes, place: int, byte: int) -> bytes:
    if not message:
        return bytes([byte])
    place %= len(message)
    return message[:place] + bytes([byte]) + message[place + 1 :]


# --- below calls: the wire itself ------------------------------------------------------------------------------

GREETING = b"\xff" + bytes(7) + b"\x01\x7f" + b"\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x04\x1a\x05READY\x0bSocket-Type\0\0\0\x06DEALER"


def zmtp() -> SearchStrategy[bytes]:
    """A ZeroMQ connection that goes wrong: before, in or after its handshake."""
    starts = st.sampled_from(
        [
            GREETING[:1],
            GREETING[:11],
            GREETING,
            GREETING + READY,
            GREETING.replace(b"NULL", b"CURV"),
            GREETING.replace(b"\x03\x01", b"\x01\x00"),
            GREETING.replace(b"\x03\x01", b"\xff\xff"),
            b"\x01\0",  # version 1 had no signature
        ]
    )
    frames = st.sampled_from(
        [
            b"\0\x05hello",
            b"\x02" + b"\xff" * 8,  # a frame of 2**64 - 1 bytes
            b"\x02" + b"\x7f" + b"\xff" * 7 + bytes(100),
            b"\x01\x02ab" * 50,  # parts without an end
            b"\x04\x00",
            b"\x04\x05\x04PING",
            b"\x04\x07\x05ERROR\xff",
            b"\xff\xff\xff",
        ]
    )
    return st.tuples(starts, st.lists(st.one_of(frames, NOISE), max_size=4)).map(
        lambda both: both[0] + b"".join(both[1])
    )
