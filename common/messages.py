"""Every message that crosses a wire, and the id types.

Two layers, both MessagePack (msgspec structs, tagged by class name):

- *Frames* carry calls over one link (`common/rpc`). The caller's side says Hello, Open, Send, Cancel;
  the callee's side says Welcome, Accept, Item, End; both Beat. Every frame has one direction, so a
  frame sent the wrong way does not decode.
- *Bodies* ride inside frames. A request body names its method by its type (`Generate`, `Prefill`, ...);
  each request's docstring says which items flow each way and who ends the call.

Times travel as remaining or elapsed seconds, never as wall time. Token ids are plain ints. Adding a
field with a default is compatible; anything else raises `WIRE_VERSION`.
"""

from enum import StrEnum
from typing import Annotated, NewType

import msgspec
from msgspec import Meta

from common.errors import BatonError, ErrorCode, from_wire

WIRE_VERSION = 1
CACHE_NAME_BYTES = 8
MAX_NAME_CHARS = 255
MAX_CHOICES = 16
"""Answers to one prompt."""
MAX_LINK_CALLS = 1 << 16
"""More than anybody has open on one link: a Beat that lists more is answered by nobody."""

NodeId = NewType("NodeId", str)
"""An operator's name for a node, e.g. "prefill-0": a label, it may come back in another incarnation."""
Incarnation = NewType("Incarnation", str)
"""32 hex digits, drawn at every process start: the identity of a process."""
RequestId = NewType("RequestId", str)
"""32 hex digits, drawn by the gateway: ours, never the client's label."""
CallId = NewType("CallId", int)
"""Counted by the caller, unique on one link (one link is one connection, nothing is replayed)."""
BlockId = NewType("BlockId", int)
Generation = NewType("Generation", int)
BlockHash = NewType("BlockHash", bytes)


Name = Annotated[NodeId, Meta(max_length=MAX_NAME_CHARS)]
"""What a process calls itself: it is kept, logged and told to everybody who watches."""
Birth = Annotated[Incarnation, Meta(max_length=MAX_NAME_CHARS)]
AtLeastOne = Annotated[int, Meta(ge=1)]
AtLeastZero = Annotated[int, Meta(ge=0)]


