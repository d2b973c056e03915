"""Real ranks for tests: processes that run Paddle's collectives over gloo on the CPU.

    pool.py     ranks that are started once per test run, kept warm and sent functions to run
    fresh.py    ranks that are started for one test alone, which may kill them
    groups.py   what a test function uses inside a rank: process groups of the first n ranks
    world.py    starts and ends the processes of one world
    forks.py    how it starts them: by forks of a process that has imported Paddle already
    source.py   the program of that process
    remote.py   exceptions of a rank as plain data
    worker.py   the program that each rank runs

A test asks for the ``pool`` fixture and sends a function that lives at the top level of an importable module::

    def test_sum(pool):
        assert pool.run(cases_pool.sum_of_ranks, ranks=4) == [6.0, 6.0, 6.0, 6.0]

Nothing but ``groups.py``, ``source.py`` and ``worker.py`` imports paddle, so the process that runs pytest need not.
"""
