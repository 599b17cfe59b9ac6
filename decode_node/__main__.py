"""`python -m decode_node` and `baton decode-node`."""

from common.command_line import process_command, run_command
from common.config import NodeConfig

main = process_command(
    "decode-node",
    NodeConfig,
    "decode_node.node:serve",
    help="A decode node: the home of requests; pulls their KV blocks and writes the answers.",
)

if __name__ == "__main__":
    run_command(main)