class Message(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Anything that stands alone on the wire."""


class Part(msgspec.Struct, frozen=True, omit_defaults=True):
    """A piece of a message."""


# --- pieces ----------------------------------------------------------------------------------------


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"


class Priority(StrEnum):
    """Who goes first where requests wait. Nobody is starved: the low ones get their share."""

    HIGH = "high"
    NORMAL = "normal"
    LOW = "low"


class Origin(Part, frozen=True):
    """Whose request it is. `tenant` is derived by the gateway from the API key, never taken from a client.

    It is the salt of every block hash, so that no tenant finds another's prefix, and the name under which
    fair shares are counted. Empty without API keys.
    """

    tenant: bytes = b""
    priority: Priority = Priority.NORMAL


class WireError(Part, frozen=True):
    code: ErrorCode
    message: str
    retry_after_s: float | None = None

    @classmethod
    def of(cls, error: BatonError) -> "WireError":
        return cls(error.code, error.message, error.retry_after_s)

    def exception(self) -> BatonError:
        return from_wire(self.code, self.message, self.retry_after_s)


class BlockRef(msgspec.Struct, frozen=True, array_like=True):
    """One block of one pool at one moment; which pool is said by the message that carries it."""

    block: BlockId
    generation: Generation


class LayerKV(msgspec.Struct, frozen=True, array_like=True):
    """One layer's share of a block: K is [num_kv_heads, block_size, k_head_dim], V likewise."""

    num_kv_heads: int
    k_head_dim: int
    v_head_dim: int


class KVLayout(Part, frozen=True):
    """What the bytes of a block mean. Two pools exchange blocks only if their layouts are equal.

    A block is `[layer][k, v][kv head][token][head_dim]`, contiguous, layers in model order.
    """

    block_size: AtLeastOne
    dtype: str
    itemsize: int
    layers: tuple[LayerKV, ...]

    @property
    def block_elements(self) -> int:
        return self.block_size * sum(
            layer.num_kv_heads * (layer.k_head_dim + layer.v_head_dim) for layer in self.layers
        )

    @property
    def block_bytes(self) -> int:
        return self.block_elements * self.itemsize


class Offer(Part, frozen=True):
    """How one transport's reader reaches the owner of a pool. `host` says which host it is on (boot id and network)."""

    transport: str
    address: str
    host: str = ""


class Sampling(Part, frozen=True):
    """How tokens are drawn. Noise is keyed by (seed, choice, position in the sequence), nothing else.

    `scored`: each is told with its log-probability, which the model gave it whatever temperature and filters.

    `max_tokens` counts from the end of the prompt, also when a call carries tokens already delivered.
    `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 filter nothing.
    """

    max_tokens: int
    seed: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()
    scored: bool = False


class Branch(Part, frozen=True):
    """One of several answers to a prompt, by its place among them: what it has beyond the tokens that all share."""

    choice: Annotated[int, Meta(ge=0, lt=MAX_CHOICES)]
    tokens: list[int] = []


Branches = Annotated[tuple[Branch, ...], Meta(max_length=MAX_CHOICES)]
"""Those that are still written. None at all stand for the one answer to most prompts: choice 0, nothing beyond."""


class Drawn(Part, frozen=True):
    """One choice's first token, and what it ends."""

    token: int
    finish: FinishReason | None = None
    logprob: float | None = None
    """With `Sampling.scored`, as everywhere."""


class NodeAddress(Part, frozen=True):
    """Where a node is called, and how its blocks are read."""

    node: NodeId
    incarnation: Incarnation
    address: str
    offers: tuple[Offer, ...] = ()


class NodeCard(Part, frozen=True):
    """What a node is; fixed for one incarnation."""

    node: Name
    incarnation: Birth
    role: Role
    address: str
    model: str
    model_digest: str
    layout: KVLayout
    max_model_len: AtLeastZero
    num_blocks: AtLeastZero
    quantization: str = "none"
    offers: tuple[Offer, ...] = ()
    host: str = ""
    pid: int = 0
    version: str = ""


class NodeLoad(Part, frozen=True):
    """What a node is doing. Progress is the age of the last finished step or idle probe.

    `prompt_tokens_per_s` is how fast it could compute prompts now, beside what decodes there and without slowing
    that beyond the node's target; 0 while it has not computed any.
    """

    num_waiting: int = 0
    num_running: int = 0
    num_waiting_tokens: int = 0
    free_blocks: int = 0
    leased_blocks: int = 0
    num_calls: int = 0
    progress_age_s: float = 0.0
    tokens_per_s: float = 0.0
    is_draining: bool = False
    prompt_tokens_per_s: float = 0.0
    # Counted since the process started:
    num_preemptions: int = 0
    num_generated_tokens: int = 0
    num_computed_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_blocks_out: int = 0
    """To the host tier."""
    num_blocks_in: int = 0
    """From it: hits."""


class CacheNews(Part, frozen=True):
    """Full blocks that a pool came to offer (`added`) or ceased to (`dropped`) since the last news.

    Both are the first `CACHE_NAME_BYTES` of each block's hash, strung together. `whole`: `added` is all there is;
    forget what was known.
    """

    added: bytes = b""
    dropped: bytes = b""
    whole: bool = False


class NodeState(StrEnum):
    READY = "ready"
    DRAINING = "draining"
    STALLED = "stalled"
    INCOMPATIBLE = "incompatible"


class NodeView(Part, frozen=True):
    card: NodeCard
    state: NodeState
    reason: str = ""
    load: NodeLoad = NodeLoad()


class GatewayCard(Part, frozen=True):
    """A gateway as it introduces itself with its Watch; fixed for one incarnation. `address` answers Audit."""

    node: Name
    incarnation: Birth
    address: str
    url: str
    model: str = ""
    host: str = ""
    pid: int = 0


class HeldCall(Part, frozen=True):
    """An open call, as either of its ends sees it. `peer` is the process at the other end."""

    method: str
    peer: Incarnation
    request: RequestId | None = None
    attempt: int = 0
    age_s: float = 0.0


class HeldSequence(Part, frozen=True):
    """Something in an engine that has blocks or waits for them; `request` is its call's, None if no call owns it."""

    id: str
    kind: str
    request: RequestId | None
    num_blocks: int = 0


class HeldConnection(Part, frozen=True):
    """One side's end of a data connection between two pools; `peer` is the process of the other pool."""

    transport: str
    peer: Incarnation
    num_reads: int = 0


# --- requests: what a caller may open --------------------------------------------------------------


class Register(Message, frozen=True):
    """Node -> coordinator, held open for the node's life. Sends: Report. Items: Registered."""

    card: NodeCard


class Watch(Message, frozen=True):
    """Gateway or CLI -> coordinator, held open. Items: View, at once and at every change."""

    gateway: GatewayCard | None = None


class Route(Message, frozen=True):
    """Gateway -> coordinator. One item, Routed; or an End with the refusal.

    `exclude` names incarnations that failed this request already. `prefix` names the prompt's full blocks in order,
    as in `CacheNews`. `first_token_s` is how long the client will wait for the first token.
    """

    model: str
    num_tokens: AtLeastZero
    exclude: tuple[Incarnation, ...] = ()
    origin: Origin = Origin()
    prefix: bytes = b""
    first_token_s: float | None = None


class Generate(Message, frozen=True):
    """Gateway -> decode node. Items: Tokens, the last one of each choice with `finish`; then the node Ends.

    Sends: StopChoice. `tokens` is the prompt followed by whatever was delivered by earlier attempts; what only
    one of several choices had is in its branch. Delivered tokens are facts: they are never drawn again, and
    positions go on where they ended.
    """

    request: RequestId
    attempt: int
    model_digest: str
    tokens: list[int]
    num_prompt_tokens: int
    sampling: Sampling
    prefill: NodeAddress | None = None
    origin: Origin = Origin()
    source: NodeAddress | None = None
    """The draining node that runs this request's attempt `attempt - 1` now and hands it over."""
    branches: Branches = ()


class Prefill(Message, frozen=True):
    """Decode node -> prefill node. Items: BlocksReady*, one PrefillDone. Sends: one Pulled.

    The node frees the blocks when the call ends, whoever ends it; it Ends after Pulled. A caller that
    needs no blocks (its request finished with the first token) sends Pulled at once. `tokens` may include
    output that was delivered before: the node computes all of them, once, and draws the next one of each choice.
    """

    request: RequestId
    attempt: int
    model_digest: str
    tokens: list[int]
    num_prompt_tokens: int
    sampling: Sampling
    layout: KVLayout
    origin: Origin = Origin()
    choices: Annotated[tuple[int, ...], Meta(min_length=1, max_length=MAX_CHOICES)] = (0,)


class Handover(Message, frozen=True):
    """Decode node -> draining decode node: give me a request that you run. Items: one BlocksReady, one HandedOver.

    The blocks are those that are full by then; the node goes on meanwhile. Sends: one Stop, when they have
    landed. The node then ends its own Generate call with MOVED, says how far it came and Ends; what it
    computed since is computed again where the request goes on.
    """

    request: RequestId
    attempt: int
    layout: KVLayout


class Drain(Message, frozen=True):
    """Operator -> node: no new work, move or finish what runs. Items: DrainProgress; Ends when nothing is left.

    After `timeout_s` what is left is ended with MOVED, for its gateway to start again elsewhere.
    """

    timeout_s: float


class Audit(Message, frozen=True):
    """Anybody -> any process: what do you hold? One item, Holdings."""


RequestBody = Register | Watch | Route | Generate | Prefill | Handover | Drain | Audit

# --- what a caller sends into an open call ---------------------------------------------------------


class Report(Message, frozen=True):
    """`cache` is None when nothing changed; the first Report of a Register call says the whole."""

    load: NodeLoad
    cache: CacheNews | None = None


class Pulled(Message, frozen=True):
    """Every block that was wanted has landed and was checked."""


class Stop(Message, frozen=True):
    """What was announced has landed: stop the request here."""


class StopChoice(Message, frozen=True):
    """In a Generate call of several choices: no more tokens of this one are wanted. It gets no further word."""

    choice: int


SentBody = Report | Pulled | Stop | StopChoice

# --- what a callee yields --------------------------------------------------------------------------


class Registered(Message, frozen=True):
    """`reason` is set when the node does not fit the cluster: it is listed, never routed to."""

    reason: str = ""


class View(Message, frozen=True):
    nodes: tuple[NodeView, ...] = ()
    gateways: tuple[GatewayCard, ...] = ()


class Routed(Message, frozen=True):
    """Where to send the request. `prefill` None means: compute the prompt at the decode node.

    `why` says which rule decided ("least-loaded", "no-prefill-node", ...), for headers and metrics.
    """

    decode: NodeAddress
    prefill: NodeAddress | None = None
    why: str = ""


class Tokens(Message, frozen=True):
    """New tokens of one choice. `phases` (last item only) are seconds by phase, summing to the call's life.

    `path` says who computed the prompt, as far as it is known: "prefill", "home", "fallback" (home, after prefill
    failed) or "handover".
    """

    tokens: list[int]
    finish: FinishReason | None = None
    cached_tokens: int = 0
    phases: dict[str, float] | None = None
    path: str = ""
    start: int | None = None
    """In a choice's first item: the place in the sequence of its first token."""
    choice: int = 0
    logprob: float | None = None
    """Sum over `tokens`."""


class Leaving(Message, frozen=True):
    """In a Generate call: this node is being drained and goes on for now; have another one take over from it."""


class BlocksReady(Message, frozen=True):
    """Blocks `first .. first + len(refs)` of the sequence are finished in the pool of `owner`.

    Reads of them carry `secret`, which is the call's and ends with it.
    """

    owner: Incarnation
    first: AtLeastZero
    refs: tuple[BlockRef, ...]
    secret: bytes = b""


class PrefillDone(Message, frozen=True):
    """The prompt is computed and `token` drawn; every block of it has been announced.

    `token` is that of the first of `Prefill.choices`, `others` are those of the rest.
    """

    token: int
    finish: FinishReason | None = None
    cached_tokens: int = 0
    phases: dict[str, float] | None = None
    others: tuple[Drawn, ...] = ()
    logprob: float | None = None


class HandedOver(Message, frozen=True):
    """The request is stopped. `tokens` is all of it, prompt included; the last one was passed on and not computed.

    Of several choices `tokens` is what they share, and `branches` are those that were still being written.
    """

    tokens: list[int]
    branches: Branches = ()


class DrainProgress(Message, frozen=True):
    """Calls that are still worked on, and how many were told to end because the time was over."""

    num_calls: int
    num_evicted: int = 0


class Holdings(Message, frozen=True):
    """Everything a process holds for somebody. Lists of what it does not have are empty.

    `used_blocks` have a reference; those of `sequences`, shared ones counted once, must add up to them. `host_blocks`
    are contents in the host tier: a cache, they belong to nobody.
    `requests` are a gateway's. `grants` are the requests whose blocks may be read here.
    """

    kind: str
    node: NodeId
    incarnation: Incarnation
    incoming: tuple[HeldCall, ...] = ()
    outgoing: tuple[HeldCall, ...] = ()
    sequences: tuple[HeldSequence, ...] = ()
    num_blocks: int = 0
    used_blocks: int = 0
    owned_blocks: int = 0
    host_blocks: int = 0
    """Distinct blocks in the tables of `sequences`."""
    serving: tuple[HeldConnection, ...] = ()
    """Connections by which others read this pool."""
    reading: tuple[HeldConnection, ...] = ()
    """Connections by which this process reads others' pools."""
    grants: tuple[RequestId, ...] = ()
    requests: tuple[RequestId, ...] = ()


ItemBody = (
    Registered | View | Routed | Tokens | Leaving | BlocksReady | PrefillDone | HandedOver | DrainProgress | Holdings
)

# --- frames: caller to callee ----------------------------------------------------------------------


class Hello(Message, frozen=True):
    """First on every link. `to` pins the incarnation meant; empty means whoever answers there."""

    version: int
    node: Name
    incarnation: Birth
    to: Incarnation | None = None


class Open(Message, frozen=True):
    call: CallId
    body: RequestBody
    timeout_s: float | None = None


class Send(Message, frozen=True):
    call: CallId
    seq: int
    body: SentBody


class Cancel(Message, frozen=True):
    """Leaves a tombstone: an Open that comes later finds it and starts nothing."""

    call: CallId


# --- frames: callee to caller ----------------------------------------------------------------------


class Welcome(Message, frozen=True):
    node: NodeId
    incarnation: Incarnation


class Refuse(Message, frozen=True):
    """Answers a Hello that cannot be served; the link is then closed."""

    error: WireError


class Accept(Message, frozen=True):
    """An Open arrived and a handler owns it. Sent once, never repeated."""

    call: CallId


class ItemFrame(Message, frozen=True, tag="Item"):
    call: CallId
    seq: int
    body: ItemBody


class End(Message, frozen=True):
    """The one terminal frame of a call. `seq` is the number of items sent; `error` None means done."""

    call: CallId
    seq: int
    error: WireError | None = None


# --- frames: both ways -----------------------------------------------------------------------------


class Beat(Message, frozen=True):
    """I live, and these are my open calls with the number of frames I sent in each.

    A receiver that misses one (links keep order) knows there is a hole; a call that only one side
    lists is ended by the other.
    """

    calls: Annotated[dict[CallId, int], Meta(max_length=MAX_LINK_CALLS)] = {}


CallerFrame = Hello | Open | Send | Cancel | Beat
CalleeFrame = Welcome | Refuse | Accept | ItemFrame | End | Beat

encode = msgspec.msgpack.Encoder().encode
"""One wire message: a list of every frame that one flush has for one peer."""
decode_from_caller = msgspec.msgpack.Decoder(list[CallerFrame]).decode
"""Raises msgspec.DecodeError, also for a frame of the other direction."""
decode_from_callee = msgspec.msgpack.Decoder(list[CalleeFrame]).decode
"""Raises msgspec.DecodeError, also for a frame of the other direction."""
