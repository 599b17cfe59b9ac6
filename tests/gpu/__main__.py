"""The checks and the benchmark for a GPU, in a few minutes: `python -m tests.gpu` (or `tests/gpu/run.sh`).

Not yet run on a GPU. Ends with 1 if a check fails; the benchmark runs all the same. With OUT set to a folder, writes
`numerics.xml` (JUnit) and `kernels.json` there.
"""

import os
import subprocess
import sys
from pathlib import Path


def main() -> int:
    os.environ["TRITON_INTERPRET"] = "0"  # before anything imports triton
    out = os.environ.get("OUT")
    report = [f"--junitxml={out}/numerics.xml"] if out else []
    pytest = [sys.executable, "-m", "pytest", "-q", "--timeout=300", *report, str(Path(__file__).parent)]
    checked = subprocess.run(pytest, check=False).returncode
    import torch

    if not torch.cuda.is_available():
        print("no benchmark: it needs a CUDA device")
        return 1
    from tests.gpu import bench_kernels

    bench_kernels.main(Path(out) / "kernels.json" if out else None)
    return checked


if __name__ == "__main__":
    sys.exit(main())
