"""The one call a node makes for its engine: a configuration to a runner that is ready, and its pool.

Our kernels alone run the architectures that they know, on a CPU (`program_runner`); everything else goes through the
modules of transformers with our attention (`transformers_runner`), which is imported only then.
"""

from importlib import import_module

from common import telemetry
from common.config import EngineConfig, ModelConfig
from common.cores import HostCores, usable_cores
from common.errors import ConfigError
from common.kv_cache.memory import PoolMemory
from common.messages import Incarnation
from common.model.base import ModelRunner
from common.model.prepared import UnpreparedError, open_prepared
from common.model.program_runner import program_runner
from common.model.store import Progress, no_progress, resolve

log = telemetry.logger(__name__)


def load_runner(
    model: ModelConfig, engine: EngineConfig, incarnation: Incarnation, *, progress: Progress = no_progress
) -> tuple[ModelRunner, PoolMemory]:
    """Everything between a configuration and a first step. Blocks for seconds; ConfigError says what to change."""
    folder = resolve(model.model, progress=progress)
    usable = usable_cores()
    threads = model.threads or max(1, usable // 2)
    cores = _place(threads, usable)
    if model.executor != "transformers":
        try:
            opened = open_prepared(folder, model, progress=progress)
        except UnpreparedError as reason:
            if model.executor == "native":
                raise ConfigError(f"executor: native cannot run this model: {reason}") from reason
            log.info("a step runs through transformers", reason=str(reason))
        else:
            return program_runner(opened, model, engine, incarnation, num_threads=threads, cores=cores)
    through_transformers = import_module("common.model.transformers_runner").load_transformers_runner
    loaded: tuple[ModelRunner, PoolMemory] = through_transformers(
        folder, model, engine, incarnation, threads=threads, cores=cores
    )
    return loaded


def _place(threads: int, usable: int) -> HostCores | None:
    """Without a place a node neither lends nor borrows."""
    try:
        return HostCores(threads, cores=usable)
    except OSError as error:
        log.warning("cores are neither lent nor borrowed", reason=str(error))
        return None
