"""Which children make a cluster on this host, and with which flags. Pure."""

import dataclasses
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from msgspec import Meta

from common.config import (
    AtLeastOne,
    AtLeastZero,
    CoordinatorConfig,
    EngineConfig,
    GatewayConfig,
    LinkConfig,
    ModelConfig,
    NodeConfig,
)
from common.fields import settings_of
from common.model import store
from common.settings import load
from coordinator.launcher.base import ChildSpec

_DEMO = ModelConfig(model=store.DEMO)
_ENGINE = EngineConfig()
_LINKS = LinkConfig()

# Every library that starts threads of its own must keep to the node's share of the cores.
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


def _thread_env(threads: int) -> dict[str, str]:
    """Threads that wait sleep: spinning ones cost a node half its speed as soon as a neighbour is busy."""
    return {**dict.fromkeys(_THREAD_VARIABLES, str(threads)), "OMP_WAIT_POLICY": "passive"}


@dataclass(frozen=True, slots=True, kw_only=True)
class UpConfig:
    """A whole cluster on this host. The sections `model` and `engine` apply to every node, `links` to every process."""

    prefill: Annotated[int, AtLeastZero, Meta(description="Prefill nodes; 0: decode nodes compute prompts too.")] = 1
    decode: Annotated[int, AtLeastOne, Meta(description="Decode nodes.")] = 1
    host: Annotated[str, Meta(description="HTTP address.")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="HTTP port; 0 takes any free one.")] = 8000
    transport: Annotated[Literal["auto", "shm", "tcp", "ucx"], Meta(description="How KV blocks travel.")] = "auto"
    model: ModelConfig = _DEMO
    engine: EngineConfig = _ENGINE
    links: LinkConfig = _LINKS
    log_dir: Annotated[str, Meta(description="Where logs go, a folder a run; empty: `logs` in the cache.")] = ""
    parent_pipe: Annotated[int, Meta(description="Exit when this file descriptor closes; -1 never.")] = -1

    @property
    def num_nodes(self) -> int:
        return self.prefill + self.decode


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """`nodes` are the names that must be ready; `url` is where clients go, `coordinator` where processes do."""

    children: tuple[ChildSpec, ...]
    nodes: tuple[str, ...]
    coordinator: str
    url: str


def make_plan(config: UpConfig, *, coordinator: str, num_cores: int, env: Mapping[str, str]) -> Plan:
    """`coordinator` is a free endpoint, `num_cores` what this process may use; `config.port` is a real port.

    `env` is what the children inherit: what it sets for a coordinator or a gateway counts, where `config` has no word
    for it.
    """
    threads = config.model.threads or max(1, num_cores // config.num_nodes)
    gateway_flags = {
        "model": config.model.model,
        "served_name": config.model.served_name,
        "host": config.host,
        "port": str(config.port),
        "coordinators": [coordinator],
    }
    core = load(CoordinatorConfig, env=env, flags={"listen": coordinator})
    gateway = load(GatewayConfig, env=env, flags=gateway_flags)
    children = [
        _child("coordinator", "coordinator", dataclasses.replace(core, links=config.links), env),
        _child("gateway", "coordinator.gateway", dataclasses.replace(gateway, links=config.links), env),
    ]
    roles = [("prefill", n) for n in range(config.prefill)] + [("decode", n) for n in range(config.decode)]
    for role, number in roles:
        node = NodeConfig(
            name=f"{role}-{number}",
            model=dataclasses.replace(config.model, threads=threads),
            engine=config.engine,
            transport=config.transport,
            links=config.links,
            coordinators=(coordinator,),
        )
        children.append(_child(node.name, f"{role}_node", node, env, _thread_env(threads)))
    host = "127.0.0.1" if config.host in ("", "0.0.0.0") else f"[{config.host}]" if ":" in config.host else config.host
    return Plan(
        children=tuple(children),
        nodes=tuple(f"{role}-{number}" for role, number in roles),
        coordinator=coordinator,
        url=f"http://{host}:{config.port}",
    )


def flags_of(config: Any, env: Mapping[str, str]) -> Iterator[str]:
    """The flags that make a process in this environment load `config`; what is the default anyway needs none."""
    for setting in settings_of(type(config)):
        value = config
        for name in setting.key.split("."):
            value = getattr(value, name)
        if value == setting.default and setting.env not in env:
            continue
        if setting.type is bool:
            yield setting.flag if value else setting.flag.replace("--", "--no-", 1)
        elif setting.is_list:
            for item in value:
                yield from (setting.flag, item)
        else:
            yield from (setting.flag, str(value))


def _child(
    name: str, module: str, config: Any, inherited: Mapping[str, str], own: Mapping[str, str] | None = None
) -> ChildSpec:
    flags = flags_of(dataclasses.replace(config, parent_pipe=-1), {**inherited, **(own or {})})
    # -P: a folder named `common` where the operator happens to stand must not be ours.
    return ChildSpec(name=name, command=(sys.executable, "-P", "-m", module, *flags), env=own or {})
