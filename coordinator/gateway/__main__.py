"""`python -m coordinator.gateway`: the same command as `baton gateway`."""

from common.command_line import process_command, run_command
from common.config import GatewayConfig

main = process_command(
    "gateway", GatewayConfig, "coordinator.gateway.serve:serve", help="Serve the cluster over OpenAI's HTTP API."
)

if __name__ == "__main__":
    run_command(main)
