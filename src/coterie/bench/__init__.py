"""Ours against peers doing the same work, in one run: sample gradients per second and whole rounds.

`work` makes random clients and our engine for them; `records` compares private training on records and whole
rounds of client-level learning; `peers` is what others do, `timing` lets everybody take turns. What is
measured of one machine beyond `coterie bench` belongs into the project's folder benchmarks/.
"""
