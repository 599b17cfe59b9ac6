"""One engine step on our kernels alone: plan to arrays, one call, tokens out. Neither torch nor transformers."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from common import telemetry
from common.config import EngineConfig, ModelConfig
from common.cores import HostCores
from common.engine.request import StepPlan
from common.kv_cache.cache import num_pool_blocks
from common.kv_cache.host_tier import copy_rows
from common.kv_cache.memory import PoolMemory, allocate, allocate_host_tier
from common.messages import BlockId, Incarnation
from common.model import philox
from common.model.draws import DrawingRunner
from common.model.prepared import Opened
from common.model.program import Floats, Program
from common.model.step import step_arrays
from common.native.loans import Loans

log = telemetry.logger(__name__)

_ITEM_BYTES = {"float32": 4, "bfloat16": 2}


def program_runner(
    opened: Opened,
    model: ModelConfig,
    engine: EngineConfig,
    incarnation: Incarnation,
    *,
    num_threads: int,
    cores: HostCores | None = None,
) -> tuple["ProgramRunner", PoolMemory]:
    """A runner of the prepared model, over a pool of its own. ConfigError if the pool cannot be had."""
    recipe = opened.recipe
    layout = recipe.layout(engine.block_size, model.kv_dtype, _ITEM_BYTES[model.kv_dtype])
    max_model_len = model.max_model_len or recipe.max_model_len
    num_blocks = num_pool_blocks(engine, layout, max_model_len=max_model_len)
    memory = allocate(layout, num_blocks, incarnation)
    philox.kernel()  # compiled now rather than at the first draw
    program = Program(
        recipe,
        opened.weights,
        opened.arrays,
        memory.blocks,
        block_size=engine.block_size,
        dtype=model.kv_dtype,
        num_threads=num_threads,
        loans=Loans(cores) if cores and model.borrow_cores else None,
    )
    log.info(
        "runner ready", executor="native", quantization=opened.quantization, threads=num_threads, blocks=num_blocks
    )
    host = allocate_host_tier(layout, engine.kv_host_memory)
    return ProgramRunner(program, memory, opened, max_model_len=max_model_len, host=host, cores=cores), memory


class ProgramRunner(DrawingRunner):
    """A `model.base.Runner` over a `Program`: a row's bits depend on its own sequence alone, without padding."""

    def __init__(
        self,
        program: Program,
        memory: PoolMemory,
        opened: Opened,
        *,
        max_model_len: int,
        host: npt.NDArray[np.uint8] | None = None,
        cores: HostCores | None = None,
    ) -> None:
        """`host`, the host tier, is [num_blocks, block_bytes]; `cores` is the node's place on this host."""
        super().__init__(cores)
        self.layout = memory.layout
        self.max_model_len = max_model_len
        self.vocab_size = program.recipe.vocab_size
        self.model_digest = opened.digest
        self.quantization: str = opened.quantization
        self.program = program
        self._blocks = memory.blocks
        self._host = memory.blocks[:0] if host is None else host
        self.num_host_blocks = len(self._host)

    def copy_blocks(self, copies: Sequence[tuple[BlockId, BlockId]]) -> None:
        """See `Runner.copy_blocks`."""
        copy_rows(self._blocks, self._host, copies)

    def logits(self, plan: StepPlan) -> Floats:
        """See `DrawingRunner.logits`."""
        return self.program.run(step_arrays(plan.chunks, self.layout.block_size))
