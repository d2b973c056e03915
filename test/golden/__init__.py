"""What is promised to stay: a list of what users may call; and checkpoints that released versions of the format and
other libraries wrote, kept to show that they can be read."""
