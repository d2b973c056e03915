"""Checkpoints in the formats that others read: planned as files, and streamed into them in bounded memory."""
