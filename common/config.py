"""Settings: one frozen, validated type per process. TOML file, then environment, then flags; later wins.

Fields hold what the operator said ("auto" included); what is found at run time is another type. Sizes are
bytes, times are seconds, addresses are ZeroMQ endpoints (`tcp://127.0.0.1:0` takes any free port).
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from common.errors import ConfigError

Positive = Meta(gt=0)
AtLeastOne = Meta(ge=1)
AtLeastZero = Meta(ge=0)
_LEAST_BEATS = 3
Size = Meta(extra={"unit": "bytes"})
"""Marks a number of bytes: text such as "512MiB" or "2GB" is accepted for it (`common.settings`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which model and how it is computed; shared by both kinds of node."""

    model: Annotated[str, Meta(description="Folder, hub id or GGUF file of the model.")]
    served_name: Annotated[str, Meta(description="Name clients use; empty means the model's own.")] = ""
    dtype: Annotated[Literal["float32", "bfloat16"], Meta(description="Type of weights, unless quantised.")] = "float32"
    kv_cache_dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        Meta(description="Type of keys and values in the pool and on the wire; auto: the weights'."),
    ] = "auto"
    quantization: Annotated[
        Literal["auto", "none", "int8", "int4"],
        Meta(description="Weights in groups of 32: auto keeps the width that a GGUF checkpoint has."),
    ] = "auto"
    attention: Annotated[Literal["auto", "native", "reference", "triton"], Meta(description="Attention backend.")] = (
        "auto"
    )
    executor: Annotated[
        Literal["auto", "native", "transformers"],
        Meta(description="Who computes a step: our kernels alone, or the modules of transformers."),
    ] = "auto"
    device: Annotated[str, Meta(description="torch device.")] = "cpu"
    threads: Annotated[int, AtLeastZero, Meta(description="CPU threads of the engine; 0 shares the host.")] = 0
    borrow_cores: Annotated[
        bool, Meta(description="Steps use the cores of this host's other nodes too while these rest.")
    ] = True
    max_model_len: Annotated[int, AtLeastZero, Meta(description="Longest sequence; 0 is the model's own.")] = 0
    batch_invariant: Annotated[
        bool, Meta(description="Give a row the same bits whatever the batch (pads steps of few rows).")
    ] = True

    @property
    def kv_dtype(self) -> Literal["float32", "bfloat16"]:
        return self.dtype if self.kv_cache_dtype == "auto" else self.kv_cache_dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The pool and the step."""

    kv_cache_memory: Annotated[
        int, AtLeastZero, Size, Meta(description="Size of the KV pool; 0 sizes it to the machine.")
    ] = 0
    kv_host_memory: Annotated[
        int,
        AtLeastZero,
        Size,
        Meta(description="Memory for blocks that leave the pool, prefixes and pre-empted sequences; 0 for none."),
    ] = 0
    block_size: Annotated[int, Meta(ge=1, le=256, description="Tokens a block.")] = 16
    prefix_cache: Annotated[bool, Meta(description="Reuse blocks of equal prefixes.")] = True
    max_running: Annotated[int, AtLeastOne, Meta(description="Sequences in one step.")] = 64
    max_step_tokens: Annotated[int, AtLeastOne, Meta(description="Most tokens a step computes.")] = 512
    max_step_s: Annotated[
        float, Positive, Meta(description="A step that computes prompts aims to end within this.")
    ] = 0.5
    itl_target_s: Annotated[
        float, AtLeastZero, Meta(description="The same while other sequences decode in it; 0 makes no difference.")
    ] = 0.1
    policy: Annotated[
        Literal["fcfs", "shortest", "priority", "deadline"],
        Meta(description="Who goes first of one tenant's prompts; `priority`: classes one after the other, nearly."),
    ] = "fcfs"
    max_waiting: Annotated[int, AtLeastOne, Meta(description="Requests that may queue; beyond is refused.")] = 1024
    max_waiting_tokens: Annotated[
        int, AtLeastOne, Meta(description="Tokens that may wait to be computed; beyond is refused.")
    ] = 1 << 20

    def __post_init__(self) -> None:
        if self.kv_host_memory and not self.prefix_cache:
            raise ConfigError("engine.kv_host_memory: blocks are found again by their content: needs prefix_cache")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkConfig:
    """The links between Baton's processes; the same in every process of a cluster."""

    beat_s: Annotated[float, Positive, Meta(description="Sign of life on every link, this often.")] = 0.5
    lost_after_s: Annotated[
        float, Positive, Meta(description="A peer silent for this long is lost. At least three beats.")
    ] = 4.0
    keys: Annotated[str, Meta(description="Folder of `baton keys new`: links are encrypted and authenticated.")] = ""
    open_network: Annotated[
        bool, Meta(description="Bind beyond the loopback without keys: whoever reaches the port is trusted.")
    ] = False

    def __post_init__(self) -> None:
        if round(self.lost_after_s / self.beat_s, 6) < _LEAST_BEATS:
            raise ConfigError(
                f"links.lost_after_s = {self.lost_after_s:g}: expected at least three beats, "
                f"{_LEAST_BEATS * self.beat_s:g} (links.beat_s = {self.beat_s:g}); one that comes late is no loss"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """One prefill or decode node."""

    model: ModelConfig
    engine: EngineConfig = EngineConfig()
    name: Annotated[str, Meta(description="The node's name; empty draws one.")] = ""
    listen: Annotated[str, Meta(description="Endpoint for calls and, by its host, for reads of blocks.")] = (
        "tcp://127.0.0.1:0"
    )
    advertise: Annotated[
        str, Meta(description="Endpoint that others call the node by, behind a proxy or NAT; empty: as it listens.")
    ] = ""
    coordinators: Annotated[tuple[str, ...], Meta(description="Endpoints of the coordinators.")] = (
        "tcp://127.0.0.1:7070",
    )
    transport: Annotated[Literal["auto", "shm", "tcp", "ucx"], Meta(description="How KV blocks travel.")] = "auto"
    links: LinkConfig = LinkConfig()
    parent_pipe: Annotated[int, Meta(description="Exit when this file descriptor closes; -1 never.")] = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorConfig:
    listen: Annotated[str, Meta(description="Endpoint for calls.")] = "tcp://127.0.0.1:7070"
    prefill_unavailable: Annotated[
        Literal["local", "wait", "fail"],
        Meta(description="Without a prefill node: compute at the decode node, wait for one, or refuse."),
    ] = "local"
    home_after_s: Annotated[
        float,
        AtLeastZero,
        Meta(description="Where prompts wait longer than this for a prefill node, decode nodes compute some; 0 never."),
    ] = 2.0
    links: LinkConfig = LinkConfig()
    parent_pipe: Annotated[int, Meta(description="Exit when this file descriptor closes; -1 never.")] = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    model: Annotated[str, Meta(description="Folder, hub id or GGUF file: its tokenizer and chat template.")]
    served_name: Annotated[str, Meta(description="Name clients use; empty means the model's own.")] = ""
    host: Annotated[str, Meta(description="HTTP address.")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="HTTP port.")] = 8000
    coordinators: Annotated[tuple[str, ...], Meta(description="Endpoints of the coordinators.")] = (
        "tcp://127.0.0.1:7070",
    )
    max_body_bytes: Annotated[int, AtLeastOne, Size, Meta(description="Largest request body.")] = 8 << 20
    request_timeout_s: Annotated[float, Positive, Meta(description="Deadline of a request.")] = 600.0
    keep_alive_s: Annotated[
        float, Positive, Meta(description="A stream that waits shows a sign of life this often.")
    ] = 10.0
    first_token_s: Annotated[
        float, AtLeastZero, Meta(description="Refuse what would wait longer for its first token; 0 never.")
    ] = 0.0
    drain_s: Annotated[
        float, AtLeastZero, Meta(description="Told to end, requests in flight get this long to finish.")
    ] = 3.0
    max_attempts: Annotated[int, AtLeastOne, Meta(description="Nodes tried before a request fails.")] = 4
    patience_s: Annotated[
        float, AtLeastZero, Meta(description="How long a request waits for a node when there is none.")
    ] = 5.0
    stream_patience_s: Annotated[
        float, AtLeastZero, Meta(description="The same for an answer that has begun and lost its node.")
    ] = 60.0
    listen: Annotated[str, Meta(description="Endpoint for calls of Baton's own processes (audit).")] = (
        "tcp://127.0.0.1:0"
    )
    api_keys: Annotated[str, Meta(description="TOML file of API keys; empty lets everybody in.")] = ""
    links: LinkConfig = LinkConfig()
    parent_pipe: Annotated[int, Meta(description="Exit when this file descriptor closes; -1 never.")] = -1
