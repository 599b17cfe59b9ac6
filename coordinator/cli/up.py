"""`baton up`."""

from common.command_line import process_command, run_command
from coordinator.launcher.plan import UpConfig

main = process_command(
    "up", UpConfig, "coordinator.cli.cluster:serve", help="Start a whole cluster on this host; Ctrl-C stops it."
)

if __name__ == "__main__":
    run_command(main)
