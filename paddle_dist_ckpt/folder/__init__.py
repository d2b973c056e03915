"""A folder of checkpoints: ids, leases, the commit, reading one, verifying it, rebuilding its `.metadata`."""
