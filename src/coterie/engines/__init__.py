"""Who executes an algorithm's requests: one process, or sites over Flower (`flower/`).

An engine charges the ledger before it releases, draws the noise, and refuses what the plan did not declare.
Of algorithms it knows the protocol only. How a client learns is in `training`, how a run is told in
`experiment`.
"""
