"""What every process shares: the words on the wire, calls, the engine, the model and its KV cache."""
