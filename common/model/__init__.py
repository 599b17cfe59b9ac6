"""The model: loading, one batched forward pass, sampling, tokenising; and a fake one without torch."""
