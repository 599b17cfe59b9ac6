"""Pure decisions of the coordinator: state, routing policy, membership."""
