"""Names to classes, imported on use: `load({"ucx": "kv_transfer.ucx:UcxTransport"}, "ucx", kind="transport")`."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from common.errors import ConfigError


def load(registry: Mapping[str, str], name: str, *, kind: str) -> Any:
    """The class registered under `name`; ConfigError names what exists. ImportError passes through."""
    if name not in registry:
        raise ConfigError(f"unknown {kind} {name!r}; known: {', '.join(sorted(registry))}")
    module, _, attribute = registry[name].partition(":")
    return getattr(import_module(module), attribute)
