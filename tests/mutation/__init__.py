"""Mutation testing with cosmic-ray: change one thing in a copy of the checkout; a test of its room has to fail.

    PYTHONPATH=tests python -m mutation.run --list                   the rooms
    PYTHONPATH=tests python -m mutation.run dropout layer_norm       these rooms; without a name all of them
    PYTHONPATH=tests python -m mutation.run --since main             only lines that changed since `main`

A room is some files of code and the tests that have to notice a change there (rooms.toml). Results are kept in out/: a
second call runs only what is missing or has changed.
"""
