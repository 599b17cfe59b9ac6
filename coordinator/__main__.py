"""`python -m coordinator`: the coordinator process."""

from common.command_line import process_command, run_command
from common.config import CoordinatorConfig

main = process_command(
    "coordinator", CoordinatorConfig, "coordinator.server:serve", help="Knows the nodes and routes requests to them."
)

if __name__ == "__main__":
    run_command(main)
