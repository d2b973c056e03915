"""Tests of a folder of checkpoints: the commit, leases, verifying, rebuilding; paddle never imported."""
