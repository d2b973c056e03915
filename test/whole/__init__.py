"""Tests of saves and loads together: simulated ranks, numpy tensors, paddle never imported."""
