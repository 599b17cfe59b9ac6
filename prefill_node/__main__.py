"""`python -m prefill_node` and `baton prefill-node`."""

from common.command_line import process_command, run_command
from common.config import NodeConfig

main = process_command(
    "prefill-node",
    NodeConfig,
    "prefill_node.node:serve",
    help="A prefill node: computes prompts and hands their KV blocks over.",
)

if __name__ == "__main__":
    run_command(main)
