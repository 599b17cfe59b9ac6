"""What libraries read from the environment when they are first imported.

One thread for every library that would start its own: on two shared cores more of them only wait for each other.
Triton's kernels run in its interpreter, on the CPU; `python -m tests.gpu` says otherwise.

Hypothesis judges answers, never speed: a machine may be busy.
"""

import os

from hypothesis import HealthCheck, settings

for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(variable, "1")
os.environ.setdefault("TRITON_INTERPRET", "1")
settings.register_profile("baton", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("baton")
