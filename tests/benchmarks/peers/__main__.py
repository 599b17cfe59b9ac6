"""`make bench-peers`: this project beside others, on the same machine, with the same weights and the same client.

    python -m tests.benchmarks.peers [--quick] [--only W1,W2,...] [--peers llama.cpp,openvino,...] [--json FILE]

Baton with one prefill and one decode node, Baton with one node that does both (at its best chunk size), and each peer
take turns, round by round; who is not measured stands still. Everybody may use all cores. Workloads, all greedy with
ignore_eos, prompts as token ids over /v1/completions, streamed:

    W1       32 requests at once, 256 tokens in, 64 out
    W2       one stream, 128 in, 128 out
    W3L      8 streams decode while a prompt of 1,500 tokens (8 out) arrives every 5 s
    W3       the same, every 1.5 s
    W4       16 requests in turn that share their first 1,000 tokens
    goodput  512 in, 64 out, arriving by chance (Poisson): the highest rate at which 90 % of the requests have their
             first token within 1.5 s and 95 % of their gaps within 60 ms

Peers are installed once into ~/.cache/baton/peers (or $BATON_CACHE). llama.cpp and openvino are the usual ones; vllm
and transformers come only when named. Each in two kinds of weights: llama.cpp-q4_1, openvino-int8 and so on.
"""

import argparse
import asyncio
import gc
import os
import shlex
import signal
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import msgspec
import uvloop
from rich.console import Console

from coordinator.cli.progress import Bars
from tests.benchmarks.peers.base import DEFAULT, chosen
from tests.benchmarks.peers.comparison import Comparison, Order, compare, install
from tests.benchmarks.peers.tables import tables
from tests.benchmarks.peers.targets import distances
from tests.benchmarks.peers.workloads import FULL, NAMES, QUICK


def main() -> int:
    arguments = _arguments()
    scale = QUICK if arguments.quick else FULL
    scale = replace(scale, rounds=arguments.rounds or scale.rounds)
    order = Order(scale, arguments.only, arguments.peers, shlex.split(arguments.baton_args), arguments.colocated_chunk)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what stands still must not be left behind
    result, started_s, load_before = Comparison(), time.perf_counter(), os.getloadavg()
    # Collections would stop the clock of every stream at once.
    gc.freeze()
    gc.disable()
    with Bars(Console(stderr=True, highlight=False)) as bars:
        try:
            peers = install(order.peers, bars.report, result)
            if not arguments.install_only:
                uvloop.run(compare(order, peers, bars.report, result))
        except (KeyboardInterrupt, asyncio.CancelledError):
            print("stopped early; what was measured until then:")
    print(tables(result))
    seconds = time.perf_counter() - started_s
    print(f"({seconds:.0f} s; {scale.rounds} rounds; load before {load_before[0]:.2f})")
    if arguments.json is not None:
        medians = {name: record.medians() for name, record in result.records.items()}
        document = {
            "quick": arguments.quick,
            "seconds": seconds,
            "load_before": load_before,
            "order": asdict(order),
            **asdict(result),
            "medians": medians,
            "distances": [{**asdict(one), "is_met": one.is_met} for one in distances(medians)],
        }
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=1))
    return 0 if result.records or arguments.install_only else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.peers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures of all rounds here")
    parser.add_argument("--quick", action="store_true", help="one round of shorter workloads")
    parser.add_argument("--rounds", type=int, default=0, help="instead of 3, or 1 with --quick")
    parser.add_argument("--only", type=_workloads, default=NAMES, metavar="W1,W2", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--peers", type=_peers, default=chosen(DEFAULT), metavar="NAME,NAME", help="'none' for none")
    parser.add_argument("--baton-args", default="", metavar="FLAGS", help="flags of `baton up`, for both deployments")
    parser.add_argument(
        "--colocated-chunk", type=int, default=0, metavar="TOKENS", help="rather than look for the best chunk size"
    )
    parser.add_argument("--install-only", action="store_true", help="bring the peers here and measure nothing")
    return parser.parse_args()


def _workloads(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in NAMES]:
        raise argparse.ArgumentTypeError(f"no workload is called {unknown[0]!r}; known: {', '.join(NAMES)}")
    return names


def _peers(text: str) -> list[str]:
    try:
        return [] if text == "none" else chosen(text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


if __name__ == "__main__":
    sys.exit(main())
