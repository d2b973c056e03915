"""Words in what a load says of mismatches from which something else follows, such as advice.

Each has a name here, so that whoever rewords one changes nothing but the text.
"""

from __future__ import annotations

__all__ = ["A_TENSOR", "MEANT", "MISSING", "NO_ENTRY", "OF_TENSORS"]

A_TENSOR, OF_TENSORS, MISSING = "a tensor of shape", "a container of tensors", "missing"
"""What is stored at a path."""
MEANT = "meant?"
"""Behind a key that a user may have meant."""
NO_ENTRY = "no such entry in its object"
"""What a state_dict has where an object has nothing yet."""
