"""Plans, as pure functions of columns: who writes what, who needs which stored bytes, who reads for whom.

Nothing here does I/O, knows a framework or talks to a rank; the same input gives the same plan everywhere.
"""
