"""llama.cpp's server, inside the wheel of xllamacpp. Runs in the peer's own environment, until it is killed:

python llama_cpp_server.py MODEL.gguf PORT SLOTS CONTEXT
"""

import os
import signal
import sys

import xllamacpp


def start(model: str, port: int, slots: int, context: int) -> "xllamacpp.Server":
    """As `llama-server` with these flags: everything else as it comes, but for what cached prompts may take."""
    threads = len(os.sched_getaffinity(0))
    settings = xllamacpp.CommonParams()
    settings.model.path = model
    settings.port = port
    settings.n_parallel = slots
    settings.kv_unified = True
    settings.n_ctx = context
    settings.cache_ram_mib = 1024
    settings.cpuparams.n_threads = threads
    settings.cpuparams_batch.n_threads = threads
    settings.verbosity = 1
    return xllamacpp.Server(settings)


if __name__ == "__main__":
    server = start(sys.argv[1], *(int(number) for number in sys.argv[2:]))
    signal.pause()
