"""OpenVINO GenAI: its continuous batching behind a small server of ours (`openvino_server`), for it has none.

The model is exported as its documentation says, by optimum-intel, in an environment that is deleted afterwards.
"""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.model.store import DEMO, Progress, resolve
from tests.benchmarks.peers import environment
from tests.benchmarks.peers.base import KV_CACHE_BYTES, folder

_RELEASE = "2026.4.1"
_RUNTIME = (f"openvino=={_RELEASE}", f"openvino-genai=={_RELEASE}.0", "aiohttp==3.14.5")
_EXPORT = (
    "torch==2.13.0",  # the release that Baton itself has
    "transformers==5.5.4",  # the newest that optimum-intel takes
    "huggingface-hub==1.21.0",
    "nncf==3.4.0",
    f"openvino=={_RELEASE}",
    f"openvino-tokenizers=={_RELEASE}.0",
    "requests>=2.33",
    "setuptools",
)
_EXPORT_ALONE = ("optimum==2.3.0", "optimum-intel==2.2.0")  # the latter demands torchvision, which is for pictures


@dataclass(frozen=True, slots=True)
class OpenVino:
    weights: str

    @property
    def name(self) -> str:
        return f"openvino-{self.weights}"

    @property
    def version(self) -> str:
        return f"openvino-genai {_RELEASE}, {self.weights} weights"

    def install(self, progress: Progress) -> None:
        environment.install("openvino", _RUNTIME, progress)
        if not self._model.is_dir():
            self._export(progress)

    def command(self, port: int) -> Sequence[str]:
        script = Path(__file__).with_name("openvino_server.py")
        cache = str(KV_CACHE_BYTES >> 30)
        # -P: beside the script this file would be taken for the package.
        return (str(environment.python_of("openvino")), "-P", str(script), str(self._model), str(port), cache)

    def environment(self) -> Mapping[str, str]:
        return {}

    @property
    def _model(self) -> Path:
        return folder("openvino") / f"demo-{self.weights}"

    def _export(self, progress: Progress) -> None:
        python = environment.install("openvino-export", _EXPORT, progress, alone=_EXPORT_ALONE)
        progress(f"exporting the demo model to OpenVINO, {self.weights}", None, None)
        partial = self._model.with_name(f"{self._model.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        command = [str(python.with_name("optimum-cli")), "export", "openvino", "--model", str(resolve(DEMO))]
        command += ["--task", "text-generation-with-past", "--weight-format", self.weights, str(partial)]
        environment.run(command, "optimum-intel cannot export the demo model")
        partial.rename(self._model)
        if INT8._model.is_dir() and FP32._model.is_dir():
            shutil.rmtree(folder("openvino-export"))


INT8, FP32 = OpenVino("int8"), OpenVino("fp32")
