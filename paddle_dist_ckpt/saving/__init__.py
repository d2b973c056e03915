"""A save, from what each rank has to the commit, and the messages that its ranks exchange."""
