"""Cancellable streaming calls: a pure lifecycle (call), a ZeroMQ shell (link), an in-process one (memory)."""
