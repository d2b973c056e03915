"""Runs plans: writes and reads data files, exchanges data between ranks, commits."""
