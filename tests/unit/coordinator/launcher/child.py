"""A stand-in child: `child.py FIFO MODE --parent-pipe FD` says its pid into FIFO, then behaves as MODE says.

wait: ends with the parent pipe or at SIGTERM. stubborn: ignores SIGTERM. die: prints a line and exits 7.
parent: starts a grandchild that sleeps, says its pid too, then waits.
"""

import os
import signal
import sys


def main() -> int:
    fifo, mode, parent_pipe = sys.argv[1], sys.argv[2], int(sys.argv[4])
    if mode == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    line = str(os.getpid())
    if mode == "parent":
        line += f" {os.spawnlp(os.P_NOWAIT, 'sleep', 'sleep', '600')}"
    with open(fifo, "w") as out:
        out.write(line + "\n")
    print(f"{mode}: the last words", flush=True)
    if mode == "die":
        return 7
    if mode == "hopeless":
        return 2
    os.read(parent_pipe, 1)
    return 0


sys.exit(main())
