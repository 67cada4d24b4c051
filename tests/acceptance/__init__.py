"""Programs that a person runs for minutes or hours: faults, attacks, clients and agents of others, clusters, corpora.

Each is run from the checkout: `python -m tests.acceptance.chaos --seconds 120`. Tests run slices of some of them.
"""
