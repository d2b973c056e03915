"""Tests of loads: simulated ranks (threads of this process), numpy tensors, paddle never imported."""
