"""A load, from what each rank wants to the restored objects, and the messages that its ranks exchange."""
