"""How the server groups clients, from released values alone: embedding, partition, evidence.

Everything here is ordinary post-processing of what was released with noise, so nothing here costs privacy. It
knows neither algorithms nor records.
"""
