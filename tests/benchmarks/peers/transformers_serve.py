"""`transformers serve` with continuous batching, only when asked for. Not every release takes what the client sends
(prompts as token ids, ignore_eos): what it refuses is said in its row."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from common.model.store import DEMO, Progress, resolve
from tests.benchmarks.peers import environment

_RUNTIME = ("torch==2.13.0", "transformers[serving]==5.24.0", "accelerate==1.15.0")


@dataclass(frozen=True, slots=True)
class TransformersServe:
    name: str = "transformers"
    version: str = f"{_RUNTIME[1]}, float32 weights"

    def install(self, progress: Progress) -> None:
        environment.install(self.name, _RUNTIME, progress)

    def command(self, port: int) -> Sequence[str]:
        program = environment.python_of(self.name).with_name("transformers")
        flags = ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--device", "cpu"]
        return (str(program), "serve", str(resolve(DEMO)), *flags, "--continuous-batching")

    def environment(self) -> Mapping[str, str]:
        return {}


TRANSFORMERS = TransformersServe()
