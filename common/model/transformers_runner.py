"""One engine step on a transformers module: plan to tensors, one forward pass, tokens out. Any architecture."""

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from common import telemetry
from common.attention.base import BACKENDS, AttentionBackend
from common.attention.hook import bound
from common.config import EngineConfig, ModelConfig
from common.cores import HostCores
from common.engine.request import StepPlan
from common.errors import ConfigError
from common.kv_cache.cache import num_pool_blocks
from common.kv_cache.host_tier import copy_rows
from common.kv_cache.memory import PoolMemory
from common.kv_cache.tensor_pool import open_host_tier, open_pool
from common.messages import BlockId, Incarnation
from common.model import loader, philox
from common.model.draws import DrawingRunner
from common.model.experts import expert_layers, expert_products, pad_experts
from common.model.loader import LoadedModel
from common.model.quantization import resolve_quantization
from common.model.rows import linear_products, row_floor, widen_single_outputs
from common.model.step_tensors import step_tensors
from common.registry import load

log = telemetry.logger(__name__)


def load_transformers_runner(
    folder: Path,
    model: ModelConfig,
    engine: EngineConfig,
    incarnation: Incarnation,
    *,
    threads: int,
    cores: HostCores | None = None,
) -> tuple["TransformersRunner", PoolMemory]:
    """See `runner.load_runner`. Sets torch's thread count for the whole process."""
    device = torch.device(model.device)
    torch.set_num_threads(threads)
    loaded = loader.load(
        folder,
        dtype=getattr(torch, model.dtype),
        block_size=engine.block_size,
        max_model_len=model.max_model_len,
        device=device,
        quantization=resolve_quantization(model.quantization, folder),
        kv_dtype=getattr(torch, model.kv_dtype),
    )
    floor = settle_row_floor(loaded, model) if model.batch_invariant and device.type == "cpu" else 0
    philox.kernel()  # compiled now rather than at the first draw
    backend = pick_backend(model.attention, loaded, num_threads=torch.get_num_threads())
    num_blocks = num_pool_blocks(
        engine,
        loaded.layout,
        max_model_len=loaded.max_model_len,
        device_bytes=torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None,
    )
    memory, pool = open_pool(loaded.layout, num_blocks, incarnation, device)
    host = open_host_tier(loaded.layout, engine.kv_host_memory, device)
    log.info(
        "runner ready", attention=backend.name, threads=torch.get_num_threads(), row_floor=floor, blocks=num_blocks
    )
    return TransformersRunner(loaded, backend, pool, row_floor=floor, host=host, cores=cores), memory


def settle_row_floor(loaded: LoadedModel, model: ModelConfig) -> int:
    """The measured floor; gives up threads that nobody asked for rather than equal bits."""
    widen_single_outputs(loaded.module)
    layers = expert_layers(loaded.module)

    def measure() -> int | None:
        return row_floor(
            [*linear_products(loaded.module), *(p for layer in layers[:1] for p in expert_products(layer))]
        )

    floor = measure()
    if floor is None and model.threads == 0 and torch.get_num_threads() > 1:
        log.warning("one thread only: with more, this CPU's matrix products depend on the batch")
        torch.set_num_threads(1)
        floor = measure()
    if floor is None:
        raise ConfigError(
            f"batch_invariant: with {torch.get_num_threads()} threads this CPU's matrix products depend on the batch; "
            "set threads = 1 or batch_invariant = false"
        )
    pad_experts(loaded.module, floor)
    return floor


def pick_backend(name: str, loaded: LoadedModel, *, num_threads: int) -> AttentionBackend:
    """The backend of that name; "auto" takes the device's fast one where it can run. ConfigError says why it cannot."""
    if name != "auto":
        return _backend(name, loaded, num_threads)
    fast = "triton" if loaded.module.device.type == "cuda" else "native"
    try:
        return _backend(fast, loaded, num_threads)
    except ConfigError as error:
        log.warning(f"slow attention: the {fast} backend cannot be used", reason=error.message)
        return _backend("reference", loaded, num_threads)


def _backend(name: str, loaded: LoadedModel, num_threads: int) -> AttentionBackend:
    cls = load(BACKENDS, name, kind="attention backend")
    reason = cls.available(loaded.module.device.type)
    if reason is not None:
        raise ConfigError(f"attention: {name} is not available: {reason}")
    backend: AttentionBackend = cls(num_threads=num_threads)
    for layer in loaded.layers:
        reason = backend.unsupported(layer, getattr(torch, loaded.layout.dtype), loaded.layout.block_size)
        if reason is not None:
            raise ConfigError(f"attention: {name} cannot run layer {layer.index} of this model: {reason}")
    return backend


class TransformersRunner(DrawingRunner):
    """A `model.base.Runner` over any model that `loader.load` accepts.

    With a `row_floor`, steps are padded (`rows`) so that a row's bits depend on its own sequence alone.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        backend: AttentionBackend,
        pool: torch.Tensor,
        *,
        row_floor: int,
        host: torch.Tensor | None = None,
        cores: HostCores | None = None,
    ) -> None:
        """`pool` and `host`, the host tier, are [num_blocks, block_elements] of `loaded.layout`.

        `cores`, the node's place on this host, are lent while it rests; it borrows none."""
        super().__init__(cores)
        self.layout = loaded.layout
        self.max_model_len = loaded.max_model_len
        self.vocab_size = loaded.vocab_size
        self.model_digest = loaded.digest
        self.quantization = loaded.quantization
        self._module = loaded.module
        self._layers = loaded.layers
        self._backend = backend
        self._pool = pool
        self._host = pool[:0] if host is None else host
        self.num_host_blocks = len(self._host)
        self._row_floor = row_floor
        self._keeps_rows = "logits_to_keep" in inspect.signature(loaded.module.forward).parameters

    def copy_blocks(self, copies: Sequence[tuple[BlockId, BlockId]]) -> None:
        """See `Runner.copy_blocks`."""
        copy_rows(self._pool, self._host, copies)

    def logits(self, plan: StepPlan) -> npt.NDArray[np.float32]:
        """See `DrawingRunner.logits`."""
        step = step_tensors(plan.chunks, self._pool, self.layout.block_size, row_floor=self._row_floor)
        layers, backend, batch = self._layers, self._backend, step.batch

        def attend(
            layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _: dict[str, Any]
        ) -> torch.Tensor:
            return backend.attend(layers[layer.layer_idx], query, key, value, batch)

        wanted = {"logits_to_keep": step.logit_rows} if self._keeps_rows else {}
        with torch.inference_mode(), bound(attend):
            logits = self._module(input_ids=step.ids, position_ids=step.positions, use_cache=False, **wanted).logits[0]
            if not self._keeps_rows:
                logits = logits[step.logit_rows]
            kept: npt.NDArray[np.float32] = logits[: step.num_sampling].float().cpu().numpy()
        return kept
