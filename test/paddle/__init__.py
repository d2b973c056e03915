"""The public functions on Paddle's own tensors and on real ranks."""
