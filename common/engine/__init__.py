"""The engine: request, scheduler, loop (schedule -> execute -> update), the same on both pools."""
