"""The state_dict as a tree: paths, leaves, values, objects with states of their own, names of optimizer variables."""
