"""What every room uses: boxes, dtypes, memory, the table of shards, and the Protocols of what surrounds the library.

Depends on the standard library, numpy, ml_dtypes, msgspec and tqdm alone.
"""

import logging

from ..visible import is_made_visible

logging.getLogger("paddle_dist_ckpt").addFilter(is_made_visible)  # here, for no room that logs is without this one
