"""transformers: what differs between its versions, and parallel plans that it lacks."""
