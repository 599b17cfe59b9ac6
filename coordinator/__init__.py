"""The control plane: routing (core, server), the HTTP gateway, the launcher and the `baton` command."""
