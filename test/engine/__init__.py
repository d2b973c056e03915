"""Tests of the engine: simulated ranks (threads of this process), numpy tensors, paddle never imported."""
