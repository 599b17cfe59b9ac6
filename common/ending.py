"""How a program ends once there is nothing left to do. Light: every command imports it."""

import contextlib
import os
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn


def end_with(program: Callable[[], object]) -> NoReturn:
    """Run a whole program and leave by the shortest way once it is over.

    What the interpreter does at its end takes over a second of CPU where torch is loaded, and can wait for ever on
    a library's threads; all that matters was cleaned up before `program` ended.
    """
    try:
        program()
        code = 0
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed, or its reader is gone
            stream.flush()
    os._exit(code)
