"""A process ends with its parent's pipe, whatever it is doing."""

import os
import subprocess
import sys

import pytest

_SLOW_START = """
import signal, sys
from common import process

def main():
    print("starting", flush=True)
    signal.pause()  # an import that takes for ever

process.run(main, parent_pipe=int(sys.argv[1]))
"""

_RUNNING = """
import asyncio, sys
from common import process

async def main():
    print("running", flush=True)
    await asyncio.Event().wait()

sys.exit(process.run(main, parent_pipe=int(sys.argv[1])))
"""


@pytest.mark.parametrize("program", [_SLOW_START, _RUNNING])
def test_it_ends_when_the_pipe_closes(program: str) -> None:
    reader, writer = os.pipe()
    with subprocess.Popen(
        [sys.executable, "-c", program, str(reader)], stdout=subprocess.PIPE, pass_fds=(reader,)
    ) as child:
        os.close(reader)
        assert child.stdout is not None
        child.stdout.readline()
        assert child.poll() is None
        os.close(writer)
        assert child.wait(250) == 0
