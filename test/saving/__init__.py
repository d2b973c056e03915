"""Tests of saves: simulated ranks (threads of this process), numpy tensors, paddle never imported."""
