"""A page for looking at a checkpoint rather than reading: one HTML file, drawn by the browser that opens it."""
