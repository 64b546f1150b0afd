"""How the server groups clients, from released values alone."""
